from __future__ import annotations

import random
from copy import deepcopy
from typing import Any

import pytest

from lightning_mtrl.environments import GymnasiumText
from lightning_mtrl.errors import UserError

gymnasium = pytest.importorskip("gymnasium", reason="the extra `games` is not installed")

LAKE: dict[str, Any] = {"render_mode": "ansi", "is_slippery": False}
MOVES = ["left", "down", "right", "up"]


class Echo(gymnasium.Env):  # type: ignore[misc]  # gymnasium has no types where it is not installed
    """Says back what it hears, and draws a word."""

    observation_space = gymnasium.spaces.Text(100)
    action_space = gymnasium.spaces.Text(100)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return f"number {self.np_random.integers(1000)}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return f"you said {action}", 0.5, action == "bye", action == "later", {}


gymnasium.register("EchoForTests-v0", entry_point=Echo, disable_env_checker=True)


def test_the_frozen_lake_is_crossed_by_words() -> None:
    lake = GymnasiumText("FrozenLake-v1", LAKE, MOVES, task="Reach G.")
    assert lake.reset(seed=0).text.startswith("Reach G.\n")
    answers = [lake.step(move) for move in ("down", "down", "Right", "right", " down ", "right")]
    assert [a.reward for a in answers] == [0.0] * 5 + [1.0]
    assert [a.terminated for a in answers] == [False] * 5 + [True]
    lake.reset(seed=0)
    fallen = [lake.step(move) for move in ("right", "down")][-1]  # the hole in the second row
    assert (fallen.reward, fallen.terminated, fallen.truncated) == (0.0, True, False)


def test_a_word_that_is_no_action_changes_nothing_and_three_in_a_row_are_the_end() -> None:
    lake = GymnasiumText("FrozenLake-v1", LAKE, MOVES)
    lake.reset(seed=0)
    said = lake.step("fly")
    assert said.observation == "Say one of: left, down, right, up."
    assert not lake.step(None).terminated
    assert not lake.step("down").terminated
    assert [lake.step("fly").terminated for _ in range(3)] == [False, False, True]


def test_equal_seeds_give_equal_luck_also_in_a_copy() -> None:
    def crossed(lake: GymnasiumText) -> list[str]:
        rng = random.Random(1)
        lake.reset(seed=5)
        return [lake.step(rng.choice(MOVES)).observation for _ in range(5)]

    slippery = GymnasiumText("FrozenLake-v1", {**LAKE, "is_slippery": True}, MOVES)
    assert crossed(deepcopy(slippery)) == crossed(slippery) == crossed(deepcopy(slippery))


def test_text_in_and_text_out_needs_no_names_and_keeps_the_last_two_flags_apart() -> None:
    echo = GymnasiumText("EchoForTests-v0")
    assert echo.reset(3).text == echo.reset(3).text != echo.reset(4).text
    assert echo.step("hello").observation == "you said hello"
    bye, later = echo.step("bye"), echo.step("later")
    assert (bye.terminated, bye.truncated, bye.reward) == (True, False, 0.5)
    assert (later.terminated, later.truncated) == (False, True)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("NoSuchLake-v1",), "NoSuchLake"),
        (("FrozenLake-v1", LAKE), "names for 4 actions"),
        (("FrozenLake-v1", LAKE, ["left"]), "names for 4 actions"),
        (("CartPole-v1", None, ["left", "right"]), "no text"),
    ],
)
def test_what_cannot_be_told_in_text_is_refused_when_it_is_made(arguments: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        GymnasiumText(*arguments)
