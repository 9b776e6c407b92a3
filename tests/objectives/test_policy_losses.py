from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_mtrl.objectives import (
    clipped_policy_loss,
    clipped_surrogate,
    is_clipped,
    is_dual_clipped,
    reinforce_loss,
    sequence_geometric_ratio,
    sequence_product_ratio,
    token_ratio,
    token_weights,
    turn_geometric_ratio,
    turn_index_of,
    turn_product_ratio,
    with_token_gradient,
)

LOG2 = math.log(2)
INDEX = torch.tensor([[1, 1, 0, 2]])
LOGPROBS = torch.tensor([[2 * LOG2, 0.0, math.nan, -LOG2]], dtype=torch.float64)
BEHAVIOUR = torch.tensor([[0.0, 0.0, math.inf, 0.0]], dtype=torch.float64)
seeds = st.integers(0, 2**30)


def _random(seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    logprobs, behaviour, advantages = torch.randn(3, 3, 8, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 8, generator=generator) < 0.6
    return logprobs * 0.3, behaviour * 0.3, advantages, mask


def test_ratios_of_each_unit_by_hand() -> None:
    mask = INDEX > 0
    assert token_ratio(LOGPROBS, BEHAVIOUR, mask).tolist()[0] == pytest.approx([4, 1, 1, 0.5])
    assert turn_product_ratio(LOGPROBS, BEHAVIOUR, INDEX).tolist()[0] == pytest.approx([4, 4, 1, 0.5])
    assert turn_geometric_ratio(LOGPROBS, BEHAVIOUR, INDEX).tolist()[0] == pytest.approx([2, 2, 1, 0.5])
    assert sequence_product_ratio(LOGPROBS, BEHAVIOUR, mask).tolist()[0] == pytest.approx([2, 2, 1, 2])
    root = 2 ** (1 / 3)
    geometric = sequence_geometric_ratio(LOGPROBS, BEHAVIOUR, mask)
    assert geometric.tolist()[0] == pytest.approx([root, root, 1, root])


def test_the_four_corners_of_the_clip() -> None:
    ratio = torch.tensor([[1.5, 0.5, 1.5, 0.5]])
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    losses = clipped_surrogate(ratio, advantages, mask, 0.2, 0.4)
    assert losses.tolist()[0] == pytest.approx([-1.4, -0.5, 1.5, 0.8])
    assert is_clipped(ratio, advantages, 0.2, 0.4).tolist() == [[True, False, False, True]]
    assert is_clipped(ratio, advantages, 0.5, 0.5).tolist() == [[False] * 4]


def test_the_dual_clip_bounds_only_negative_advantages() -> None:
    ratio, advantages = torch.tensor([[9.0, 9.0, 2.0]]), torch.tensor([[1.0, -1.0, -1.0]])
    losses = clipped_surrogate(ratio, advantages, torch.ones(1, 3, dtype=torch.bool), 0.2, dual_clip=3.0)
    assert losses.tolist()[0] == pytest.approx([-1.2, 3, 2])
    assert is_dual_clipped(ratio, advantages, 3.0).tolist() == [[False, True, False]]


@given(seeds)
def test_at_equal_policies_the_loss_is_minus_the_advantage_and_its_gradient_that_of_reinforce(
    seed: int,
) -> None:
    logprobs, _, advantages, mask = _random(seed)
    gradients = []
    for loss in (clipped_policy_loss, reinforce_loss):
        leaf = logprobs.clone().requires_grad_()
        given_ = (
            (leaf, logprobs, advantages, mask) if loss is clipped_policy_loss else (leaf, advantages, mask)
        )
        losses = loss(*given_)
        losses.sum().backward()
        gradients.append(leaf.grad)
        if loss is clipped_policy_loss:
            assert torch.allclose(losses[mask], -advantages[mask])
    assert torch.allclose(gradients[0], gradients[1])


@given(seeds)
def test_units_agree_where_every_response_has_one_token(seed: int) -> None:
    logprobs, behaviour, _, mask = _random(seed)
    index = torch.arange(1, 9).expand(3, 8) * mask
    ratio = token_ratio(logprobs, behaviour, mask)
    assert torch.allclose(turn_product_ratio(logprobs, behaviour, index), ratio)
    assert torch.allclose(turn_geometric_ratio(logprobs, behaviour, index), ratio)


@given(seeds)
def test_one_clipped_term_a_response_has_the_gradient_of_the_whole_response(seed: int) -> None:
    """In the mean over responses every token gets the ratio of its response over their number."""
    logprobs, behaviour, _, mask = _random(seed)
    index, leaf = turn_index_of(mask), logprobs.clone().requires_grad_()
    ratio = turn_product_ratio(leaf, behaviour, index)
    weights = token_weights(mask, "response", dtype=torch.float64)
    (weights * ratio).sum().backward()
    number = max(1, int(index.max(1).values.sum()))
    assert torch.allclose(leaf.grad, torch.where(mask, ratio.detach(), 0.0) / number)


@given(seeds)
def test_the_token_gradient_changes_no_value_and_reaches_one_token_only(seed: int) -> None:
    logprobs, behaviour, advantages, mask = _random(seed)
    leaf = logprobs.clone().requires_grad_()
    ratio = sequence_geometric_ratio(leaf, behaviour, mask)
    carried = with_token_gradient(ratio, leaf, mask)
    assert torch.allclose(carried, ratio)
    (carried * advantages).sum().backward()
    assert torch.allclose(leaf.grad, torch.where(mask, ratio.detach() * advantages, 0.0))


@given(seeds)
def test_masked_rubbish_has_no_effect_in_any_unit(seed: int) -> None:
    logprobs, behaviour, advantages, mask = _random(seed)
    index = turn_index_of(mask)
    for unit, where in (
        (token_ratio, mask),
        (turn_product_ratio, index),
        (turn_geometric_ratio, index),
        (sequence_product_ratio, mask),
        (sequence_geometric_ratio, mask),
    ):
        results = []
        for rubbish in (0.0, math.nan):
            leaf = torch.where(mask, logprobs, rubbish).requires_grad_()
            ratio = unit(leaf, torch.where(mask, behaviour, -rubbish), where)
            losses = clipped_surrogate(
                ratio, torch.where(mask, advantages, rubbish), mask, 0.2, dual_clip=3.0
            )
            losses.sum().backward()
            results.append((losses.detach(), leaf.grad))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


def test_half_precision_counts_the_tokens_of_a_long_row() -> None:
    mask = torch.ones(1, 1000, dtype=torch.bool)
    logprobs = torch.full((1, 1000), 0.5, dtype=torch.bfloat16)
    ratio = sequence_geometric_ratio(logprobs, torch.zeros_like(logprobs), mask)
    assert ratio.float()[0, 0].item() == pytest.approx(math.exp(0.5), rel=0.02)


def test_a_far_ratio_is_finite() -> None:
    mask = torch.ones(1, 1, dtype=torch.bool)
    losses = clipped_policy_loss(torch.zeros(1, 1), torch.full((1, 1), -1e4), -torch.ones(1, 1), mask)
    assert losses.isfinite().all()


def test_ranges_that_make_no_sense_are_refused() -> None:
    one, mask = torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"above 0, got 0"):
        clipped_surrogate(one, one, mask, 0.0)
    with pytest.raises(ValueError, match=r"above 0, got 0.2 below 1 and -1"):
        clipped_surrogate(one, one, mask, 0.2, -1.0)
    with pytest.raises(ValueError, match=r"dual_clip must be above 1, got 1"):
        clipped_surrogate(one, one, mask, dual_clip=1.0)
