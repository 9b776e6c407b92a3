"""What the three trained modules share: a role on the backbone, its optimizer, and scored tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from jaxtyping import Float
from lightning import LightningModule
from torch import Tensor, nn

from lightning_mtrl.batch import TokenBatch
from lightning_mtrl.models.adapters import Backbone
from lightning_mtrl.models.logprobs import token_logprobs, token_logprobs_and_entropies
from lightning_mtrl.models.stored import copy_stored
from lightning_mtrl.modules.step_metrics import Combine, StepMetrics

HEAD = "head."  # before the names of a head's weights, where they are stored with a role's


class RoleModule(LightningModule):
    """A LightningModule that trains one role of a shared backbone.

    It owns the role's weights and its own heads; the base and the other roles are only borrowed.

    Args:
        backbone: the shared model.
        role: name of the role; created fresh (equal to the base) if the backbone lacks it.
        learning_rate: of AdamW.
        weight_decay: of AdamW.
        owns_role: False for a module that only reads the role's hidden states and trains its heads alone.

    Attributes:
        readers: modules that learn from this one's hidden states, in its passes.
    """

    readers: Sequence[RoleModule] = ()

    def __init__(
        self,
        backbone: Backbone,
        role: str,
        learning_rate: float,
        weight_decay: float = 0.0,
        owns_role: bool = True,
    ) -> None:
        super().__init__()
        if learning_rate < 0:
            raise ValueError(f"learning_rate must be >= 0, got {learning_rate}")
        self.backbone = backbone
        self.role = role
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.owns_role = owns_role
        self._step_metrics: StepMetrics | None = None
        if owns_role and role not in backbone.roles:
            backbone.add_role(role)

    def own_parameters(self) -> list[nn.Parameter]:
        """Trainable weights: the role's, if it is the module's own, and the heads'."""
        heads = [p for name, p in self.named_parameters() if not name.startswith("backbone.")]
        role = self.backbone.parameters_of(self.role) if self.owns_role else []
        return [p for p in [*role, *heads] if p.requires_grad]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over the module's own weights."""
        return torch.optim.AdamW(self.own_parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)

    def state(self) -> dict[str, Tensor]:
        """The module's own weights, on the CPU."""
        heads = {name: value.detach().cpu().clone() for name, value in self._heads().items()}
        return {**self.backbone.state_of(self.role), **heads} if self.owns_role else heads

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Put weights from `state` back.

        Raises:
            UserError: if names or shapes do not fit, as for another base or another head.
        """
        heads = {name: weights for name, weights in state.items() if name.startswith(HEAD)}
        others = {name: weights for name, weights in state.items() if name not in heads}
        copy_stored(type(self).__name__, heads if self.owns_role else state, self._heads())
        if self.owns_role:
            self.backbone.load_state_of(self.role, others)

    def _heads(self) -> dict[str, Tensor]:
        """The heads' weights by the names under which they are stored."""
        own = {name: w for name, w in self.state_dict().items() if not name.startswith("backbone.")}
        return {f"{HEAD}{name}": weights for name, weights in own.items()}

    def hidden(self, batch: TokenBatch, layer: int | None = None) -> Float[Tensor, "B T H"]:
        """Hidden states of the role for a batch; they carry gradients only to weights that are trained."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.owns_role):
            return self.backbone.hidden(
                self.role, batch.input_ids, batch.attention_mask, batch.position_ids, layer
            )

    @contextmanager
    def one_step(self) -> Iterator[StepMetrics]:
        """Keep what the parts of an optimizer step are like together, for `log_step`."""
        kept = StepMetrics()
        for module in (self, *self.readers):
            module._step_metrics = kept
        try:
            yield kept
        finally:
            for module in (self, *self.readers):
                module._step_metrics = None

    def log_step(self, metrics: StepMetrics) -> None:
        """Log what a whole optimizer step was like, once, as of a step in one part."""
        for name, value in metrics.values.items():
            self.log(name, value)

    def log_metrics(
        self, phase: str, values: dict[str, Any], weight: Tensor | float = 1.0, combine: Combine = "mean"
    ) -> None:
        """Log numbers as `phase`/name: of this batch in a plain Trainer, of a whole step inside `one_step`.

        Args:
            phase: first part of the names.
            values: the numbers, by the second part.
            weight: what they are means over: a share of the step's loss weights, or a number of turns,
                responses or tokens; a Trainer weighs the batches of an epoch by it, as a whole number.
            combine: what the parts of a step have together: the "mean" by their weights, or their "max".
        """
        for name, value in values.items():
            if self._step_metrics is not None:
                self._step_metrics.add(f"{phase}/{name}", value, weight, combine)
            else:
                self.log(f"{phase}/{name}", value, reduce_fx=combine, batch_size=max(1, round(float(weight))))


class RatioModule(RoleModule):
    """A role whose probabilities are compared with those of another one, so it trains without dropout.

    A ratio must compare the same network; with dropout it would differ from 1 where nothing was learned.
    """

    def train(self, mode: bool = True) -> Self:
        """Training mode, but without the adapters' dropout; a `Backbone` has no other."""
        super().train(mode)
        for module in self.backbone.modules():
            if isinstance(module, nn.Dropout):
                module.eval()
        return self

    def on_fit_start(self) -> None:
        """A plain `Trainer` leaves modules in the mode they came in, and another role may need dropout."""
        self.train()


def at_predecessor(hidden: Float[Tensor, "B T H"], batch: TokenBatch) -> Float[Tensor, "N H"]:
    """Hidden states that predict the sampled tokens, in the order of `batch.response_mask`'s true places."""
    rows, columns = batch.response_mask.nonzero(as_tuple=True)
    return hidden[rows, batch.predecessor[rows, columns]]


def scored_tokens(
    backbone: Backbone,
    role: str,
    hidden: Float[Tensor, "B T H"],
    batch: TokenBatch,
    entropy_trained: bool = True,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Log-probability and entropy in nats of every sampled token; 0 elsewhere.

    Only positions that predict a sampled token meet the output head. Without `entropy_trained` the entropy
    carries no gradient, and costs less.
    """
    predicting, targets = at_predecessor(hidden, batch), batch.input_ids[batch.response_mask]
    logprobs, entropy = token_logprobs_and_entropies(
        backbone.logit_head(role), predicting, targets, entropy_trained
    )
    return scatter_to_tokens(logprobs, batch), scatter_to_tokens(entropy, batch)


def scored_logprobs(backbone: Backbone, role: str, batch: TokenBatch) -> Float[Tensor, "B T"]:
    """Log-probability in nats of every sampled token under a role; 0 elsewhere."""
    hidden = backbone.hidden(role, batch.input_ids, batch.attention_mask, batch.position_ids)
    predicting, targets = at_predecessor(hidden, batch), batch.input_ids[batch.response_mask]
    return scatter_to_tokens(token_logprobs(backbone.logit_head(role), predicting, targets), batch)


def scatter_to_tokens(values: Float[Tensor, " N"], batch: TokenBatch) -> Float[Tensor, "B T"]:
    """Put one number a sampled token back into the batch's shape; 0 elsewhere."""
    return values.new_zeros(batch.input_ids.shape).masked_scatter(batch.response_mask, values)
