from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_mtrl.objectives import discounted_returns, lambda_returns, place_turn_rewards

REWARDS = torch.tensor([[1.0, 0.0, 2.0], [4.0, math.nan, math.inf]], dtype=torch.float64)
VALUES = torch.tensor([[9.0, 3.0, 5.0], [7.0, math.nan, math.nan]], dtype=torch.float64)
TURNS = torch.tensor([[True, True, True], [True, False, False]])


def test_one_step_targets_take_the_next_prediction() -> None:
    targets = lambda_returns(REWARDS, VALUES, TURNS, gamma=0.5, td_lambda=0.0)
    assert targets.tolist() == [[1 + 0.5 * 3, 0 + 0.5 * 5, 2], [4, 0, 0]]


def test_half_lambda_by_hand() -> None:
    targets = lambda_returns(REWARDS, VALUES, TURNS, gamma=0.5, td_lambda=0.5)
    # 2; 0.5 * (0.5 * 5 + 0.5 * 2) = 1.75; 1 + 0.5 * (0.5 * 3 + 0.5 * 1.75) = 2.1875
    assert targets.tolist() == [[2.1875, 1.75, 2], [4, 0, 0]]


def test_a_truncated_conversation_goes_on_with_the_value_of_its_last_state() -> None:
    bootstrap = torch.tensor([10.0, 20.0], dtype=torch.float64)
    returns = discounted_returns(REWARDS, TURNS, 0.5, bootstrap)
    assert returns.tolist() == [[1 + 0.25 * 7, 3.5, 7], [14, 0, 0]]
    one_step = lambda_returns(REWARDS, VALUES, TURNS, 0.5, 0.0, bootstrap)
    assert one_step.tolist() == [[2.5, 2.5, 7], [14, 0, 0]]


@given(st.integers(0, 2**30), st.floats(0, 1))
def test_lambda_one_ignores_the_predictions(seed: int, gamma: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    mask = torch.arange(5) < torch.randint(1, 6, (3, 1), generator=generator)
    with_values = lambda_returns(rewards, values, mask, gamma, 1.0)
    assert torch.equal(with_values, discounted_returns(rewards, mask, gamma))


@given(st.integers(0, 2**30), st.floats(0, 1), st.floats(0, 1))
def test_exact_predictions_are_a_fixed_point_for_every_lambda(
    seed: int, gamma: float, td_lambda: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    mask = torch.ones(3, 5, dtype=torch.bool)
    exact = discounted_returns(rewards, mask, gamma)
    again = lambda_returns(rewards, exact, mask, gamma, td_lambda)
    assert torch.allclose(again, exact, atol=1e-12)


def test_rewards_stand_on_the_last_token_of_their_turn_also_without_a_gap() -> None:
    index = torch.tensor([[0, 1, 1, 2, 0, 3], [1, 0, 0, 0, 2, 2]])
    rewards = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, math.nan]])
    assert place_turn_rewards(rewards, index).tolist() == [[0, 0, 1, 2, 0, 3], [4, 0, 0, 0, 0, 5]]


def test_a_turn_without_a_reward_is_refused() -> None:
    with pytest.raises(ValueError, match="up to 3, but a row has 2"):
        place_turn_rewards(torch.zeros(1, 2), torch.tensor([[1, 2, 3]]))
