"""H10: a reward belongs to its turn, and the discount counts turns, not tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_mtrl import objectives

REWARDS, RETURNS, GAMMA = [1.0, 0.0, 2.0], [2.62, 1.8, 2.0], 0.9


def _turn_index(responses: list[int], observations: list[int]) -> torch.Tensor:
    """Prompt of three tokens, then responses with observations between them, then padding."""
    index = [0] * 3
    for number, (tokens, gap) in enumerate(zip(responses, [*observations, 4], strict=True), start=1):
        index += [number] * tokens + [0] * gap
    return torch.tensor([index])


def test_the_returns_of_the_turns_are_those_worked_out_by_hand() -> None:
    returns = objectives.discounted_returns(torch.tensor([REWARDS]).double(), torch.ones(1, 3).bool(), GAMMA)
    assert returns.tolist()[0] == pytest.approx(RETURNS, abs=1e-12)


def test_each_reward_sits_on_the_last_token_of_its_response() -> None:
    index = _turn_index([5, 50, 2], [7, 11])
    placed = objectives.place_turn_rewards(torch.tensor([REWARDS]), index)
    last = [3 + 5 - 1, 3 + 5 + 7 + 50 - 1, 3 + 5 + 7 + 50 + 11 + 2 - 1]
    assert placed[0, last].tolist() == REWARDS
    assert placed.nonzero()[:, 1].tolist() == [last[0], last[2]]
    assert placed.sum().item() == sum(REWARDS)


lengths = st.lists(st.integers(1, 60), min_size=3, max_size=3)


@given(lengths, st.lists(st.integers(1, 20), min_size=2, max_size=2))
def test_the_token_view_gives_the_same_returns_for_any_lengths(responses: list[int], gaps: list[int]) -> None:
    """Without values and with lambda 1, the advantage of every token is the return of its turn."""
    index = _turn_index(responses, gaps)
    placed = objectives.place_turn_rewards(torch.tensor([REWARDS]).double(), index)
    got, _ = objectives.gae(
        placed, torch.zeros_like(placed), index > 0, 1.0, 1.0, turn_gamma=GAMMA, turn_index=index
    )
    for turn, expected in enumerate(RETURNS, start=1):
        of_turn = got[index == turn]
        assert of_turn.tolist() == pytest.approx([expected] * responses[turn - 1], abs=1e-12)


@given(lengths)
def test_a_discount_of_each_token_would_be_another_number(responses: list[int]) -> None:
    """About 0.66 for 5, 50 and 2 tokens: what a discount that counts tokens makes of the first turn."""
    index = _turn_index(responses, [7, 11])
    placed = objectives.place_turn_rewards(torch.tensor([REWARDS]).double(), index)
    first = objectives.returns_to_go(placed, index > 0, GAMMA)[0, 3].item()
    assert first == pytest.approx(GAMMA ** (responses[0] - 1) + 2 * GAMMA ** (sum(responses) - 1))
    assert objectives.returns_to_go(placed, index > 0)[0, 3].item() == 3


@given(st.lists(st.lists(st.floats(-2, 2), min_size=1, max_size=5), min_size=1, max_size=4), st.floats(0, 1))
def test_a_return_is_its_reward_and_the_discounted_return_of_the_next_turn(
    rows: list[list[float]], gamma: float
) -> None:
    width = max(len(row) for row in rows)
    rewards = torch.tensor([row + [9.0] * (width - len(row)) for row in rows], dtype=torch.float64)
    mask = torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]
    returns = objectives.discounted_returns(rewards, mask, gamma)
    assert (returns[~mask] == 0).all()
    for row, got in zip(rows, returns.tolist(), strict=True):
        following = [*got[1:], 0.0]
        for k, reward in enumerate(row):
            assert got[k] == pytest.approx(reward + gamma * following[k], abs=1e-12)
