"""The comparison that decides whether a model may keep packed keys and values tells wrong from rounded."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import small_llama
from torch import Tensor
from transformers import PreTrainedModel

from lightning_mtrl.models.load import load_model
from lightning_mtrl.rollouts.cache import PackedCache
from lightning_mtrl.rollouts.forwards import Forward, TransformersForward
from lightning_mtrl.rollouts.lean import LeanDecoder
from lightning_mtrl.rollouts.packing import TRIED, _compare

SMOLLM2 = os.environ.get("LIGHTNING_MTRL_SMOLLM2", "")
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "random": small_llama,
    "tiny": lambda: load_model("tiny").model,
    "smollm2": lambda: load_model(SMOLLM2).model,
}
Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _own(mask: Tensor, positions: Tensor, shift: int) -> Tensor:
    """True where a slot is that of the token itself, or one so many behind it."""
    return torch.arange(mask.size(-1)) == positions[..., None] + shift


# Each takes and gives positions and mask of the new tokens of some rows.
WRONG: dict[str, Change] = {
    "positions begin anew": lambda p, m: (p - p.amin(1, keepdim=True), m),
    "no positions": lambda p, m: (torch.zeros_like(p), m),
    "no mask": lambda p, m: (p, torch.zeros_like(m)),
    "the next token is seen": lambda p, m: (p, m.masked_fill(_own(m, p, 1), 0.0)),
    "the token before is not seen": lambda p, m: (p, m.masked_fill(_own(m, p, -1), -torch.inf)),
    "the first token is not seen": lambda p, m: (
        p,
        m.masked_fill((torch.arange(m.size(-1)) == 0) & (p[..., None] > 0), -torch.inf),
    ),
}


class Changed:
    """A forward that is given other positions, or another mask."""

    def __init__(self, forward: Forward, change: Change) -> None:
        self._forward, self._change = forward, change

    def __call__(
        self, tokens: Tensor, positions: Tensor, real: Tensor | None, mask: Tensor, cache: PackedCache
    ) -> Tensor:
        positions, mask = self._change(positions, mask)
        return self._forward(tokens, positions, real, mask, cache)


@pytest.fixture(
    scope="module",
    params=["random", "tiny", pytest.param("smollm2", marks=pytest.mark.real_lm)],
)
def original(request: pytest.FixtureRequest) -> Any:
    if request.param == "smollm2" and not SMOLLM2:
        pytest.skip("set LIGHTNING_MTRL_SMOLLM2 to the folder of SmolLM2-135M-Instruct")
    return MODELS[request.param]().eval()


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def model(original: Any, request: pytest.FixtureRequest) -> Any:
    return original.to(request.param)


@pytest.mark.parametrize("forward", [TransformersForward, lambda model: LeanDecoder(model, max(TRIED))])
def test_a_right_forward_differs_by_rounding_alone(model: Any, forward: Callable[[Any], Forward]) -> None:
    assert _compare(model, forward(model)) == ""


def test_a_gap_of_one_position_is_found_in_float32(model: Any) -> None:
    # In bfloat16 the embedded model's logits hardly tell it from rounding.
    full = copy.deepcopy(model).float()
    gap = Changed(TransformersForward(full), lambda p, m: (torch.where(p[:, :1] > 0, p + 1, p), m))
    assert "differ from those of a plain forward" in _compare(full, gap)


@pytest.mark.parametrize("change", WRONG)
def test_a_wrong_mask_or_wrong_positions_are_found(model: Any, change: str) -> None:
    assert "differ from those of a plain forward" in _compare(
        model, Changed(TransformersForward(model), WRONG[change])
    )
