"""The policy: token-level improvement against given advantages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_mtrl import objectives
from lightning_mtrl.batch import ImprovementBatch, TokenBatch
from lightning_mtrl.models.adapters import Backbone
from lightning_mtrl.modules.base import RatioModule, scored_logprobs, scored_tokens
from lightning_mtrl.modules.surrogate import ClipTerm
from lightning_mtrl.modules.value_head import ValueHead


@dataclass(frozen=True)
class KLTerm:
    """The KL penalty to the reference policy in the loss.

    Attributes:
        coef: weight of the penalty; 0 for none.
        estimator: per-token estimator; see `objectives.kl_penalty`. As a loss, "k3" has the gradient of the
            forward direction in expectation; "k2" and "k3+" have that of the reverse.
        direction: "reverse" is KL(policy || reference), as in RLHF; "forward" is KL(reference || policy).
    """

    coef: float = 0.0
    estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] = "k3"
    direction: Literal["reverse", "forward"] = "reverse"


class Policy(RatioModule):
    """A language model trained by clipped policy gradients on responses.

    It does not compute advantages; whoever fills an `ImprovementBatch` does.

    Args:
        backbone: the shared model.
        clip_range: half-width of the allowed probability ratio of a token; or, with all choices, a
            `ClipTerm`.
        kl: penalty to the reference policy in the loss.
        entropy_coef: weight of the entropy bonus, in reward per nat.
        learning_rate: of AdamW.
        weight_decay: of AdamW.
        role: name of the adapter.
    """

    def __init__(
        self,
        backbone: Backbone,
        clip_range: float | ClipTerm = 0.2,
        kl: KLTerm | None = None,
        entropy_coef: float = 0.0,
        learning_rate: float = 1e-5,
        weight_decay: float = 0.0,
        role: str = "policy",
    ) -> None:
        super().__init__(backbone, role, learning_rate, weight_decay)
        self.clip = clip_range if isinstance(clip_range, ClipTerm) else ClipTerm(clip_range)
        self.readers: tuple[ValueHead, ...] = ()
        self.kl = kl or KLTerm()
        self.kl_coef = self.kl.coef
        self.entropy_coef = entropy_coef

    def forward(self, batch: TokenBatch) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Log-probability and entropy in nats of each sampled token; 0 elsewhere.

        The entropy carries a gradient where the loss has an entropy bonus.
        """
        return self._scored(self.hidden(batch), batch)

    def logprobs(self, batch: TokenBatch) -> Float[Tensor, "B T"]:
        """Log-probability in nats of each sampled token; 0 elsewhere."""
        return scored_logprobs(self.backbone, self.role, batch)

    def training_step(self, batch: ImprovementBatch, batch_idx: int = 0) -> Float[Tensor, ""]:
        """Clipped surrogate plus KL penalty minus entropy bonus, summed with `batch.loss_weights`.

        The losses of modules that read the same hidden states are added; they leave the policy alone.

        Source: Schulman et al. 2017 (arXiv:1707.06347), Eq. 7.
        """
        hidden = self.hidden(batch)
        logprobs, entropy = self._scored(hidden, batch)
        ratio = self.clip.ratios(logprobs, batch)
        kl = self._kl(logprobs, batch)
        surrogate = self.clip.losses(ratio, batch)
        loss = self._weighted(surrogate + self.kl_coef * kl - self.entropy_coef * entropy, batch)
        self._log(loss, logprobs, ratio, kl, entropy, batch)
        for reader in self.readers:
            loss = loss + reader.loss(hidden.detach(), batch)
        return loss

    def _scored(
        self, hidden: Float[Tensor, "B T H"], batch: TokenBatch
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        return scored_tokens(self.backbone, self.role, hidden, batch, entropy_trained=self.entropy_coef != 0)

    def _kl(self, logprobs: Float[Tensor, "B T"], batch: ImprovementBatch) -> Float[Tensor, "B T"]:
        kl = objectives.kl_penalty(
            logprobs, batch.reference_logprobs, self.kl.estimator, self.kl.direction, batch.response_mask
        )
        if self.kl.direction == "forward":
            # That expectation is over the reference's samples; these were drawn by the behaviour policy.
            kl = kl * objectives.importance_weights(batch.reference_logprobs, batch.behaviour_logprobs)
        return kl

    def _weighted(self, values: Float[Tensor, "B T"], batch: ImprovementBatch) -> Float[Tensor, ""]:
        return (batch.loss_weights * objectives.zero_outside(values, batch.response_mask)).sum()

    @torch.no_grad()
    def _log(
        self,
        loss: Tensor,
        logprobs: Tensor,
        ratio: Tensor,
        kl: Tensor,
        entropy: Tensor,
        batch: ImprovementBatch,
    ) -> None:
        share = batch.loss_weights.sum().clamp(min=1e-12)
        self.log_metrics(
            "policy",
            {
                "loss": loss / share,
                "ratio": self._weighted(ratio, batch) / share,
                "clip_fraction": self._weighted(self.clip.clipped(ratio, batch), batch) / share,
                "dual_clip_fraction": self._weighted(self.clip.dual_clipped(ratio, batch), batch) / share,
                f"kl_{self.kl.estimator}_{self.kl.direction}": self._weighted(kl, batch) / share,
                "entropy": self._weighted(entropy, batch) / share,
            },
            weight=share,
        )
        deviation = torch.where(batch.response_mask, (ratio - 1).abs(), 0.0).max()
        self.log_metrics("policy", {"ratio_deviation": deviation}, combine="max")
        if batch.turn_index is not None:
            for unit, (fraction, number) in self.clip.clip_fractions(logprobs, batch).items():
                self.log_metrics("policy", {f"clip_fraction_{unit}": fraction}, weight=number)
