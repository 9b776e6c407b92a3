from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_mtrl import objectives

seeds = given(seed=st.integers(0, 2**30))
NAN = math.nan


def rollouts(seed: int, rows: int = 4, width: int = 14) -> tuple[Tensor, Tensor]:
    """Token values, with NaN outside responses, and the number of the response of each token."""
    generator = torch.Generator().manual_seed(seed)
    index = objectives.turn_index_of(torch.rand(rows, width, generator=generator) < 0.6)
    values = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    return torch.where(index > 0, values, NAN), index


def weights_of(values: Tensor, index: Tensor, eta: float) -> Tensor:
    present = objectives.turn_tokens(index) > 0
    return objectives.norm_itpo_weights(objectives.turn_sums(values, index), present, eta)


@seeds
@pytest.mark.parametrize("eta", [0.05, 0.4, 20.0])
def test_the_shares_of_an_outcome_are_positive_and_sum_to_it(seed: int, eta: float) -> None:
    values, index = rollouts(seed)
    weights = weights_of(values, index, eta)
    present = objectives.turn_tokens(index) > 0
    outcome = torch.rand(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert (weights[present] >= 0).all()
    assert torch.allclose((weights * outcome[:, None]).sum(1)[present.any(1)], outcome[present.any(1)])


@seeds
def test_the_order_of_conversations_and_what_is_masked_have_no_influence(seed: int) -> None:
    values, index = rollouts(seed)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(weights_of(values[order], index[order], 0.4), weights_of(values, index, 0.4)[order])
    padded = torch.nn.functional.pad(values, (0, 3), value=7.0), torch.nn.functional.pad(index, (0, 3))
    assert torch.equal(weights_of(*padded, 0.4), weights_of(values, index, 0.4))


@seeds
def test_a_large_eta_splits_evenly_and_a_small_one_gives_all_to_one_turn(seed: int) -> None:
    values, index = rollouts(seed)
    present = objectives.turn_tokens(index) > 0
    even = objectives.uniform_weights(present, torch.float64)
    assert torch.allclose(weights_of(values, index, 1e9), even, atol=1e-6)
    sums = torch.where(present, objectives.turn_sums(values, index), -math.inf)
    best = torch.zeros_like(even).scatter(1, sums.argmax(1, keepdim=True), 1.0) * present
    assert torch.allclose(weights_of(values, index, 1e-9), best)


@seeds
@pytest.mark.parametrize("constant", [-50.0, 3.0])
def test_weights_depend_on_differences_of_evidence_only(seed: int, constant: float) -> None:
    values, index = rollouts(seed)
    present, evidence = objectives.turn_tokens(index) > 0, objectives.turn_sums(values, index)
    shifted = objectives.norm_itpo_weights(evidence + constant, present, 0.4)
    assert torch.allclose(shifted, objectives.norm_itpo_weights(evidence, present, 0.4), atol=1e-9)


@seeds
@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_with_the_batch_maximum_the_scale_of_rewards_cancels(seed: int, factor: float) -> None:
    values, index = rollouts(seed)
    rewards = objectives.implicit_rewards(values, index > 0, 1.0)
    scaled = objectives.scaled_by_batch_max(factor * rewards)
    # Up to the 1e-6 that guards the division.
    assert torch.allclose(objectives.scaled_by_batch_max(rewards), scaled, atol=1e-3)
    assert scaled.flip(1).cumsum(1).abs().max() <= 1


def test_the_batch_maximum_of_rewards_that_are_all_zero_leaves_them_zero() -> None:
    assert not objectives.scaled_by_batch_max(torch.zeros(2, 3)).any()
    assert not objectives.scaled_by_batch_max(torch.zeros(2, 0)).any()


def test_sums_and_scaled_means_agree_where_all_responses_have_one_length() -> None:
    index = torch.tensor([[1, 1, 0, 2, 2], [0, 1, 1, 0, 0]])
    values = torch.tensor([[1.0, 2.0, NAN, 3.0, 5.0], [NAN, 8.0, 1.0, NAN, NAN]])
    assert objectives.turn_sums(values, index).tolist() == [[3, 8], [9, 0]]
    assert objectives.scaled_turn_means(values, index).tolist() == [[3, 8], [9, 0]]
    assert objectives.turn_means(values, index).tolist() == [[1.5, 4], [4.5, 0]]
    # Lengths 1 and 3, mean 2: the mean of a response counts twice.
    uneven = torch.tensor([[1, 0, 2, 2, 2]])
    assert objectives.scaled_turn_means(torch.tensor([[4.0, NAN, 1, 2, 3]]), uneven).tolist() == [[8, 4]]


@seeds
@pytest.mark.parametrize("beta", [0.001, 5.0])
def test_token_rewards_sum_to_turn_rewards_and_these_to_the_logit_of_the_loss(seed: int, beta: float) -> None:
    values, index = rollouts(seed)
    rewards = objectives.implicit_rewards(values, index > 0, beta)
    scores = objectives.trajectory_scores(values, index > 0, beta)
    assert torch.allclose(rewards.sum(1), scores)
    assert torch.allclose(objectives.turn_sums(rewards, index).sum(1), scores)


@given(seed=st.integers(0, 2**30), length=st.integers(1, 5))
def test_with_responses_of_one_length_all_evidence_that_keeps_size_is_the_sum(seed: int, length: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    turns = torch.randint(1, 4, (4,), generator=generator)
    order = torch.arange(4 * length).repeat(4, 1)
    index = torch.where(order < length * turns[:, None], order // length + 1, 0)
    values = torch.randn(4, 4 * length, generator=generator, dtype=torch.float64)
    sums = objectives.turn_sums(values, index)
    assert torch.allclose(objectives.scaled_turn_means(values, index), sums)
    assert torch.allclose(length * objectives.turn_means(values, index), sums)


@given(seed=st.integers(0, 2**30), eta=st.floats(0.01, 100.0), length=st.integers(1, 5))
def test_a_conversation_of_one_turn_has_the_whole_outcome_there(seed: int, eta: float, length: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = 30 * torch.randn(3, length + 2, generator=generator, dtype=torch.float64)
    index = torch.zeros(3, length + 2, dtype=torch.int64)
    index[:, 1 : length + 1] = 1
    assert weights_of(values, index, eta).tolist() == [[1.0]] * 3
    scores = objectives.trajectory_scores(values, index > 0, 0.5)
    assert torch.allclose(objectives.turn_sums(0.5 * values, index)[:, 0], scores)


def test_a_row_without_a_response_has_no_turns_and_no_nan() -> None:
    index = torch.tensor([[0, 0, 0], [1, 0, 2]])
    values = torch.tensor([[NAN, NAN, NAN], [1.0, NAN, 1.0]])
    assert weights_of(values, index, 0.4).tolist() == [[0, 0], [0.5, 0.5]]
    assert objectives.token_fractions(index).tolist() == [[0, 0], [0.5, 0.5]]
    assert objectives.spread_by_length(torch.tensor([-1.0, -2.0]), index).tolist() == [[0, 0], [-1, -1]]
    present = objectives.turn_tokens(index) > 0
    assert objectives.uniform_weights(present).tolist() == [[0, 0], [0.5, 0.5]]
    assert objectives.trajectory_scores(values, index > 0, 0.1)[0] == 0
    nobody = torch.zeros(2, 3, dtype=torch.int64)
    assert objectives.turn_sums(values, nobody).shape == (2, 0)
    assert objectives.top_turn_share(objectives.turn_sums(values, nobody)).tolist() == [0, 0]


def test_proportional_weights_are_even_where_nothing_is_said() -> None:
    present = torch.tensor([[True, True, False], [True, True, True]])
    sizes = torch.tensor([[1.0, 3.0, NAN], [0.0, 0.0, 0.0]])
    wanted = torch.tensor([[0.25, 0.75, 0.0], [1 / 3, 1 / 3, 1 / 3]])
    assert torch.allclose(objectives.proportional_weights(sizes, present), wanted)


def test_top_share_and_entropy_of_weights() -> None:
    weights = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.0, 1.0, 0.0, 0.0]])
    assert objectives.top_turn_share(weights).tolist() == [0.25, 1.0]
    assert objectives.weight_entropy(weights).tolist() == pytest.approx([math.log(4), 0.0])


@pytest.mark.parametrize("wrong", [0.0, -1.0, NAN])
def test_a_scale_that_is_not_above_zero_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="eta"):
        objectives.norm_itpo_weights(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool), wrong)
    with pytest.raises(ValueError, match="beta"):
        objectives.implicit_rewards(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool), wrong)


