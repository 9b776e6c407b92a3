from __future__ import annotations

import math

import pytest
from small_models import talk

from lightning_mtrl.conversation import Conversation
from lightning_mtrl.evaluation.pivotal import pivotal_recovery


def _talk(turns: int, outcome: float, pivotal_turn: int | None) -> Conversation:
    made = talk("c", [[4]] * turns, [0.0] * (turns - 1) + [outcome])
    made.metadata["pivotal_turn"] = pivotal_turn  # type: ignore[index]
    return made


def test_a_success_has_its_highest_and_a_failure_its_lowest_reward_at_the_pivotal_turn() -> None:
    conversations = [_talk(3, 1.0, 2), _talk(3, 1.0, 2), _talk(4, 0.25, 1), _talk(2, 0.0, 1)]
    rewards = [[0.1, 0.9, 0.2], [0.9, 0.1, 0.2], [-0.9, 0.3, 0.0, 0.1], [-0.1, -0.2]]
    found = pivotal_recovery(rewards, conversations)
    assert (found.successes, found.failures, found.share) == (0.5, 0.5, 0.5)
    assert math.isclose(found.chance, (1 / 3 + 1 / 3 + 1 / 4 + 1 / 2) / 4)
    assert found.conversations == 4


def test_conversations_that_say_nothing_are_left_out() -> None:
    found = pivotal_recovery([[0.5], [0.5, 0.1]], [_talk(1, 1.0, 1), _talk(2, 1.0, None)])
    assert found.conversations == 0
    assert math.isnan(found.share)


def test_equal_rewards_find_nothing() -> None:
    assert pivotal_recovery([[0.0, 0.0]], [_talk(2, 1.0, 1)]).share == 0.0


def test_rewards_of_other_turns_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rewards for the 3 turns"):
        pivotal_recovery([[0.0, 0.0]], [_talk(3, 1.0, 1)])
