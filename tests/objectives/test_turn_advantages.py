"""Advantages of rows with several rewards: hand numbers, identities, and where published code fails."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_mtrl import objectives

seeds = given(seed=st.integers(0, 2**30))
NAN = math.nan

# Rewards of rows with 2, 1 and 3 turns; the first two are one group of 2, or all are one of 3.
ENDS = torch.tensor([[True, False, True, False], [False, True, False, False], [True, True, False, True]])
REWARDS = torch.tensor([[1.0, NAN, 2.0, NAN], [NAN, 6.0, NAN, NAN], [4.0, 0.0, NAN, 2.0]])
ONE_GROUP = torch.tensor([5, 5, 5])


def released(rewards: Tensor, mask: Tensor, group: Tensor) -> Tensor:
    centred = objectives.rloo_centred_rewards(rewards, mask, group)
    return objectives.returns_to_go(centred, mask)


Form = Callable[[Tensor, Tensor, Tensor], Tensor]
EXACT: list[Form] = [objectives.rloo_of_returns, objectives.rloo_of_totals]
FORMS: list[Form] = [*EXACT, objectives.grpo_of_rewards, objectives.grpo_of_returns]
FORMS += [lambda r, m, g: objectives.grpo_of_rewards(r, m, g, divide_by_std=False, by_turn=True)]
FORMS += [lambda r, m, g: objectives.grpo_of_returns(r, m, g, divide_by_std=True, by_turn=True)]


def test_a_return_is_compared_with_the_others_at_the_turn_of_its_number() -> None:
    # Returns 3 2 | 6 | 6 2 2; the first row's second turn meets 0 (ended) and 2, and so on.
    got = objectives.rloo_of_returns(REWARDS, ENDS, ONE_GROUP)
    assert got.tolist() == [[3 - 6, 0, 2 - 1, 0], [0, 6 - 4.5, 0, 0], [6 - 4.5, 2 - 1, 0, 2 - 0]]


def test_a_total_is_compared_once_and_what_was_received_is_taken_off() -> None:
    # Totals 3, 6, 6.
    got = objectives.rloo_of_totals(REWARDS, ENDS, ONE_GROUP)
    assert got.tolist() == [[3 - 6, 0, 3 - 6 - 1, 0], [0, 6 - 4.5, 0, 0], [6 - 4.5, 1.5 - 4, 0, 1.5 - 4]]


def test_rewards_of_a_group_are_standardised_together_or_turn_by_turn() -> None:
    # All rewards: 1 2 6 4 0 2, mean 2.5.
    plain = objectives.grpo_of_rewards(REWARDS, ENDS, ONE_GROUP, divide_by_std=False)
    assert plain.tolist() == [[-2, 0, -0.5, 0], [0, 3.5, 0, 0], [-1.5, -3, 0, -0.5]]
    # First turns 1 6 4; second 2 0; the third alone.
    by_turn = objectives.grpo_of_rewards(REWARDS, ENDS, ONE_GROUP, divide_by_std=False, by_turn=True)
    wanted = [[-8 / 3 + 1, 0, 1, 0], [0, 7 / 3, 0, 0], [1 / 3 - 1, -1, 0, 0]]
    assert torch.allclose(by_turn, torch.tensor(wanted), atol=1e-6)
    # Squares around 2.5: 2.25 0.25 12.25 2.25 6.25 0.25 = 23.5 over 5.
    scaled = objectives.grpo_of_rewards(REWARDS, ENDS, ONE_GROUP)
    assert torch.allclose(scaled, plain / 4.7**0.5, atol=1e-5)


def test_returns_of_a_group_are_standardised_together_or_turn_by_turn() -> None:
    # Returns 3 2 6 6 2 2, mean 3.5.
    plain = objectives.grpo_of_returns(REWARDS, ENDS, ONE_GROUP, divide_by_std=False)
    assert plain.tolist() == [[-0.5, 0, -1.5, 0], [0, 2.5, 0, 0], [2.5, -1.5, 0, -1.5]]
    by_turn = objectives.grpo_of_returns(REWARDS, ENDS, ONE_GROUP, divide_by_std=False, by_turn=True)
    assert by_turn.tolist() == [[-2, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]]


@seeds
def test_with_one_reward_a_row_all_forms_of_leave_one_out_are_the_textbooks(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(6, generator=generator, dtype=torch.float64)
    mask = torch.nn.functional.one_hot(torch.randint(0, 4, (6,), generator=generator), 4).bool()
    rewards, group = torch.where(mask, scores[:, None], NAN), torch.tensor([3, 3, 3, 8, 8, 8])
    wanted = objectives.rloo_advantages(scores, group)
    for form in (*EXACT, released):
        assert torch.allclose(form(rewards, mask, group)[mask], wanted, atol=1e-12)


@seeds
@pytest.mark.parametrize("size", [2, 5])
def test_exact_advantages_of_whole_conversations_sum_to_zero_in_a_group(seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(2 * size, 7, generator=generator) < 0.5
    mask[:, 3] = True
    rewards = torch.where(mask, torch.randn(mask.shape, generator=generator, dtype=torch.float64), NAN)
    group = torch.arange(2 * size) // size
    first = mask & (mask.cumsum(1) == 1)
    for form in EXACT:
        at_start = torch.where(first, form(rewards, mask, group), 0.0).sum(1)
        assert torch.allclose(at_start.view(2, size).sum(1), torch.zeros(2).double(), atol=1e-9)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_group_whose_rows_are_all_alike_has_advantages_of_exactly_zero(
    form: Form, dtype: torch.dtype
) -> None:
    """Also where a mean of equal numbers is not that number in floating point."""
    mask = torch.tensor([[False, True, False, True]]).expand(7, 4)
    group = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    # Only where turns are compared with each other must they be alike too.
    first = 0.1 if form in (objectives.grpo_of_rewards, objectives.grpo_of_returns) else 0.0
    alike = torch.tensor([[NAN, first, NAN, 0.1]], dtype=dtype).expand(7, 4)
    if form is objectives.grpo_of_returns:
        mask = mask & torch.tensor([False, False, False, True])
    assert form(alike, mask, group).tolist() == [[0.0] * 4] * 7


def test_equal_outcomes_give_a_conversation_no_advantage_however_many_turns_it_has() -> None:
    """The released form holds rows with more turns to a higher baseline."""
    mask = torch.tensor([[True, True, True], [True, False, False]])
    shares = torch.tensor([[0.2, 0.2, 0.2], [0.6, NAN, NAN]], dtype=torch.float64)
    for form in EXACT:
        assert form(shares, mask, torch.tensor([0, 0]))[:, 0].tolist() == pytest.approx([0, 0], abs=1e-12)
    # 2 * 0.6 - 3 * (0.2 + 0.6) and 2 * 0.6 - (0.2 + 0.6)
    got = released(shares, mask, torch.tensor([0, 0]))
    assert got[:, 0].tolist() == pytest.approx([-1.2, 0.4])


@pytest.mark.parametrize("form", [*EXACT, released])
def test_a_group_of_one_is_refused_where_others_are_needed(form: Form) -> None:
    with pytest.raises(ValueError, match="only one"):
        form(REWARDS, ENDS, torch.tensor([0, 0, 1]))


@pytest.mark.parametrize("form", FORMS[2:])
def test_a_group_of_one_has_no_advantage_where_a_mean_is_taken_off(form: Form) -> None:
    alone = torch.where(ENDS[1:2], REWARDS[1:2], 0.0)
    assert form(alone, ENDS[1:2], torch.tensor([4])).tolist() == [[0.0] * 4]


@pytest.mark.parametrize("form", [*FORMS, released])
def test_groups_of_any_size_in_any_order_and_rows_without_a_response(form: Form) -> None:
    """5 rows in groups of 2 and 3, mixed; the fourth row said nothing."""
    generator = torch.Generator().manual_seed(1)
    group = torch.tensor([9, 2, 9, 2, 2])
    mask = torch.rand(5, 6, generator=generator) < 0.6
    mask[3] = False
    rewards = torch.where(mask, torch.randn(5, 6, generator=generator), NAN)
    got = form(rewards, mask, group)
    assert got.isfinite().all()
    assert not got[~mask].any()
    apart = torch.zeros_like(got)
    for number in (9, 2):
        rows = group == number
        apart[rows] = form(rewards[rows], mask[rows], group[rows])
    assert torch.allclose(got, apart, atol=1e-6)


def test_tokens_get_the_advantage_of_the_next_reward() -> None:
    response = torch.tensor([[True, True, False, True, True, False]])
    ends = torch.tensor([[False, True, False, False, True, False]])
    advantages = torch.tensor([[NAN, 0.1, NAN, NAN, -3.0, NAN]])
    wanted = torch.tensor([[0.1, 0.1, 0, -3, -3, 0]])
    assert torch.equal(objectives.spread_back(advantages, ends, response), wanted)
    assert torch.equal(objectives.spread_back(advantages, ends & False, response), wanted * 0)


def test_whitened_over_turns_every_response_weighs_the_same() -> None:
    index = torch.tensor([[1, 1, 1, 0, 2], [1, 0, 0, 0, 0]])
    advantages = torch.tensor([[1.0, 1, 1, NAN, 2], [6.0, NAN, NAN, NAN, NAN]])
    got = objectives.whiten_turns(advantages, index, epsilon=0.0)
    # Turns 1 2 6: mean 3, unbiased variance 7.
    wanted = torch.tensor([[-2.0, -2, -2, 0, -1], [3.0, 0, 0, 0, 0]]) / 7**0.5
    assert torch.allclose(got, wanted, atol=1e-6)


def test_whitening_of_nothing_of_one_turn_and_of_equal_turns_is_zero() -> None:
    index = torch.tensor([[0, 1, 1, 0]])
    for numbers in (index * 0, index, torch.tensor([[1, 0, 2, 2]])):
        same = torch.where(numbers > 0, 2.5, NAN)
        assert objectives.whiten_turns(same, numbers).tolist() == [[0.0] * 4]