def test_the_cross_entropy_of_saturated_logits_is_their_size_and_keeps_its_gradient() -> None:
    # log(1 - sigmoid(300)) is -300; a sigmoid in fp32 would be 1, and its logarithm infinite.
    scores = torch.tensor([300.0, -300.0, 300.0], requires_grad=True)
    losses = objectives.bce_loss(scores, torch.tensor([0.0, 1.0, 0.75]))
    losses.sum().backward()
    assert losses.tolist() == [300.0, 300.0, 75.0]
    assert scores.grad is not None
    assert scores.grad.tolist() == [1.0, -1.0, 0.25]


def test_the_pairwise_loss_is_the_mean_over_unequal_pairs_of_a_group() -> None:
    scores = torch.tensor([2.0, 0.0, 5.0, 5.0, 1.0], requires_grad=True)
    outcomes, group = torch.tensor([1.0, 0.0, 0.3, 0.3, 1.0]), torch.tensor([0, 0, 1, 1, 1])
    loss = objectives.pairwise_loss(scores, outcomes, group)
    # Pairs: 2 over 0, 1 over 5 twice. -log sigmoid(2) = 0.126928, -log sigmoid(-4) = 4.018150.
    assert loss.item() == pytest.approx((0.126928 + 2 * 4.018150) / 3, abs=1e-5)
    loss.backward()
    assert scores.grad is not None
    assert scores.grad.sum().item() == pytest.approx(0.0, abs=1e-6)


def test_groups_of_equal_outcomes_have_no_pairwise_loss_and_an_accuracy_of_one_half() -> None:
    scores, same, group = (
        torch.randn(4, requires_grad=True),
        torch.full((4,), 0.7),
        torch.tensor([0, 0, 1, 1]),
    )
    loss = objectives.pairwise_loss(scores, same, group)
    loss.backward()
    assert loss.item() == 0
    assert scores.grad is not None
    assert scores.grad.tolist() == [0, 0, 0, 0]
    assert objectives.pairwise_accuracy(scores, same, group).item() == 0.5
    assert objectives.zero_variance_groups(same, group).item() == 1.0
    assert objectives.zero_variance_groups(torch.tensor([1.0, 0.0, 2.0, 2.0]), group).item() == 0.5
