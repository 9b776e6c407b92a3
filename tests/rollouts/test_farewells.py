from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from typing import Any

import fake_verifiers
import guessing_games
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_mtrl.environments import Scored, Verifiers
from lightning_mtrl.environments.protocol import Observation, Transition
from lightning_mtrl.errors import UserError
from lightning_mtrl.rollouts.collector import Collector
from lightning_mtrl.rollouts.farewells import LATE, Farewells
from lightning_mtrl.rollouts.results import Rollouts
from lightning_mtrl.rollouts.sampling import SamplingConfig

CLOSED: list[int] = []


class Numbers:
    """A chat whose texts are numbers, each its own token; a prompt is as long as it says."""

    system_prompt = None
    pad_id, end_ids, header_ids = 0, (1,), (2,)

    def prompt_ids(self, messages: Any) -> list[int]:
        return [2, *[9] * len(messages[-1].content), 1, 3]

    def observation_ids(self, text: str, *, finished: bool = True, last: bool = False) -> list[int]:
        return [*([] if finished else [1]), 2, *[9] * len(text), 1, *([] if last else [3])]

    def response_text(self, ids: Any) -> str | None:
        return " ".join(str(i) for i in ids if i != 1) or None


class Room:
    """Has to be closed once for each conversation, whatever became of it."""

    def __init__(self, ends: Transition | Exception, begins: str | Exception = "x") -> None:
        self.ends, self.begins = ends, begins

    def reset(self, seed: int) -> Observation:
        self.seed = seed
        if isinstance(self.begins, Exception):
            raise self.begins
        return Observation(self.begins)

    def step(self, response: str | None) -> Transition:
        if isinstance(self.ends, Exception):
            raise self.ends
        return self.ends

    def close(self) -> Any:
        CLOSED.append(self.seed)


class WaitingRoom(Room):
    """The same, with a coroutine."""

    async def close(self) -> None:
        await asyncio.sleep(0.01)
        CLOSED.append(self.seed)


@pytest.fixture(autouse=True)
def none_closed() -> None:
    CLOSED.clear()


def _collected(environment: Any, chat: Any = None, max_turns: int = 2, **settings: Any) -> Rollouts:
    collector = Collector(
        environment,
        chat or Numbers(),
        sampling=SamplingConfig(max_response_tokens=4),
        context_length=64,
        max_turns=max_turns,
        rows=3,
        show_progress=False,
        **settings,
    )
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1)).eval()
    return collector.collect(model, conversations=8, seed=0, policy="p")


@pytest.mark.parametrize(
    "room", [Room, WaitingRoom, lambda *how: Scored(WaitingRoom(*how), lambda talk: 1.0)]
)
@pytest.mark.parametrize(
    ("how", "max_turns", "begun"),
    [
        ((Transition("y", terminated=True),), 2, 8),
        ((Transition("y", truncated=True),), 2, 8),
        ((Transition("y"),), 2, 8),  # the limit of turns
        ((Transition("y" * 30),), 9, 8),  # a full context
        ((RuntimeError("fell over"),), 2, 8),
        ((Transition("y", reward=float("nan")),), 2, 8),
        ((Transition("y"), RuntimeError("fell over")), 2, 8),
        ((Transition("y"), "x" * 99), 2, 3),  # no room: refused while the first three are begun
    ],
)
def test_each_environment_is_closed_once_however_its_conversation_ended(
    room: Any, how: Any, max_turns: int, begun: int
) -> None:
    with suppress(UserError):  # where all of them fail
        assert len(_collected(room(*how), max_turns=max_turns).conversations) == 8
    assert len(CLOSED) == begun
    assert set(Counter(CLOSED).values()) == {1}


class Broken(Exception):
    pass


class BreakingChat(Numbers):
    """Ends a collection in the middle, with its first conversations under way."""

    def response_text(self, ids: Any) -> str | None:
        raise Broken


@pytest.mark.parametrize("room", [Room, WaitingRoom])
def test_environments_of_a_stopped_collection_are_closed(room: type[Room]) -> None:
    with pytest.raises(Broken):
        _collected(room(Transition("y")), BreakingChat())
    assert len(CLOSED) == 3


class Unwilling(Room):
    """Does not let itself be closed."""

    def close(self) -> Any:
        raise RuntimeError("stuck")


def test_an_environment_that_cannot_be_closed_costs_nothing_and_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert len(_collected(Unwilling(Transition("y", terminated=True))).conversations) == 8
    assert caplog.messages == [
        "Environments did not clean up behind conversations: RuntimeError: stuck (8 times)"
    ]


class Slow(Room):
    """Takes longer to be closed than anybody waits."""

    async def close(self) -> None:
        await asyncio.sleep(60.0)


def test_an_environment_that_takes_too_long_to_be_closed_is_left() -> None:
    farewells = Farewells(patience_seconds=0.05)
    farewells.say(Slow(Transition("y")))
    farewells.finish()
    assert farewells.failed == {LATE: 1}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    guessing_games.CLEANED.clear()
    for name, module in fake_verifiers.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield
    guessing_games.CLEANED.clear()


@pytest.mark.usefixtures("stand_in")
def test_verifiers_clean_up_behind_conversations_that_a_limit_ended() -> None:
    game = Verifiers("guessing_games:load_environment")
    rollouts = _collected(deepcopy(game), max_turns=2)
    assert rollouts.truncated == len(rollouts.conversations) == 8
    assert len(guessing_games.CLEANED) == 8
