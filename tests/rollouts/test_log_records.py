"""What the keys of a record and of its messages mean: nulls, suggestions and where the prompt ends."""

from __future__ import annotations

import math
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from record_files import write_records

from lightning_mtrl.conversation import Turn
from lightning_mtrl.rollouts.log_records import Demands
from lightning_mtrl.rollouts.logs import LoadedLogs, read_conversations, write_conversations
from lightning_mtrl.rollouts.split import owners

FORMATS = pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
NULLS = ("suggestion", "disposition", "outcome", "weight", "tool_calls", "from", "value")


def _user(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def _bot(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def _read(folder: Path, ending: str, *records: Any, **options: Any) -> LoadedLogs:
    return read_conversations(write_records(folder, ending, records), **options)


def _with_nulls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [dict.fromkeys(NULLS) | message for message in messages]


@FORMATS
def test_a_null_in_a_message_is_a_key_that_is_not_there(tmp_path: Path, ending: str) -> None:
    talk = [
        *(_user("hi"), _user("there"), _bot("We open at 9"), _user("ok"), _bot("Bye", weight=0)),
        *(_user("and?"), _bot("7", suggestion="8", disposition="edited"), _user("good", outcome=1)),
    ]
    joined = {"strict": True, "demands": Demands(join_consecutive=True)}
    bare = _read(tmp_path, ending, {"id": "a", "messages": talk}, **joined).conversations
    assert [(t.response, t.sent, t.observation, t.reward, t.trained) for t in bare[0].turns] == [
        ("We open at 9", None, "ok", 0.0, True),
        ("Bye", None, "and?", 0.0, False),
        ("8", "7", "good (Sent instead: 7)", 1.0, True),
    ]
    assert [message.content for message in bare[0].prompt] == ["hi\nthere"]
    nulls = {"id": "a", "messages": _with_nulls(talk)}
    assert _read(tmp_path, ending, nulls, **joined).conversations == bare


@FORMATS
def test_nulls_of_the_other_form_change_nothing(tmp_path: Path, ending: str) -> None:
    talk = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    nulls = [{"role": None, "content": None, **message} for message in talk]
    (read,) = _read(tmp_path, ending, {"id": "a", "conversations": nulls}, strict=True).conversations
    assert (read.prompt[0].content, read.turns[0].response) == ("q", "a")


OPEN = "We open at 9"
# What the business sent, what a record says of the suggestion, and the turn that it is.
TREATED = {
    "abstained, without a suggestion": (
        _bot(OPEN, disposition="abstained"),
        Turn(None, f"ok (Sent instead: {OPEN})", 1.0, OPEN, "ok", "abstained"),
    ),
    "abstained, with a null": (
        _bot(OPEN, suggestion=None, disposition="abstained"),
        Turn(None, f"ok (Sent instead: {OPEN})", 1.0, OPEN, "ok", "abstained"),
    ),
    "an empty suggestion": (
        _bot(OPEN, suggestion=""),
        Turn(None, f"ok (Sent instead: {OPEN})", 1.0, OPEN, "ok"),
    ),
    "accepted, without a suggestion": (
        _bot(OPEN, disposition="accepted"),
        Turn(OPEN, "ok", 1.0, OPEN, "ok", "accepted"),
    ),
    "rejected, with it": (
        _bot(OPEN, suggestion="At 8", disposition="rejected"),
        Turn("At 8", f"ok (Sent instead: {OPEN})", 1.0, OPEN, "ok", "rejected"),
    ),
}


@FORMATS
@pytest.mark.parametrize("case", TREATED)
def test_what_was_sent_is_a_response_only_where_it_was_suggested(
    tmp_path: Path, case: str, ending: str
) -> None:
    message, turn = TREATED[case]
    record = {"id": "a", "messages": [_user("hi"), message, _user("ok")], "outcome": 1.0}
    (read,) = _read(tmp_path, ending, record, strict=True).conversations
    assert read.turns == (turn,)


@FORMATS
@pytest.mark.parametrize("disposition", ["edited", "influenced", "rejected"])
def test_a_suggestion_that_was_not_sent_and_is_not_told_leaves_its_record_out(
    tmp_path: Path, disposition: str, ending: str
) -> None:
    good = {"id": "a", "messages": [_user("hi"), _bot(OPEN)], "outcome": 1.0}
    for more in ({}, {"suggestion": None}):
        message = _bot(OPEN, disposition=disposition, **more)
        loaded = _read(tmp_path, ending, good, {**good, "id": "b", "messages": [_user("hi"), message]})
        assert ([c.id for c in loaded.conversations], loaded.dropped) == (["a"], {"no suggestion": 1})
        assert f" 2 (id 'b'): messages[1] was {disposition}; the 'suggestion'" in loaded.messages[0]


def test_a_null_outcome_of_a_column_leaves_the_flags_of_messages_to_say_it(tmp_path: Path) -> None:
    lost = [_user("a"), _bot("b"), _user("c", outcome=0)]
    won = [_user("a"), _bot("b"), _user("c", outcome=1)]
    rows = [{"id": "won", "messages": won}, {"id": "lost", "messages": lost}]
    rows.append({"id": "own", "messages": [_user("a"), _bot("b")], "outcome": 0.25})
    columns = [{"outcome": None, **row} for row in rows]
    expected = [("won", 1.0), ("lost", 0.0), ("own", 0.25)]
    for ending, given in (("parquet", columns), ("jsonl", rows)):
        read = _read(tmp_path, ending, *given, strict=True).conversations
        assert [(c.id, c.outcome) for c in read] == expected


@pytest.mark.parametrize("first", [-1, 5, 1.5, True, "1"])
def test_a_prompt_cannot_end_where_there_is_no_message(tmp_path: Path, first: Any) -> None:
    talk = [_user("a"), _bot("b"), _user("c"), _bot("d")]
    record = {"id": "a", "messages": talk, "outcome": 1, "prompt_messages": first}
    loaded = _read(tmp_path, "jsonl", record)
    assert (loaded.read, loaded.dropped) == (0, {"bad value": 1})
    assert f"prompt_messages is {first!r}; a whole number from 0 to 4" in loaded.messages[0]


@pytest.mark.parametrize("key", ["group", "seed"])
def test_a_group_that_no_column_holds_is_left_out(tmp_path: Path, key: str) -> None:
    record = {"id": "a", "messages": [_user("a"), _bot("b")], "outcome": 1}
    for number in (10**30, -(2**63) - 1):
        loaded = _read(tmp_path, "jsonl", record | {key: number})
        assert (loaded.read, loaded.dropped) == (0, {"bad value": 1})
    assert _read(tmp_path, "jsonl", record | {key: 2**63 - 1}, strict=True).read == 1


def test_metadata_is_made_what_json_can_say_so_that_it_can_be_written_again(tmp_path: Path) -> None:
    from datasets import Dataset

    talk, at = [_user("a"), _bot("b")], datetime(2026, 1, 2, 3, 4, 5)
    line = {"id": "a", "messages": talk, "metadata": {"csat": math.nan, "of": [math.inf, 1], "n": None}}
    (read,) = _read(tmp_path, "jsonl", line, strict=True).conversations
    assert read.metadata == {"of": ["inf", 1], "n": None}
    Dataset.from_list([{"id": "b", "messages": talk, "metadata": {"at": at}}]).to_parquet(
        tmp_path / "t.parquet"
    )
    (other,) = read_conversations(tmp_path / "t.parquet", strict=True).conversations
    assert other.metadata == {"at": "2026-01-02T03:04:05"}
    for ending in ("jsonl", "parquet"):
        write_conversations(tmp_path / f"again.{ending}", [read, other])
        assert read_conversations(tmp_path / f"again.{ending}", strict=True).conversations == [read, other]


def test_outcomes_of_turns_that_do_not_add_up_are_said_and_kept(tmp_path: Path) -> None:
    talk = [_user("a"), _bot("b"), _user("c"), _bot("d")]
    given = [([0, 0], 1), ([0.1, 0.9], 1), ([0.25, 0.25], 0.75), ([1, 1], None), (None, 1)]
    lines = [
        {"id": f"{n}", "messages": talk, "outcome": outcome, "turn_outcomes": turns}
        for n, (turns, outcome) in enumerate(given)
    ]
    loaded = _read(tmp_path, "jsonl", *lines, strict=True)
    assert [c.rewards for c in loaded.conversations] == [[0, 0], [0.1, 0.9], [0.25, 0.25], [1, 1], [0, 1]]
    told = "5 conversations read, 0 left out; 2 whose turn_outcomes do not add up to the outcome"
    assert loaded.counts() == told


@pytest.mark.parametrize("customer", ["", None, math.nan])
def test_a_customer_without_a_name_ties_nothing_together(tmp_path: Path, customer: Any) -> None:
    talk = [_user("a"), _bot("b")]
    lines = [{"id": f"{n}", "messages": talk, "metadata": {"customer": customer}} for n in range(4)]
    read = _read(tmp_path, "jsonl", *lines, strict=True).conversations
    assert owners(read) == [f"id/{n}" for n in range(4)]
