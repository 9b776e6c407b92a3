from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_mtrl.conversation import Conversation, Message, Turn, describe_sent
from lightning_mtrl.errors import UserError
from lightning_mtrl.rollouts.logs import read_conversations, write_conversations
from lightning_mtrl.rollouts.split import held_out, owners

PROMPT = (Message("system", "Sell."), Message("user", "Zoë asks: „hi“?\u2028"))
FORMATS = pytest.mark.parametrize("ending", ["jsonl", "parquet"])


def _sampled(name: str, **changes: Any) -> Conversation:
    turns = (
        Turn("ja", "and?", 0.0, response_ids=(5, 6), behaviour_logprobs=(-0.1, -1e-17), observation_ids=(7,)),
        Turn(None, "", 1.0, explored=True, response_ids=(6,), behaviour_logprobs=(-2.0,)),
    )
    whole = Conversation(
        name, PROMPT, turns, 1.0, group=3, seed=9, policy="iteration-0002", prompt_ids=(1, 2, 3),
        metadata={"z": [1, None, {}], "a": {"b": 0.1}},
    )  # fmt: skip
    return replace(whole, **changes)


def _suggested() -> Conversation:
    """All ways in which a suggestion is treated; abstention among them, with and without a disposition."""
    kinds = [("ok", "ok", "accepted"), ("a", "b", "rejected"), (None, "c", "abstained"), (None, "d", None)]
    turns = [
        Turn(said, describe_sent(said, sent, "hm"), sent=sent, reply="hm", disposition=kind)
        for said, sent, kind in kinds
    ]
    return Conversation("suggested", PROMPT, (*turns, Turn("bye", "", sent="bye", reply="")), 0.0)


EXAMPLES = [
    _sampled("whole"),
    _sampled("truncated", terminated=False, truncated=True, outcome=None),
    _sampled("without metadata", metadata={}),
    _suggested(),
    Conversation("plain", PROMPT, (Turn("yes", "no"), Turn(None, "x"), Turn("bye")), None),
]


