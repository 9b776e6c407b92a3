from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_mtrl.objectives import (
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    token_weights,
    turn_index_of,
    zero_outside,
)

NAN, INF = math.nan, math.inf


def _mask(rows: list[str]) -> torch.Tensor:
    return torch.tensor([[place == "x" for place in row] for row in rows])


def test_statistics_of_a_few_numbers() -> None:
    values = torch.tensor([[1.0, NAN, 2.0], [INF, 6.0, -INF]], dtype=torch.float64)
    mask = _mask(["x.x", ".x."])
    assert masked_sum(values, mask).item() == 9
    assert masked_mean(values, mask).item() == 3
    assert masked_sum(values, mask, dim=1).tolist() == [3, 6]
    assert masked_mean(values, mask, dim=1).tolist() == [1.5, 6]
    assert masked_var(values, mask).item() == 7
    assert masked_var(values, mask, unbiased=False).item() == pytest.approx(14 / 3)
    whitened = masked_whiten(values, mask)
    assert whitened[mask].tolist() == pytest.approx([-2 / 7**0.5, -1 / 7**0.5, 3 / 7**0.5])
    assert whitened[~mask].tolist() == [0, 0, 0]
    assert masked_whiten(values, mask, center=False)[mask].mean().item() == pytest.approx(3)


def test_an_empty_mask_gives_zero_and_a_backward_pass() -> None:
    for function in (masked_sum, masked_mean, masked_var, masked_whiten):
        values = torch.full((2, 3), NAN, requires_grad=True)
        result = function(values, torch.zeros(2, 3, dtype=torch.bool))
        assert result.abs().sum().item() == 0
        result.sum().backward()
        assert values.grad is not None
        assert values.grad.tolist() == [[0, 0, 0], [0, 0, 0]]


def test_one_element_whitens_to_zero_and_keeps_its_value_uncentred() -> None:
    values, mask = torch.tensor([[5.0, NAN]], dtype=torch.float64), _mask(["x."])
    assert masked_whiten(values, mask).tolist() == [[0, 0]]
    assert masked_whiten(values, mask, center=False).tolist() == [[5, 0]]
    assert masked_var(values, mask).item() == 0


@given(st.lists(st.booleans(), min_size=6, max_size=6), st.sampled_from([NAN, INF, -INF, 1e30]))
def test_masked_rubbish_changes_no_value_and_no_gradient(kept: list[bool], rubbish: float) -> None:
    mask = torch.tensor(kept).view(2, 3)
    clean = torch.arange(1.0, 7.0, dtype=torch.float64).view(2, 3)
    for function in (zero_outside, masked_sum, masked_mean, masked_var, masked_whiten):
        results = []
        for outside in (0.0, rubbish):
            values = torch.where(mask, clean, outside).requires_grad_()
            result = function(values, mask)
            (result * torch.arange(1.0, result.numel() + 1).view(result.shape)).sum().backward()
            results.append((result.detach(), values.grad))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
        assert results[1][1][~mask].abs().sum() == 0


def test_nan_inside_a_mask_is_not_hidden() -> None:
    values, mask = torch.tensor([[1.0, NAN]]), _mask(["xx"])
    for function in (masked_sum, masked_mean, masked_var, masked_whiten):
        assert function(values, mask).isnan().any()


def test_runs_are_numbered_in_each_row() -> None:
    mask = _mask([".xx..x", "x.x.x.", "......"])
    assert turn_index_of(mask).tolist() == [[0, 1, 1, 0, 0, 2], [1, 0, 2, 0, 3, 0], [0] * 6]


def test_weights_of_the_three_means() -> None:
    mask = _mask(["xx.xxxx", "x......", "......."])
    assert token_weights(mask, "token")[mask].tolist() == pytest.approx([1 / 7] * 7)
    by_response = [1 / 6, 1 / 6, *[1 / 12] * 4, 1 / 3]
    assert token_weights(mask, "response")[mask].tolist() == pytest.approx(by_response)
    by_conversation = [*[1 / 12] * 6, 1 / 2]
    assert token_weights(mask, "conversation")[mask].tolist() == pytest.approx(by_conversation)


def test_responses_that_touch_are_told_apart_by_their_turn_index() -> None:
    mask, index = _mask(["xxxx"]), torch.tensor([[1, 2, 2, 2]])
    weights = token_weights(mask, "response", index)
    assert weights.tolist()[0] == pytest.approx([1 / 2, 1 / 6, 1 / 6, 1 / 6])


@given(st.integers(0, 2**30), st.sampled_from(["token", "response", "conversation"]))
def test_weights_sum_to_one_and_lie_on_sampled_tokens(seed: int, mean_over: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(4, 9, generator=generator) < 0.5
    weights = token_weights(mask, mean_over, dtype=torch.float64)
    assert weights.sum().item() == pytest.approx(float(mask.any()))
    assert (weights[~mask] == 0).all()
    assert (weights[mask] > 0).all()


def test_no_token_at_all_gives_weights_of_zero() -> None:
    for mean_over in ("token", "response", "conversation"):
        assert token_weights(_mask(["...", "..."]), mean_over).tolist() == [[0] * 3] * 2


def test_another_mean_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'tokens'.*'token', 'response' or 'conversation'"):
        token_weights(_mask(["x"]), "tokens")
