from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lightning_mtrl.errors import UserError
from lightning_mtrl.rollouts.sampling import SamplingConfig, sample_tokens

PROBABILITIES = torch.tensor([[0.1, 0.2, 0.3, 0.4]])


def _draw(logits: Tensor, numbers: list[float], **settings: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = logits.expand(len(numbers), -1)
    return sample_tokens(rows, torch.tensor(numbers), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 1.0),
        ("max_response_tokens", 0),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(key: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"sampling\.{key} is {value}"):
        SamplingConfig(**{key: value})  # type: ignore[arg-type]


def test_a_uniform_number_picks_the_token_whose_interval_holds_it() -> None:
    tokens, plain, drawn = _draw(PROBABILITIES.log(), [0.0, 0.05, 0.15, 0.35, 0.61, 0.999])
    assert tokens.tolist() == [0, 0, 1, 2, 3, 3]
    assert plain.exp().tolist() == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4, 0.4], abs=1e-6)
    assert drawn.tolist() == plain.tolist()


def test_temperature_two_flattens_what_is_drawn_and_leaves_the_plain_logprob() -> None:
    logits = torch.tensor([[0.2, 0.8]]).log()  # at temperature 2: sqrt(0.2) to sqrt(0.8), that is 1 to 2
    tokens, plain, drawn = _draw(logits, [0.3, 0.34], temperature=2.0)
    assert tokens.tolist() == [0, 1]
    assert plain.exp().tolist() == pytest.approx([0.2, 0.8], abs=1e-6)
    assert drawn.exp().tolist() == pytest.approx([1 / 3, 2 / 3], abs=1e-6)


def test_rows_have_their_own_temperature() -> None:
    logits = torch.tensor([[0.2, 0.8]]).log().expand(3, -1)
    heat = torch.tensor([0.0, 1.0, 2.0])
    tokens, plain, drawn = sample_tokens(logits, torch.tensor([0.0, 0.1, 0.3]), heat)
    assert tokens.tolist() == [1, 0, 0]
    assert plain.exp().tolist() == pytest.approx([0.8, 0.2, 0.2], abs=1e-6)
    assert drawn.exp().tolist() == pytest.approx([1.0, 0.2, 1 / 3], abs=1e-6)


def test_rows_have_their_own_min_p() -> None:
    floors = torch.tensor([0.0, 0.6])
    tokens, _, drawn = sample_tokens(PROBABILITIES.log().expand(2, -1), torch.zeros(2), 1.0, 0, 1.0, floors)
    assert tokens.tolist() == [0, 2]  # 0.6 of 0.4 cuts 0.1 and 0.2 off
    assert drawn.exp().tolist() == pytest.approx([0.1, 3 / 7], abs=1e-6)


def test_temperature_zero_is_greedy_and_certain() -> None:
    tokens, plain, drawn = _draw(PROBABILITIES.log(), [0.0, 0.9], temperature=0.0)
    assert tokens.tolist() == [3, 3]
    assert plain.exp().tolist() == pytest.approx([0.4, 0.4], abs=1e-6)
    assert drawn.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("heat", [0.7, 1.0, 1.6])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(5, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.1), (9, 0.7, 0.05)]
)
def test_the_distribution_drawn_from_is_that_of_transformers(
    heat: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(3)) * 2
    warpers = LogitsProcessorList([TemperatureLogitsWarper(heat)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    theirs = warpers(torch.empty(1, 0, dtype=torch.long), logits.clone()).softmax(-1)[0]
    numbers = torch.linspace(0, 0.9999, 4001)
    rows = logits.expand(len(numbers), -1)
    tokens, _, drawn = sample_tokens(rows, numbers, heat, top_k, top_p, min_p)
    assert set(tokens.tolist()) == set(theirs.nonzero().flatten().tolist())
    torch.testing.assert_close(drawn.exp(), theirs[tokens], atol=1e-6, rtol=1e-5)
    shares = torch.bincount(tokens, minlength=30) / len(numbers)
    torch.testing.assert_close(shares, theirs, atol=1e-3, rtol=0)


def test_no_uniform_number_leads_to_a_token_that_was_cut_off() -> None:
    logits = torch.zeros(1, 1000)
    logits[:, 500:] = -torch.inf
    tokens, plain, _ = _draw(logits, [1 - 2**-24, 1.0, 0.99999999])
    assert tokens.tolist() == [499, 499, 499]
    assert plain.tolist() == pytest.approx([-math.log(500)] * 3, abs=1e-5)


def test_half_precision_logits_give_float32_logprobs() -> None:
    tokens, plain, _ = sample_tokens(torch.zeros(2, 7, dtype=torch.bfloat16), torch.tensor([0.1, 0.9]))
    assert plain.dtype == torch.float32
    assert tokens.tolist() == [0, 6]
    assert plain.tolist() == pytest.approx([-math.log(7)] * 2, abs=1e-6)
