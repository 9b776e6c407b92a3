"""A conversation as JSON: what is written is read back equal, whatever its turns hold."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_mtrl.conversation import DISPOSITIONS, Conversation, Message, Turn
from lightning_mtrl.rollouts.logs import read_conversations, write_conversations
from lightning_mtrl.well_formed import json_value

TEXT = st.text(max_size=6)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
IDS = st.lists(st.integers(0, 2**40), max_size=3).map(tuple)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
TURNS = st.builds(
    Turn,
    response=st.none() | TEXT,
    observation=TEXT,
    reward=NUMBERS,
    sent=st.none() | TEXT,
    reply=st.none() | TEXT,
    disposition=st.none() | st.sampled_from(DISPOSITIONS),
    explored=st.booleans(),
    response_ids=IDS,
    observation_ids=IDS,
    info=st.dictionaries(TEXT, JSON, max_size=2),
)
SAMPLED = TURNS.flatmap(
    lambda turn: st.lists(NUMBERS.map(lambda x: -abs(x)), min_size=len(turn.response_ids), max_size=3).map(
        lambda values: replace(turn, behaviour_logprobs=tuple(values[: len(turn.response_ids)]))
    )
)
ENDS = st.sampled_from([(True, False), (False, True), (False, False)])


def conversations(least_turns: int = 0) -> st.SearchStrategy[Conversation]:
    messages = st.builds(Message, st.sampled_from(["system", "user", "assistant", "tool"]), TEXT)
    return st.builds(
        lambda end, **given: Conversation(terminated=end[0], truncated=end[1], **given),
        end=ENDS,
        id=TEXT,
        prompt=st.lists(messages, max_size=3).map(tuple),
        turns=st.lists(TURNS | SAMPLED, min_size=least_turns, max_size=3).map(tuple),
        outcome=st.none() | NUMBERS,
        group=st.integers(0, 2**40),
        seed=st.integers(0, 2**40),
        policy=TEXT,
        prompt_ids=IDS,
        explored_turn=st.integers(0, 9),
        metadata=st.dictionaries(TEXT, JSON, max_size=2),
    )


@given(conversations())
def test_what_is_written_as_json_is_read_back_equal(conversation: Conversation) -> None:
    record = json.loads(json.dumps(conversation.to_json(), allow_nan=False))
    assert Conversation.from_json(record) == conversation


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(conversations(least_turns=1), max_size=3, unique_by=lambda c: c.id))
def test_so_is_what_is_written_to_a_file(tmp_path: Path, ending: str, found: list[Conversation]) -> None:
    file = tmp_path / f"talks.{ending}"
    write_conversations(file, found)
    assert read_conversations(file, strict=True).conversations == found


def test_a_log_without_the_draw_has_that_of_its_explored_turn() -> None:
    turns = (Turn("a", "b"), Turn("c", "d", explored=True), Turn("e"))
    record = Conversation("c", (Message("user", "hi"),), turns, 1.0, prompt_ids=(1,)).to_json()
    assert record.pop("explored_turn") == 2
    assert Conversation.from_json(record).explored_turn == 2
    plain = Conversation("p", (Message("user", "hi"),), turns[:1], 1.0).to_json()
    assert Conversation.from_json({**plain, "explored_turn": None}).explored_turn == 0
    assert Conversation.from_json({**plain, "explored_turn": 3}).explored_turn == 3


def test_an_observation_without_words_in_the_middle_is_a_message_without_words() -> None:
    talk = Conversation("c", (Message("user", "hi"),), (Turn("a", ""), Turn("b", "")), 1.0)
    said = [(message["role"], message["content"]) for message in talk.to_json()["messages"]]
    assert said == [("user", "hi"), ("assistant", "a"), ("user", ""), ("assistant", "b")]


def test_only_what_the_messages_do_not_say_is_added() -> None:
    talk = Conversation("c", (Message("user", "hi"),), (Turn("a", "b"), Turn("c", "d", 1.0)), 1.0)
    assert "turn_details" not in talk.to_json()


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float32(0.5), 0.5),
        (np.arange(3), [0, 1, 2]),
        ((1, (2, "x")), [1, [2, "x"]]),
        ({3: math.nan}, {"3": "nan"}),
        ([-math.inf], ["-inf"]),
        ({"s": {1}}, {"s": "{1}"}),
        (True, True),
    ],
)
def test_what_json_lacks_becomes_the_nearest_that_it_has(value: Any, plain: Any) -> None:
    assert json_value(value) == plain
    json.dumps(json_value(value), allow_nan=False)
