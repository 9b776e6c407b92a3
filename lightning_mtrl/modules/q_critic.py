"""The multi-turn Q-critic: the expected return of a response in a state."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lightning_mtrl import objectives
from lightning_mtrl.batch import ConversationBatch, TokenBatch, TurnFeatures
from lightning_mtrl.errors import UserError
from lightning_mtrl.models.adapters import Backbone
from lightning_mtrl.models.precision import in_float32
from lightning_mtrl.modules.base import RoleModule
from lightning_mtrl.modules.q_losses import QLoss, q_loss

ROUNDING = 1e-5  # a return may be so far out of a loss's range, since it is a sum of floats


class QCritic(RoleModule):
    """Q(s, a) for every response of a conversation, in one forward pass.

    It is not a token-level value function: there is one number for each response. Causal attention makes
    the pass over a whole conversation equal to one pass for each prefix.

    Args:
        backbone: the shared model; the critic's role starts as the base, not as the policy.
        loss: "bce" for returns in [0, 1], "mse" for any, "hl_gauss" for returns in [0, 1], or a loss of your
            own.
        gamma: discount for each response, in (0, 1].
        td_lambda: 1 for Monte Carlo returns; less mixes in the critic's own next values (SARSA(lambda)).
        read: where the head reads: "header" is the last token of the glue after the response, where a
            pretrained model already predicts the reaction; "end" is the response's last token.
        layer: hidden layer that the head reads, 1 being the first; None for the last.
        learning_rate: of AdamW.
        weight_decay: of AdamW.
        role: name of the adapter.
        trunk: "adapter" trains an adapter with the head; "frozen" reads the base as it is. A base that knows
            how people react has what a critic needs in its hidden states, and a head alone needs far fewer
            conversations; its inputs are computed once (`CriticInputs`).
        head_units: units of a hidden layer of the head; 0 for a linear head.
    """

    def __init__(
        self,
        backbone: Backbone,
        loss: str | QLoss = "bce",
        gamma: float = 0.95,
        td_lambda: float = 1.0,
        read: Literal["header", "end"] = "header",
        layer: int | None = None,
        learning_rate: float = 1e-4,
        weight_decay: float = 0.01,
        role: str = "critic",
        trunk: Literal["adapter", "frozen"] = "adapter",
        head_units: int = 0,
    ) -> None:
        owns_role = trunk == "adapter"
        super().__init__(backbone, role if owns_role else "base", learning_rate, weight_decay, owns_role)
        backbone.keep_base()  # for `read_base`
        self.loss_name = loss if isinstance(loss, str) else type(loss).__name__
        self.objective = q_loss(loss) if isinstance(loss, str) else loss
        self.gamma, self.td_lambda, self.read, self.layer = gamma, td_lambda, read, layer
        self.norm = nn.LayerNorm(backbone.hidden_size)
        inner = [nn.Linear(backbone.hidden_size, head_units), nn.GELU()] if head_units else []
        last = nn.Linear(head_units or backbone.hidden_size, self.objective.outputs)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.head = nn.Sequential(*inner, last)

    def forward(self, batch: TokenBatch | TurnFeatures) -> Float[Tensor, "B K O"]:
        """Raw outputs of the head for each response of a batch that has `turn_read` and `turn_end`.

        They are float32 in mixed precision too, and so are losses and values.
        """
        if isinstance(batch, TurnFeatures):
            read = batch.features
        else:
            read = self._at_turns(self.hidden(batch, self.layer), batch)
        return in_float32(lambda hidden: self.head(self.norm(hidden)), read)

    @torch.no_grad()
    def read_base(self, batch: TokenBatch) -> Float[Tensor, "B K H"]:
        """Hidden states of the frozen base where the head reads; with a frozen trunk, the head's inputs."""
        hidden = self.backbone.hidden(
            "base", batch.input_ids, batch.attention_mask, batch.position_ids, self.layer
        )
        return self._at_turns(hidden, batch)

    def _at_turns(self, hidden: Float[Tensor, "B T H"], batch: TokenBatch) -> Float[Tensor, "B K H"]:
        places: Tensor = getattr(batch, "turn_read" if self.read == "header" else "turn_end")
        return hidden.gather(1, places[..., None].expand(-1, -1, hidden.size(-1))).float()

    def values(self, batch: TokenBatch | TurnFeatures) -> Float[Tensor, "B K"]:
        """Predicted return of each response, in units of reward; no gradient."""
        with torch.no_grad():
            return self.objective.values(self(batch))

    def targets(
        self, batch: ConversationBatch | TurnFeatures, values: Float[Tensor, "B K"]
    ) -> Float[Tensor, "B K"]:
        """Regression targets of each turn.

        G_i = sum_j gamma^j r_{i+j+1} (Iterative PPO, arXiv:2511.21638, section 3) for `td_lambda` 1; for
        less, the lambda-return of SARSA with `values` as the next turns' Q.
        """
        return objectives.lambda_returns(
            batch.turn_rewards, values, batch.turn_mask, self.gamma, self.td_lambda
        )

    def check_returns(self, batch: ConversationBatch | TurnFeatures) -> None:
        """Refuse returns that the loss is not for; those of turns that carry no loss do not matter.

        Raises:
            UserError: for the first one; it names the conversation.
        """
        if self.objective.returns is None:
            return
        low, high = self.objective.returns
        returns = objectives.discounted_returns(batch.turn_rewards, batch.turn_mask, self.gamma)
        inside = (returns >= low - ROUNDING) & (returns <= high + ROUNDING)
        wrong = ~inside & (batch.turn_weights > 0)
        if bool(wrong.any()):
            row, turn = wrong.nonzero()[0].tolist()
            raise UserError(
                f"conversation {batch.ids[row]!r} has return {returns[row, turn].item():g} after its "
                f"response {turn + 1}, but the Q-critic's loss {self.loss_name!r} needs returns from {low:g} "
                f"to {high:g}. Scale the environment's rewards, or use evaluation.loss mse, which takes any."
            )

    def training_step(self, batch: ConversationBatch | TurnFeatures, batch_idx: int = 0) -> Float[Tensor, ""]:
        """Mean loss over the (state, response) pairs of the batch; every turn weighs the same."""
        loss = self.loss(batch)
        # A part of a step has a part of its loss; what is logged is the mean over the part.
        share = batch.turn_weights.sum().clamp(min=1e-12)
        self.log_metrics("critic", {"training_q_loss": loss.detach() / share}, weight=share)
        return loss

    def validation_step(self, batch: ConversationBatch, batch_idx: int = 0) -> None:
        """The same loss on held-out conversations; over an epoch it is the mean over all their turns."""
        turns = int((batch.turn_weights > 0).sum())
        self.log_metrics("critic", {"q_loss": self.loss(batch)}, weight=turns)

    def loss(self, batch: ConversationBatch | TurnFeatures) -> Float[Tensor, ""]:
        """Loss of the pairs, weighted by `turn_weights`, against the batch's `turn_targets` or its returns.

        Raises:
            UserError: for a return that the loss is not for.
        """
        self.check_returns(batch)
        raw = self(batch)
        targets = batch.turn_targets
        if targets is None:
            targets = self.targets(batch, self.objective.values(raw.detach()))
        losses = self.objective.loss(raw.flatten(0, 1), targets.flatten().to(raw.dtype))
        return (batch.turn_weights.flatten() * losses).sum()
