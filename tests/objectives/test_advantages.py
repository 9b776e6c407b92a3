from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_mtrl.objectives import (
    gae,
    grpo_advantages,
    q_baseline_advantages,
    returns_to_go,
    rloo_advantages,
    rloo_centred_rewards,
)

seeds = st.integers(0, 2**30)


def _double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_next_value_after_a_response_is_that_of_the_next_response() -> None:
    mask = torch.tensor([[True, False, False, True]])
    values, rewards = _double(1, math.nan, 99, 3)[None], _double(0, math.inf, 99, 10)[None]
    advantages, returns = gae(rewards, values, mask, gamma=0.5, gae_lambda=0.0)
    assert advantages.tolist() == [[0.5, 0, 0, 7]]
    assert returns.tolist() == [[1.5, 0, 0, 10]]


def test_turns_and_tokens_have_their_own_discount_and_lambda() -> None:
    mask = torch.tensor([[True, True, False, True]])
    values, rewards = _double(1, 2, 0, 4)[None], _double(0, 0, 0, 10)[None]
    advantages, _ = gae(rewards, values, mask, gamma=1.0, gae_lambda=1.0, turn_gamma=0.5, turn_lambda=0.5)
    # 10 - 4 = 6; 0.5 * 4 - 2 + 0.25 * 6 = 1.5; 2 - 1 + 1.5 = 2.5
    assert advantages.tolist() == [[2.5, 1.5, 0, 6]]
    by_index, _ = gae(rewards, values, mask, 1.0, 1.0, 0.5, 0.5, turn_index=torch.tensor([[1, 2, 0, 3]]))
    # each token a response of its own: 2 * 0.5 - 1 + 0.25 * 1.5
    assert by_index.tolist() == [[0.375, 1.5, 0, 6]]


def test_a_cut_off_row_goes_on_with_the_value_of_its_last_state() -> None:
    mask = torch.tensor([[True, False]])
    advantages, _ = gae(_double(1, 0)[None], _double(2, 0)[None], mask, 0.5, bootstrap=_double(8))
    assert advantages.tolist() == [[1 + 4 - 2, 0]]


@given(seeds)
def test_lambda_one_without_values_is_the_suffix_sum(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 7, generator=generator) < 0.6
    kept = rewards * mask
    suffix = kept.flip(1).cumsum(1).flip(1) * mask
    assert torch.allclose(returns_to_go(rewards, mask), suffix, atol=1e-12)


@given(seeds, st.lists(st.integers(1, 6), min_size=3, max_size=3))
def test_the_advantage_of_a_response_does_not_depend_on_how_many_tokens_it_has(
    seed: int, lengths: list[int]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    turn_rewards, turn_values = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    results = []
    for sizes in (lengths, [1, 1, 1]):
        index = torch.cat([torch.tensor([k + 1] * n + [0]) for k, n in enumerate(sizes)])[None]
        ends = torch.tensor(sizes).cumsum(0) + torch.arange(3) - 1
        rewards = torch.zeros(index.shape, dtype=torch.float64).index_copy(1, ends, turn_rewards[None])
        values = torch.where(index > 0, turn_values[(index - 1).clamp(min=0)], math.nan)
        got, _ = gae(rewards, values, index > 0, 1.0, 1.0, turn_gamma=0.8, turn_lambda=0.7, turn_index=index)
        results.append(got[0, ends])
    assert torch.allclose(results[0], results[1], atol=1e-12)


def test_each_score_is_compared_with_the_others_of_its_group() -> None:
    scores, group = _double(1, 10, 2, 30, 6), torch.tensor([7, 3, 7, 3, 7])
    assert rloo_advantages(scores, group).tolist() == [1 - 4, -20, 2 - 3.5, 20, 6 - 1.5]
    assert grpo_advantages(scores, group, divide_by_std=False).tolist() == [-2, -10, -1, 10, 3]
    # Unbiased standard deviation of (1, 2, 6) is the root of 7, that of (10, 30) of 200.
    scaled = [-2 / 7**0.5, -10 / 200**0.5, -1 / 7**0.5, 10 / 200**0.5, 3 / 7**0.5]
    assert grpo_advantages(scores, group, epsilon=0).tolist() == pytest.approx(scaled)


@given(st.floats(-1e6, 1e6), st.integers(2, 9), st.sampled_from([torch.float32, torch.float64]))
def test_a_group_of_equal_scores_has_advantages_of_exactly_zero(
    score: float, size: int, dtype: torch.dtype
) -> None:
    scores = torch.full((2 * size,), score, dtype=dtype)
    assert rloo_advantages(scores, size).tolist() == [0] * 2 * size
    assert grpo_advantages(scores, size).tolist() == [0] * 2 * size
    assert grpo_advantages(scores, size, divide_by_std=False).tolist() == [0] * 2 * size


@given(seeds, st.integers(2, 6))
def test_advantages_of_a_group_sum_to_zero_and_follow_their_scores(seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(3 * size, generator=generator, dtype=torch.float64)
    order = torch.randperm(3 * size, generator=generator)
    group = torch.arange(3 * size) // size
    for estimate in (rloo_advantages, grpo_advantages):
        advantages = estimate(scores, size)
        assert torch.allclose(advantages.view(3, size).sum(1), torch.zeros(3).double(), atol=1e-12)
        assert torch.allclose(estimate(scores[order], group[order]), advantages[order], atol=1e-12)
        assert torch.allclose(estimate(scores + 5, size), advantages, atol=1e-9)


def test_a_group_of_one_has_no_others_and_no_spread() -> None:
    alone = torch.tensor([0, 0, 1])
    with pytest.raises(ValueError, match="only one score"):
        rloo_advantages(_double(1, 2, 3), alone)
    with pytest.raises(ValueError, match="only one row"):
        rloo_centred_rewards(torch.ones(3, 1), torch.ones(3, 1, dtype=torch.bool), alone)
    assert grpo_advantages(_double(1, 3, 8), alone, epsilon=0.0)[:2].tolist() == pytest.approx(
        [-(0.5**0.5), 0.5**0.5]
    )
    assert grpo_advantages(_double(1, 3, 8), alone)[2].item() == 0


def test_scores_that_do_not_divide_into_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="5 scores do not divide into groups of 2"):
        rloo_advantages(torch.zeros(5), 2)


@given(seeds)
def test_the_released_form_is_leave_one_out_where_each_row_has_one_reward(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(6, generator=generator, dtype=torch.float64)
    places = torch.nn.functional.one_hot(torch.randint(0, 4, (6,), generator=generator), 4).bool()
    rewards = torch.where(places, scores[:, None], math.nan)
    centred = rloo_centred_rewards(rewards, places, 3)
    assert torch.allclose(centred.sum(1), rloo_advantages(scores, 3), atol=1e-12)


def test_the_baseline_of_a_state_is_the_mean_q_of_other_samples() -> None:
    q, others = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.0, 1.0, 2.0], [3.0, 3.0, 6.0]])
    assert q_baseline_advantages(q, others).tolist() == [[0, 1], [-1, 0]]
