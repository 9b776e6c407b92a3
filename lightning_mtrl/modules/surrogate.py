"""The clipped surrogate of the policy's loss: whose probability ratio is clipped, and where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_mtrl import objectives
from lightning_mtrl.batch import ImprovementBatch

RatioUnit = Literal["token", "turn_product", "turn_geometric", "sequence"]
Ratio = Callable[[Tensor, Tensor, Tensor], Tensor]


def _of_tokens(logprobs: Tensor, behaviour_logprobs: Tensor, turn_index: Tensor) -> Tensor:
    return objectives.token_ratio(logprobs, behaviour_logprobs, turn_index > 0)


def _of_rows(logprobs: Tensor, behaviour_logprobs: Tensor, turn_index: Tensor) -> Tensor:
    return objectives.sequence_geometric_ratio(logprobs, behaviour_logprobs, turn_index > 0)


RATIOS: dict[str, Ratio] = {
    "token": _of_tokens,
    "turn_product": objectives.turn_product_ratio,
    "turn_geometric": objectives.turn_geometric_ratio,
    "sequence": _of_rows,
}
# Every unit has one term in the loss when it weighs as much as the other units.
MEAN_OVER: dict[str, objectives.masked.MeanOver] = {
    "token": "token",
    "turn_product": "response",
    "turn_geometric": "response",
    "sequence": "conversation",
}


@dataclass(frozen=True)
class ClipTerm:
    """How far a probability ratio is followed.

    Attributes:
        low: how far below 1 a ratio is followed, above 0; and above 1 too without `high`.
        high: how far above 1; None for as far as below.
        dual: a negative advantage is followed up to this ratio only, above 1; None for no such limit.
        ratio: whose ratio: of each "token"; of the whole response, as "turn_product" of its tokens' ratios
            (ITPO's turn-level clipping as it is usually read) or as "turn_geometric" mean of them; of all
            responses of the row as "sequence", the geometric mean of GSPO. A geometric mean needs a range of
            a thousandth or less.
        token_gradient: the ratio of a larger unit passes its gradient to each token with that token's own
            advantage (GSPO-token); its value stays.
    """

    low: float = 0.2
    high: float | None = None
    dual: float | None = None
    ratio: RatioUnit = "token"
    token_gradient: bool = False

    def ratios(self, logprobs: Float[Tensor, "B T"], batch: ImprovementBatch) -> Float[Tensor, "B T"]:
        """Ratio of the unit that each sampled token belongs to; 1 elsewhere."""
        found = RATIOS[self.ratio](logprobs, batch.behaviour_logprobs, responses_of(batch))
        if self.token_gradient:
            return objectives.with_token_gradient(found, logprobs, batch.response_mask)
        return found

    def losses(self, ratio: Float[Tensor, "B T"], batch: ImprovementBatch) -> Float[Tensor, "B T"]:
        """Clipped surrogate of each sampled token; 0 elsewhere.

        Source: Schulman et al. 2017 (arXiv:1707.06347), Eq. 7, with the sign turned.
        """
        return objectives.clipped_surrogate(
            ratio, batch.advantages, batch.response_mask, self.low, self.high, self.dual
        )

    def clipped(self, ratio: Float[Tensor, "B T"], batch: ImprovementBatch) -> Float[Tensor, "B T"]:
        """1 where the clipped branch is in force, else 0."""
        return objectives.is_clipped(ratio, batch.advantages, self.low, self.high).float()

    def dual_clipped(self, ratio: Float[Tensor, "B T"], batch: ImprovementBatch) -> Float[Tensor, "B T"]:
        """1 where the limit on the ratio of a negative advantage is in force, else 0."""
        if self.dual is None:
            return torch.zeros_like(ratio)
        return objectives.is_dual_clipped(ratio, batch.advantages, self.dual).float()

    def clip_fractions(
        self, logprobs: Float[Tensor, "B T"], batch: ImprovementBatch
    ) -> dict[str, tuple[Float[Tensor, ""], Float[Tensor, ""]]]:
        """Share of tokens and of responses that this range clips, were each the unit; and their number."""
        mask, index = batch.response_mask, responses_of(batch)
        counts = {"token": mask.sum(), "turn": (objectives.turn_tokens(index) > 0).sum()}
        found = {}
        for name, unit in (("token", "token"), ("turn", "turn_product")):
            ratio = RATIOS[unit](logprobs, batch.behaviour_logprobs, index)
            weights = objectives.token_weights(mask, MEAN_OVER[unit], index)
            found[name] = ((weights * self.clipped(ratio, batch)).sum(), counts[name].float())
        return found


def responses_of(batch: ImprovementBatch) -> Int[Tensor, "B T"]:
    """Number of the response of each sampled token, 0 elsewhere."""
    return objectives.turn_index_of(batch.response_mask) if batch.turn_index is None else batch.turn_index
