"""How a model goes on from packed keys and values: what any forward does, and the model's own.

Shape letters: R rows, Q new tokens of a row (at most), S slots, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lightning_mtrl.rollouts.cache import PackedCache


class Forward(Protocol):
    """One forward of a model over new tokens behind what the cache holds."""

    def __call__(
        self,
        tokens: Int[Tensor, "R Q"],
        positions: Int[Tensor, "R Q"],
        real: Bool[Tensor, "R Q"] | None,
        mask: Float[Tensor, "R Q S"],
        cache: PackedCache,
    ) -> Float[Tensor, "R V"]:
        """Write the new tokens' keys and values at the cache's placement; the logits behind the last column.

        Args:
            tokens: padded at the left.
            positions: 0 on padding.
            real: False on padding; None where Q is 1 and there is none.
            mask: added to the attention's scores.
            cache: aimed at these rows.
        """
        ...


class TransformersForward:
    """The model's own forward."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(
        self, tokens: Tensor, positions: Tensor, real: Tensor | None, mask: Tensor, cache: PackedCache
    ) -> Tensor:
        output = self._model(
            input_ids=tokens,
            attention_mask=mask[:, None],
            position_ids=positions,
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits
