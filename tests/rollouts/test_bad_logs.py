"""What logs of others contain: each line that cannot be used is counted by reason, with its number."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_models import END, USER, small_chat

from lightning_mtrl.batch import collate
from lightning_mtrl.errors import UserError
from lightning_mtrl.rollouts.datamodule import RolloutDataModule
from lightning_mtrl.rollouts.log_records import Demands
from lightning_mtrl.rollouts.logs import read_conversations

ASKED = Demands(outcome=True, returns=(0.0, 1.0), gamma=0.9)


def _user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def _bot(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def _line(*messages: Any, name: str = "b", **more: Any) -> bytes:
    return json.dumps({"id": name, "messages": messages, "outcome": 1, **more}).encode()


GOOD = _line(_user("x"), _bot("hello"), name="good")
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
# What a line holds -> the reason why it is left out, and what its message says.
REFUSED = {
    "broken": (b'{"id": "b", "messages": [}', "not JSON", "(Expecting value at character 26); one JSON"),
    "not UTF-8": (b'{"id": "b\xff"}', "not UTF-8", "a text in UTF-8"),
    "nested without end": (b"[" * 100_000, "not JSON", "nest too deeply"),
    "a list": (b"[1]", "not an object", "a JSON object was expected"),
    "a number": (b"7", "not an object", "found int"),
    "no messages": (b'{"id": "b", "text": "x"}', "no messages", "'messages' or 'conversations'"),
    "messages are texts": (_line("x", "y"), "no messages", "no list of messages"),
    "no message at all": (_line(), "no response", "no response to a user"),
    "unknown role": (_line(_user("x"), {"role": "narrator", "content": "y"}), "unknown role", "'narrator'"),
    "no role": (_line({"content": "y"}), "unknown role", "messages[0] is from None"),
    "two responses": (_line(_user("x"), _bot("y"), _bot("y")), "turns", "messages[1] and messages[2]"),
    "two questions": (_line(_user("x"), _bot("y"), _user("x"), _user("x")), "turns", "Join messages"),
    "system in the middle": (
        _line(_user("x"), _bot("y"), {"role": "system", "content": "z"}),
        "turns",
        "messages[1] and messages[2]",
    ),
    "only questions": (_line(_user("x")), "no response", "no response to a user"),
    "only an opening": (_line(_bot("y"), _user("x")), "no response", "no response to a user"),
    "no outcome": (_line(_user("x"), _bot("y"), outcome=None), "no outcome", "a number in 'outcome'"),
    "outcome too high": (_line(_user("x"), _bot("y"), outcome=95), "outcome out of range", "is 95; a number"),
    "outcome too low": (_line(_user("x"), _bot("y"), outcome=-0.5), "outcome out of range", "from 0 to 1"),
    "return too high": (
        _line(_user("x"), _bot("y"), _user("x"), _bot("y"), turn_outcomes=[0.5, 0.75]),
        "outcome out of range",
        "is 1.175",
    ),
    "outcome is NaN": (_line(_user("x"), _bot("y"), outcome=float("nan")), "bad value", "outcome holds nan"),
    "outcome is no float": (_line(_user("x"), _bot("y"), outcome=10**400), "bad value", "holds 1000"),
    "reward is no float": (
        _line(_user("x"), _bot("y"), turn_outcomes=[10**400]),
        "bad value",
        "a finite num",
    ),
    "detail is no float": (
        _line(_user("x"), _bot("y"), turn_outcomes=[1], turn_details=[{"reward": 10**400}]),
        "bad value",
        "turn_details holds a reward",
    ),
    "weight is no float": (_line(_user("x"), _bot("y", weight=10**400)), "bad value", "weight is 1000"),
    "flag is no float": (_line(_user("x", outcome=10**400), _bot("y")), "bad value", "outcome is 1000"),
    "group is infinite": (_line(_user("x"), _bot("y"), group=float("inf")), "bad value", "does not fit"),
    "terminated is a text": (_line(_user("x"), _bot("y"), terminated="no"), "bad value", "true or false"),
    "truncated is a text": (_line(_user("x"), _bot("y"), truncated="no"), "bad value", "truncated is 'no'"),
    "half a character": (
        _line(_user("x \ud83d y"), _bot("y")),
        "lone surrogate",
        r"message 1 of the prompt holds '\ud83d'",
    ),
    "half a character said": (_line(_user("x"), _bot("\ude00")), "lone surrogate", "response 1 holds"),
    "half a character suggested": (
        _line(_user("x"), _bot("y", suggestion="\ud83d")),
        "lone surrogate",
        "response 1 holds",
    ),
    "half a character answered": (
        _line(_user("x"), _bot("y"), _user("\ud83d")),
        "lone surrogate",
        "the answer to response 1 holds",
    ),
    "half a character in the id": (
        _line(_user("x"), _bot("y"), name="b\ud83d"),
        "lone surrogate",
        "id holds",
    ),
    "half a character in the policy": (
        _line(_user("x"), _bot("y"), policy="\ud83d"),
        "lone surrogate",
        "policy holds",
    ),
    "a detail is no text": (_line(_user("x"), _bot("y"), turn_details=[{"sent": 7}]), "bad value", "not fit"),
    "outcome is a text": (_line(_user("x"), _bot("y"), outcome="1.0"), "bad value", "outcome holds '1.0'"),
    "turn_outcomes is a text": (_line(_user("x"), _bot("y"), turn_outcomes="1"), "bad value", "a list of"),
    "too many turn_outcomes": (
        _line(_user("x"), _bot("y"), turn_outcomes=[0, 1]),
        "bad value",
        "2 turn_outcomes for 1",
    ),
    "null that calls a tool": (_line(_user("x"), _bot(None, tool_calls=[CALL])), "tool call", "messages[1]"),
    "an old call": (_line(_user("x"), _bot(None, function_call={"name": "f"})), "tool call", "messages[1]"),
    "a picture": (
        _line(_user([{"type": "image_url", "image_url": "u"}]), _bot("y")),
        "not text",
        "more than",
    ),
    "content is a number": (_line(_user(3), _bot("y")), "not text", "messages[0].content"),
    "half a weight": (_line(_user("x"), _bot("y", weight=0.5)), "bad value", "weight is 0.5; 0 or 1"),
    "unknown disposition": (
        _line(_user("x"), _bot("y", suggestion="z", disposition="liked")),
        "bad value",
        "disposition is 'liked'; one of accepted",
    ),
    "the same id": (_line(_user("x"), _bot("y"), name="good"), "id twice", "line 1 has the same id"),
    "flag before any response": (
        _line(_user("x", outcome=1), _bot("y")),
        "outcome first",
        "before any response",
    ),
    "flag of a response": (_line(_user("x"), _bot("y", outcome=1)), "bad value", "a response has an outcome"),
    "graded flag": (_line(_user("x"), _bot("y"), _user("x", outcome=0.5)), "bad value", "0 or 1, the flag"),
    "flag against outcome": (
        _line(_user("x"), _bot("y"), _user("x", outcome=1), outcome=0),
        "bad value",
        "outcome is 0, but",
    ),
    "flag against graded outcome": (
        _line(_user("x"), _bot("y"), _user("x", outcome=1), outcome=0.5),
        "bad value",
        "outcome is 0.5, but",
    ),
    "flag and turn_outcomes": (
        _line(_user("x"), _bot("y"), _user("x", outcome=1), turn_outcomes=[1]),
        "bad value",
        "give one",
    ),
}


def _file(folder: Path, *lines: bytes, end: bytes = b"\n") -> Path:
    path = folder / "logs.jsonl"
    path.write_bytes(end.join(lines) + end)
    return path


@pytest.mark.parametrize("case", REFUSED)
def test_a_line_that_cannot_be_used_is_counted_by_reason_with_its_number(tmp_path: Path, case: str) -> None:
    line, reason, said = REFUSED[case]
    path = _file(tmp_path, GOOD, b"", line, _line(_user("x"), _bot("y"), name="last"))
    loaded = read_conversations(path, demands=ASKED)
    assert [c.id for c in loaded.conversations] == ["good", "last"]
    assert loaded.read == 2
    assert loaded.dropped == {reason: 1}
    (message,) = loaded.messages
    assert message.startswith(f"{path}, line 3")
    assert said in message
    with pytest.raises(UserError, match=r"logs\.jsonl, line 3") as told:
        read_conversations(path, strict=True, demands=ASKED)
    assert str(told.value) == message


def test_all_of_them_together_are_counted_each_with_its_line(tmp_path: Path) -> None:
    path = _file(tmp_path, GOOD, *(line for line, _, _ in REFUSED.values()))
    loaded = read_conversations(path, demands=ASKED)
    assert [c.id for c in loaded.conversations] == ["good"]
    places = [message.partition(":")[0].partition(" (id")[0] for message in loaded.messages]
    assert places == [f"{path}, line {number}" for number in range(2, len(REFUSED) + 2)]
    reasons = [reason for _, reason, _ in REFUSED.values()]
    assert loaded.dropped == {reason: reasons.count(reason) for reason in reasons}


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_byte_order_mark_and_other_line_ends_and_blank_lines_change_nothing(
    tmp_path: Path, mark: bytes, end: bytes
) -> None:
    path = _file(tmp_path, mark + GOOD, b"  ", b"\t", _line(_user("x"), _bot("y")), b"", b"{", end=end)
    loaded = read_conversations(path)
    assert [c.id for c in loaded.conversations] == ["good", "b"]
    assert loaded.conversations[0] == read_conversations(_file(tmp_path, GOOD)).conversations[0]
    assert loaded.messages[0].startswith(f"{path}, line 6: not JSON")


def test_a_mark_alone_is_a_blank_line(tmp_path: Path) -> None:
    assert read_conversations(_file(tmp_path, b"\xef\xbb\xbf", GOOD)).messages == []


def test_a_last_line_that_was_cut_off_is_told_from_a_broken_one(tmp_path: Path) -> None:
    path = tmp_path / "logs.jsonl"
    path.write_bytes(GOOD + b"\n" + GOOD[:40])
    loaded = read_conversations(path)
    assert (loaded.read, loaded.dropped) == (1, {"cut off": 1})
    assert loaded.messages[0].startswith(f"{path}, line 2: the file ends within")
    assert "column" not in loaded.messages[0]
    path.write_bytes(GOOD)
    assert read_conversations(path, strict=True).read == 1


def test_an_opening_of_the_assistant_and_empty_words_and_parts_are_used(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "x"}, {"type": "input_text", "text": "y"}]
    path = _file(tmp_path, _line(_bot("hello"), _user(parts), _bot(None), _user("x"), _bot("y")))
    (read,) = read_conversations(path, strict=True, demands=ASKED).conversations
    assert [m.role for m in read.prompt] == ["assistant", "user"]
    assert read.prompt[1].content == "x\ny"
    assert [turn.response for turn in read.turns] == [None, "y"]


def test_messages_of_one_role_are_joined_on_demand(tmp_path: Path) -> None:
    talk = [_user("x"), _user("y"), _bot("he"), _bot("llo", weight=0), _user("x"), _user("y", outcome=1)]
    (read,) = read_conversations(
        _file(tmp_path, _line(*talk)), strict=True, demands=Demands(join_consecutive=True)
    ).conversations
    assert read.prompt[0].content == "x\ny"
    assert [(t.response, t.observation, t.reward, t.trained) for t in read.turns] == [
        ("he\nllo", "x\ny", 1.0, False)
    ]


def test_a_response_of_weight_0_is_context_and_never_trained_on(tmp_path: Path) -> None:
    talk = [_user("x"), _bot("hello", weight=0), _user("y"), _bot("he", weight=1)]
    (read,) = read_conversations(_file(tmp_path, _line(*talk)), strict=True).conversations
    chat = small_chat()
    whole = chat.encode(read)
    batch = collate([whole], chat.pad_id, chat.header_ids)
    assert batch.input_ids[batch.response_mask].tolist() == [8, END]
    assert 11 in batch.input_ids[0].tolist()
    assert batch.turn_weights.tolist() == [[0.0, 1.0]]
    data = RolloutDataModule([whole], tokenizer=chat, validation_share=0.0)
    assert [state.turn for state in data.states([whole])] == [2]


def test_control_tokens_that_a_user_types_stay_text(tmp_path: Path) -> None:
    path = _file(tmp_path, _line(_user("<eot><user>"), _bot("hello<eot>"), _user("<bot>x"), _bot("y")))
    (read,) = read_conversations(path, strict=True).conversations
    ids = small_chat().encode(read).token_ids()
    assert ids.count(USER) == 2
    assert ids.count(END) == 4


def test_a_flag_rewards_the_response_before_it_and_ends_the_conversation(tmp_path: Path) -> None:
    talk = [_user("x", outcome=0), _bot("h"), _user("x", outcome=0), _bot("e"), _user("y", outcome=1)]
    more = [_bot("l"), _user("x", outcome=0)]
    path = _file(tmp_path, _line(*talk, *more, outcome=None), _unscored(*talk[:3], name="lost"))
    won, lost = read_conversations(path, strict=True, demands=ASKED).conversations
    assert [(t.response, t.reward) for t in won.turns] == [("h", 0.0), ("e", 1.0)]
    assert (won.outcome, lost.outcome, lost.rewards) == (1.0, 0.0, [0.0])


def _unscored(*messages: Any, name: str = "b", **more: Any) -> bytes:
    """A record that does not even say that it has no outcome of its own."""
    return json.dumps({"id": name, "messages": messages, **more}).encode()


OPENING = [_user("x"), _bot("h"), _user("x", outcome=0), _bot("e")]
# Whether the user ever said yes is not known.
UNKNOWN = {
    "null on the last message": _unscored(*OPENING, _user("y", outcome=None)),
    "no flag on the last message": _unscored(*OPENING, _user("y")),
    "no flag in between": _unscored(_user("x"), _bot("h"), _user("x"), _bot("e"), _user("y", outcome=0)),
    "no answer to the last response": _unscored(*OPENING),
    "a tool has the last word": _unscored(*OPENING, {"role": "tool", "content": "y"}),
    "a flag of the first message alone": _unscored(_user("x", outcome=0), _bot("h")),
    "null of its own": _line(*OPENING[:3], outcome=None),
    "one of two that are joined": _unscored(*OPENING, _user("x", outcome=0), _user("y")),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_an_outcome_that_flags_leave_open_is_missing_and_no_zero(tmp_path: Path, case: str) -> None:
    path = _file(tmp_path, GOOD, UNKNOWN[case])
    _, read = read_conversations(path, strict=True, demands=Demands(join_consecutive=True)).conversations
    assert read.outcome is None
    asked = read_conversations(path, demands=replace(ASKED, join_consecutive=True))
    assert [c.id for c in asked.conversations] == ["good"]
    assert asked.dropped == {"no outcome": 1}


@pytest.mark.parametrize(
    ("line", "outcome"),
    [
        (_unscored(*OPENING, _user("y", outcome=0)), 0.0),
        (_unscored(*OPENING, {"role": "tool", "content": "y"}, _bot("l"), _user("y", outcome=0)), 0.0),
        (_unscored(*OPENING, _user("x", outcome=0), _user("y", outcome=0)), 0.0),
        (_unscored(*OPENING, _user("x"), _user("y", outcome=1)), 1.0),
        (_unscored(_user("x"), _bot("h"), _user("x"), _bot("e"), _user("y", outcome=1)), 1.0),
        (_line(*OPENING, outcome=0), 0.0),
        (_line(*OPENING, outcome=0.5), 0.5),
    ],
)
def test_flags_of_all_answers_or_one_of_1_or_an_outcome_beside_them_leave_nothing_open(
    tmp_path: Path, line: bytes, outcome: float
) -> None:
    demands = replace(ASKED, join_consecutive=True)
    (read,) = read_conversations(_file(tmp_path, line), strict=True, demands=demands).conversations
    assert (read.outcome, sum(read.rewards)) == (outcome, outcome)


def test_flags_of_a_conversation_that_was_cut_off_give_no_outcome(tmp_path: Path) -> None:
    talk = [_user("x"), _bot("h"), _user("x", outcome=0)]
    (read,) = read_conversations(
        _file(tmp_path, _unscored(*talk, truncated=True)), strict=True, demands=ASKED
    ).conversations
    assert (read.outcome, read.truncated) == (None, True)


def _outcomes(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8-sig")
    return path


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        ("csv", "id,outcome,who\na,0.5,me\nb,,me\nb,NaN,me\nb,1e999,me\nghost,1,me\na,1,me\n,1,me\n"),
        (
            "jsonl",
            '{"id": "a", "outcome": 0.5}\n{"id": "b", "outcome": null}\n{"id": "b", "outcome": "NaN"}\n'
            + f'{{"id": "b", "outcome": 1{"0" * 400}}}\n'
            + '{"id": "ghost", "outcome": 1}\n{"id": "a", "outcome": 1}\n{"outcome": 1}\n',
        ),
    ],
)
def test_outcomes_of_another_file_join_by_id_and_bad_ones_are_counted(
    tmp_path: Path, ending: str, text: str
) -> None:
    talk = (_user("x"), _bot("y"))
    path = _file(
        tmp_path, _line(*talk, name="a", outcome=None), _line(*talk), _line(*talk, name="c", outcome=None)
    )
    file = _outcomes(tmp_path / f"outcomes.{ending}", text)
    loaded = read_conversations(path, demands=ASKED, outcomes=file)
    assert [(c.id, c.outcome) for c in loaded.conversations] == [("a", 0.5), ("b", 1.0)]
    assert loaded.dropped == {"no outcome": 1}
    assert loaded.outcomes_dropped == {
        "outcome is no number": 3,
        "outcome twice": 1,
        "outcome without id": 1,
        "outcome of no conversation": 1,
    }
    assert loaded.counts() == (
        f"2 conversations read, 1 left out (no outcome 1); 6 outcomes of {file} not used (outcome is no "
        f"number 3, outcome twice 1, outcome without id 1, outcome of no conversation 1); "
        f"2 more are not shown"
    )
    first = 2 if ending == "csv" else 1
    assert loaded.messages[0].startswith(f"{file}, line {first + 1} (id 'b'): outcome is")
    with pytest.raises(UserError, match=rf"outcomes\.{ending}, line {first + 1}"):
        read_conversations(path, strict=True, demands=ASKED, outcomes=file)


def test_outcomes_of_turns_that_contradict_a_joined_outcome_go(tmp_path: Path) -> None:
    talk = (_user("x"), _bot("y"), _user("x"), _bot("y"))
    given = [_line(*talk, name=name, outcome=None, turn_outcomes=[1, 0]) for name in ("a", "b")]
    file = _outcomes(tmp_path / "outcomes.csv", "id,outcome\na,1\nb,0.5\n")
    loaded = read_conversations(_file(tmp_path, *given), strict=True, outcomes=file)
    assert [c.rewards for c in loaded.conversations] == [[1.0, 0.0], [0.0, 0.5]]


def test_outcomes_that_contradict_the_logs_own_hold_and_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    talk = (_user("x"), _bot("y"))
    own = {"a": 0, "b": 1, "c": None, "d": 1 / 3, "e": 1, "f": "won"}
    path = _file(tmp_path, *(_line(*talk, name=name, outcome=outcome) for name, outcome in own.items()))
    file = _outcomes(tmp_path / "o.csv", f"id,outcome\na,1\nb,0\nc,1\nd,{1 / 3:.12f}\ne,1.0\nf,1\n")
    loaded = read_conversations(path, strict=True, outcomes=file)
    assert [c.outcome for c in loaded.conversations] == pytest.approx([1, 0, 1, 1 / 3, 1, 1])
    told = f"6 conversations read, 0 left out; 2 with another outcome than in {file}, which holds"
    assert loaded.counts() == told
    assert told in caplog.text


def test_outcomes_of_turns_whose_sum_is_rounded_stay(tmp_path: Path) -> None:
    talk = (_user("x"), _bot("y")) * 3
    line = _line(*talk, name="a", outcome=0.0, turn_outcomes=[0.1, 0.2, -0.3])
    file = _outcomes(tmp_path / "o.csv", "id,outcome\na,0.0\n")
    loaded = read_conversations(_file(tmp_path, line), strict=True, outcomes=file)
    assert (loaded.conversations[0].rewards, loaded.remarks) == ([0.1, 0.2, -0.3], {})


def test_an_outcome_of_the_id_none_is_of_no_record_without_an_id(tmp_path: Path) -> None:
    path = _file(tmp_path, _unscored(_user("x"), _bot("y")).replace(b'"id": "b"', b'"id": null'))
    loaded = read_conversations(path, outcomes=_outcomes(tmp_path / "o.csv", "id,outcome\nNone,1\n"))
    assert loaded.conversations[0].outcome is None
    assert loaded.outcomes_dropped == {"outcome of no conversation": 1}


@pytest.mark.parametrize(("outcome", "said"), [(0.0, 2), (0.5, 2), (1.0, 1)])
def test_an_outcome_of_the_file_holds_against_a_flag_of_a_message(
    tmp_path: Path, outcome: float, said: int
) -> None:
    """With another outcome than the flag says the conversation goes on behind it."""
    talk = [_user("x"), _bot("h"), _user("x", outcome=1), _bot("e"), _user("x", outcome=0)]
    file = _outcomes(tmp_path / "o.csv", f"id,outcome\nb,{outcome}\n")
    loaded = read_conversations(_file(tmp_path, _unscored(*talk)), strict=True, outcomes=file)
    (read,) = loaded.conversations
    assert (read.outcome, len(read.turns), sum(read.rewards)) == (outcome, said, outcome)
    told = {f"with another outcome than in {file}, which holds": 1}
    assert loaded.remarks == (told if outcome != 1 else {})


def test_a_cell_of_a_csv_may_be_as_long_as_a_transcript(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    file = _outcomes(tmp_path / "o.csv", f"id,outcome,transcript\na,0.5,{'x' * 140_000}\nb,0.25,y\n")
    talk = (_user("x"), _bot("y"))
    path = _file(tmp_path, *(_line(*talk, name=name, outcome=None) for name in "ab"))
    loaded = read_conversations(path, strict=True, outcomes=file)
    assert [c.outcome for c in loaded.conversations] == [0.5, 0.25]
    assert csv.field_size_limit() == limit


def test_outcomes_of_which_none_can_be_used_are_refused(tmp_path: Path) -> None:
    path = _file(tmp_path, _line(_user("x"), _bot("y"), name="a", outcome=1.0))
    with pytest.raises(UserError, match=r"none of the outcomes of .*o\.csv can be used .*line 2 .*'yes'"):
        read_conversations(path, outcomes=_outcomes(tmp_path / "o.csv", "id,outcome\na,yes\n"))


def test_truth_values_of_a_csv_are_outcomes(tmp_path: Path) -> None:
    path = _file(tmp_path, *(_line(_user("x"), _bot("y"), name=name, outcome=None) for name in "ab"))
    file = _outcomes(tmp_path / "o.csv", "id,outcome\na,True\nb,false\n")
    assert [c.outcome for c in read_conversations(path, strict=True, outcomes=file).conversations] == [1, 0]


def test_what_nests_without_end_is_told_wherever_it_stands(tmp_path: Path) -> None:
    deep, talk = "[" * 100_000, (_user("x"), _bot("y"))
    file = _outcomes(tmp_path / "o.jsonl", f'{deep}\n{{"id": "b", "outcome": 0.5}}\n')
    loaded = read_conversations(_file(tmp_path, _line(*talk, outcome=None)), outcomes=file)
    assert (loaded.conversations[0].outcome, loaded.outcomes_dropped) == (0.5, {"outcome without id": 1})
    (tmp_path / "deep.json").write_text(deep)
    with pytest.raises(UserError, match=r"deep\.json nests too deeply"):
        read_conversations(tmp_path / "deep.json")


def test_a_weight_of_a_whole_conversation_is_said_to_do_nothing(tmp_path: Path) -> None:
    talk = (_user("x"), _bot("y"))
    lines = [_line(*talk, name=str(place), weight=weight) for place, weight in enumerate([0, 1, None, 0])]
    loaded = read_conversations(_file(tmp_path, *lines), strict=True)
    assert all(turn.trained for c in loaded.conversations for turn in c.turns)
    assert loaded.counts() == (
        "4 conversations read, 0 left out; 2 with a weight that is not used, since only messages have one"
    )


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_a_text_in_utf_16_is_told_as_such(tmp_path: Path, encoding: str, ending: str) -> None:
    log = tmp_path / f"log.{ending}"
    log.write_bytes(f"\ufeff[{GOOD.decode()}]".encode(encoding))
    with pytest.raises(UserError, match=r"log\.json.* begins with F[EF] F[EF], so it looks like UTF-16, but"):
        read_conversations(log)
    outcomes = tmp_path / "o.csv"
    outcomes.write_bytes("\ufeffid,outcome\ngood,1\n".encode(encoding))
    with pytest.raises(UserError, match=r"o\.csv begins .* iconv -f UTF-16 -t UTF-8"):
        read_conversations(_file(tmp_path, GOOD), outcomes=outcomes)


def test_outcomes_that_are_not_there_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="outcomes were expected there"):
        read_conversations(_file(tmp_path, GOOD), outcomes=tmp_path / "none.csv")
    _outcomes(tmp_path / "a.txt", "")
    for header in ("id;outcome", "conversation,success", ""):
        other = _outcomes(tmp_path / "other.csv", f"{header}\na;1\n")
        with pytest.raises(UserError, match=r"the columns id and outcome"):
            read_conversations(_file(tmp_path, GOOD), outcomes=other)
    with pytest.raises(UserError, match=r"'.txt', but .jsonl, .csv, .parquet"):
        read_conversations(_file(tmp_path, GOOD), outcomes=tmp_path / "a.txt")