@FORMATS
def test_what_is_written_is_read_back_equal(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a.{ending}"
    write_conversations(path, EXAMPLES)
    loaded = read_conversations(path, strict=True)
    assert loaded.conversations == EXAMPLES
    assert (loaded.dropped, loaded.messages) == ({}, [])


@FORMATS
def test_half_a_character_in_what_is_never_tokenized_is_kept(tmp_path: Path, ending: str) -> None:
    """As an emoji that was cut in two leaves it: JSON can say it, and UTF-8 cannot."""
    half = "Ann \ud83d"
    turns = (Turn("yes", "no", info={"seen": half}), Turn("bye", ""))
    talks = [Conversation(str(n), PROMPT, turns, 1.0, metadata={"customer": half + str(n)}) for n in range(9)]
    path = tmp_path / f"a.{ending}"
    write_conversations(path, talks)
    read = read_conversations(path, strict=True).conversations
    assert read == talks
    names = owners(read)
    assert 1 <= len(held_out(names, 0.5, seed=0)) < 9
    assert set(names) == {f"customer/{half}{n}" for n in range(9)}


@FORMATS
@pytest.mark.parametrize("chosen", [slice(0, 0), slice(3, 4), slice(0, 1)])
def test_a_file_of_none_or_of_one_kind_is_read_back_equal(tmp_path: Path, ending: str, chosen: slice) -> None:
    path = tmp_path / f"a.{ending}"
    write_conversations(path, EXAMPLES[chosen])
    assert read_conversations(path).conversations == EXAMPLES[chosen]


@FORMATS
def test_equal_conversations_give_equal_bytes(tmp_path: Path, ending: str) -> None:
    first, second = tmp_path / f"1.{ending}", tmp_path / f"2.{ending}"
    other_order = _sampled("whole", metadata={"a": {"b": 0.1}, "z": [1, None, {}]})
    write_conversations(first, EXAMPLES)
    write_conversations(second, [other_order, *EXAMPLES[1:]])
    assert first.read_bytes() == second.read_bytes()


@FORMATS
def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a.{ending}"
    write_conversations(path, EXAMPLES)
    before = path.read_bytes()
    with pytest.raises((ValueError, TypeError)):
        write_conversations(path, [_sampled("x", metadata={"not": float("nan")})])
    broken = _sampled("x", turns=(Turn("a", response_ids=("not an id",)),))  # type: ignore[arg-type]
    if ending == "parquet":
        with pytest.raises(Exception, match="not an id"):
            write_conversations(path, [broken])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'.csv', but '.jsonl' or '.parquet'"):
        write_conversations(tmp_path / "a.csv", EXAMPLES)
    (tmp_path / "a.csv").write_text("id\n")
    with pytest.raises(UserError, match=r"'.csv', but .jsonl"):
        read_conversations(tmp_path / "a.csv")
    with pytest.raises(UserError, match="is not a file"):
        read_conversations(tmp_path / "missing.jsonl")


def _lines(tmp_path: Path, *records: Any) -> Path:
    path = tmp_path / "logs.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


GOOD = {"id": "good", "messages": [_user("q"), _assistant("a")], "outcome": 1}
BAD = {
    "not JSON": '{"id": "b", "messages": [',
    "not an object": "[1, 2]",
    "no messages": {"id": "b", "text": "hi"},
    "unknown role": {"id": "b", "messages": [{"role": "narrator", "content": "x"}]},
    "tool call": {"id": "b", "messages": [_user("q"), _assistant("", tool_calls=[{"id": "1"}])]},
    "not text": {"id": "b", "messages": [_user("q"), _assistant([{"type": "image_url", "image_url": "x"}])]},
    "turns": {"id": "b", "messages": [_user("q"), _assistant("a"), _assistant("b")]},
    "no response": {"id": "b", "messages": [_user("q")]},
    "id twice": {**GOOD, "outcome": 0},
}
BAD_VALUES = [
    {"outcome": "won"},
    {"outcome": float("nan")},
    {"turn_outcomes": [0.0, 1.0]},
    {"turn_outcomes": "x"},
    {"terminated": True, "truncated": True},
    {"metadata": "vip"},
    {"messages": [_user("q"), _assistant("a", suggestion="b", disposition="liked")]},
]


@pytest.mark.parametrize("cause", BAD)
def test_a_broken_record_is_left_out_counted_and_shown(
    tmp_path: Path, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = _lines(tmp_path, GOOD, "", BAD[cause])
    loaded = read_conversations(path)
    assert [c.id for c in loaded.conversations] == ["good"]
    assert loaded.dropped == {cause: 1}
    assert loaded.messages[0].startswith(f"{path}, line 3")
    assert loaded.messages[0] in caplog.text
    with pytest.raises(UserError, match=r"logs\.jsonl, line 3"):
        read_conversations(path, strict=True)


@pytest.mark.parametrize("change", BAD_VALUES)
def test_a_value_that_does_not_fit_is_left_out(tmp_path: Path, change: dict[str, Any]) -> None:
    loaded = read_conversations(_lines(tmp_path, {**GOOD, "id": "b", **change}, GOOD))
    assert [c.id for c in loaded.conversations] == ["good"]
    assert loaded.dropped == {"bad value": 1}
    assert "line 1 (id 'b')" in loaded.messages[0]


def test_only_some_messages_are_printed_but_all_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = read_conversations(_lines(tmp_path, *["{"] * 20))
    assert (loaded.dropped["not JSON"], len(loaded.messages)) == (20, 20)
    assert len(caplog.records) == 6
    assert "0 conversations read, 20 left out (not JSON 20); 15 more are not shown" in caplog.text


def test_openai_files_load_as_they_are(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "developer", "content": "Sell."},
        _user("q"),
        _assistant("a"),
        _user(parts),
        _assistant("b"),
    ]
    (read,) = read_conversations(_lines(tmp_path, {"messages": messages, "tools": []})).conversations
    assert read.id == "logs-1"
    assert read.prompt == (Message("system", "Sell."), Message("user", "q"))
    assert [(t.response, t.observation) for t in read.turns] == [("a", "one\ntwo"), ("b", "")]
    assert read.outcome is None


def test_sharegpt_files_load_as_they_are(tmp_path: Path) -> None:
    talk = [
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": "a"},
        {"from": "observation", "value": "o"},
    ]
    path = tmp_path / "share.json"
    path.write_text(json.dumps([{"id": 7, "system": "Sell.", "conversations": talk, "outcome": 0.5}]))
    (read,) = read_conversations(path).conversations
    assert (read.id, read.outcome, read.rewards) == ("7", 0.5, [0.5])
    assert read.prompt == (Message("system", "Sell."), Message("user", "q"))
    assert read.turns[0].observation == "o"


@pytest.mark.parametrize("text", ["{", "{}"])
def test_a_json_file_must_hold_a_list(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match="list of conversations"):
        read_conversations(tmp_path / "a.json")


def test_somebody_elses_parquet_is_read_with_its_nulls(tmp_path: Path) -> None:
    from datasets import Dataset

    rows = [
        {"messages": [_user("q"), _assistant("a", suggestion=None)], "outcome": None, "truncated": None},
        {"messages": [_user("q"), _assistant("a", suggestion="s")], "outcome": 1.0, "truncated": False},
    ]
    Dataset.from_list(rows).to_parquet(tmp_path / "theirs.parquet")
    first, second = read_conversations(tmp_path / "theirs.parquet").conversations
    assert (first.turns[0].response, first.turns[0].sent, first.outcome) == ("a", None, None)
    assert first.terminated
    assert (second.turns[0].response, second.turns[0].sent) == ("s", "a")


@pytest.mark.parametrize(
    ("said", "terminated", "truncated"),
    [
        ({}, True, False),
        ({"terminated": True}, True, False),
        ({"terminated": False}, False, True),
        ({"truncated": True}, False, True),
        ({"truncated": False}, True, False),
        ({"terminated": False, "truncated": True}, False, True),
        ({"terminated": False, "truncated": False}, False, False),
    ],
)
def test_who_says_only_that_it_did_not_end_says_that_it_was_cut_off(
    said: dict[str, bool], terminated: bool, truncated: bool, tmp_path: Path
) -> None:
    record = {"id": "c", "messages": [_user("q"), _assistant("a")], **said}
    (read,) = read_conversations(_lines(tmp_path, record), strict=True).conversations
    assert (read.terminated, read.truncated) == (terminated, truncated)
    # Flags that are all 0 are a lost conversation, unless it was cut off.
    flagged = {**record, "messages": [*record["messages"], {**_user("bye"), "outcome": 0}]}
    (read,) = read_conversations(_lines(tmp_path, flagged)).conversations
    assert read.outcome == (None if truncated else 0.0)


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"nonsense")
    with pytest.raises(UserError, match="could not be read as Parquet"):
        read_conversations(tmp_path / "a.parquet")


def test_a_data_set_is_loaded_by_name_and_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load_dataset(name: str, split: str) -> datasets.Dataset:
        asked.append((name, split))
        return datasets.Dataset.from_list([GOOD])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert [c.id for c in read_conversations("hub:org/chats").conversations] == ["good"]
    assert [c.id for c in read_conversations("hub:org/chats:test").conversations] == ["good"]
    assert asked == [("org/chats", "train"), ("org/chats", "test")]


def test_a_data_set_out_of_reach_is_a_readable_error() -> None:
    with pytest.raises(UserError, match="hub:nobody/nothing could not be loaded"):
        read_conversations("hub:nobody/nothing")
