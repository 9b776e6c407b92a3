"""Token ids and log-probabilities that a log brings: used where they are the model's, else counted."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from small_models import BOT, END, USER, small_chat

from lightning_mtrl.errors import UserError
from lightning_mtrl.rollouts.datamodule import RolloutDataModule
from lightning_mtrl.rollouts.log_tokens import LogEncoder
from lightning_mtrl.rollouts.logs import LoadedLogs, read_conversations

X, HELLO, Y = 12, 11, 13
TALK = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "y"},
]
PROMPT, AFTER = [USER, X, END, BOT], [USER, X, END, BOT]


def _turn(ids: list[Any], logprobs: list[Any], after: list[Any]) -> dict[str, Any]:
    return {"response_ids": ids, "behaviour_logprobs": logprobs, "observation_ids": after}


FIRST, LAST = _turn([HELLO, END], [-0.5, -1], AFTER), _turn([Y, END], [-0.25, 0.0], [])
OURS = {"prompt_ids": PROMPT, "turns": [FIRST, LAST]}
IDS = [*PROMPT, HELLO, END, *AFTER, Y, END]


def _file(folder: Path, *tokens: Any, ending: str = "jsonl") -> Path:
    records = [
        {"id": f"{n}", "messages": TALK, "outcome": n % 2, "tokens": each} for n, each in enumerate(tokens)
    ]
    path = folder / f"logs.{ending}"
    if ending == "json":
        path.write_text(json.dumps(records))
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def _read(folder: Path, *tokens: Any) -> LoadedLogs:
    return read_conversations(_file(folder, *tokens), encoder=LogEncoder(small_chat(), 64, 4))


NONE = {
    "log-probabilities are null": {"turns": [_turn([HELLO, END], [None, None], AFTER), LAST]},
    "log-probabilities are NaN": {"turns": [_turn([HELLO, END], [math.nan, -1.0], AFTER), LAST]},
    "log-probabilities are infinite": {"turns": [_turn([HELLO, END], [-math.inf, -1.0], AFTER), LAST]},
    "log-probabilities are texts": {"turns": [_turn([HELLO, END], ["-1", "-1"], AFTER), LAST]},
    "log-probabilities are flags": {"turns": [_turn([HELLO, END], [False, False], AFTER), LAST]},
    "log-probabilities are no float": {"turns": [_turn([HELLO, END], [-(10**400), -1], AFTER), LAST]},
    "log-probabilities are above 0": {"turns": [_turn([HELLO, END], [5.0, -1.0], AFTER), LAST]},
    "too few log-probabilities": {"turns": [_turn([HELLO, END], [-1.0], AFTER), LAST]},
    "too many log-probabilities": {"turns": [FIRST, _turn([Y, END], [-1.0, -1.0, -1.0], [])]},
    "log-probabilities of no ids": {"turns": [_turn([], [-1.0], []), LAST]},
    "too few, without ids of the prompt": {
        "prompt_ids": [],
        "turns": [_turn([HELLO, END], [-1.0], AFTER), LAST],
    },
    "ids are floats": {"turns": [_turn([11.0, 1.0], [], AFTER), LAST]},
    "ids are texts": {"turns": [_turn(["11", "1"], [], AFTER), LAST]},
    "ids are flags": {"turns": [_turn([True, True], [], AFTER), LAST]},
    "ids are null": {"prompt_ids": [None]},
    "ids below 0": {"turns": [_turn([HELLO, END], [], [-1]), LAST]},
    "ids that no tensor holds": {"prompt_ids": [10**30]},
}


@pytest.mark.parametrize("case", NONE)
def test_ids_and_logprobs_that_are_none_leave_their_record_out(tmp_path: Path, case: str) -> None:
    for path in (
        _file(tmp_path, OURS, OURS | NONE[case]),
        _file(tmp_path, OURS, OURS | NONE[case], ending="json"),
    ):
        loaded = read_conversations(path)
        assert ([c.id for c in loaded.conversations], loaded.dropped) == (["0"], {"bad tokens": 1})
        assert (
            f" 2 (id '1'): {'tokens holds' if 'ids' in case[:3] else 'behaviour_logprobs of'}"
            in loaded.messages[0]
        )
        with pytest.raises(UserError, match=r"line 2|record 2"):
            read_conversations(path, strict=True)


OTHERS = {
    "complete": {
        "prompt_ids": [49_000],
        "turns": [_turn([40_000, 2], [], [39_999]), _turn([41_000, 2], [], [])],
    },
    "without the prompt's": {"prompt_ids": [], "turns": [_turn([40_000, 2], [], [39_999]), LAST]},
    "of one response": {"prompt_ids": PROMPT, "turns": [FIRST, _turn([], [], [])]} | {"prompt_ids": [14]},
    "of an observation alone": {"prompt_ids": [], "turns": [_turn([], [], [14]), _turn([], [], [])]},
    "of other words": {"prompt_ids": [], "turns": [_turn([X, END], [], AFTER), _turn([], [], [])]},
    "of other words, the second": {"prompt_ids": [], "turns": [_turn([], [], []), _turn([X, END], [], [])]},
}


@pytest.mark.parametrize("case", OTHERS)
def test_ids_of_another_model_are_counted_also_where_some_are_missing(tmp_path: Path, case: str) -> None:
    loaded = _read(tmp_path, OURS, OTHERS[case], OURS)
    assert ([c.id for c in loaded.conversations], loaded.read) == (["0", "2"], 2)
    assert loaded.dropped == {"other tokens": 1}
    assert ", line 2 (id '1'): its token ids are not this model's" in loaded.messages[0]


@pytest.mark.parametrize(
    "tokens",
    [
        OURS,
        OURS | {"prompt_ids": []},
        OURS | {"turns": [FIRST, _turn([], [], [])]},
        OURS | {"turns": [_turn([HELLO, END], [], []), LAST]},
        None,
    ],
)
def test_ids_of_the_model_are_kept_and_what_is_missing_is_made(tmp_path: Path, tokens: Any) -> None:
    (read,) = _read(tmp_path, tokens).conversations
    assert read.token_ids() == IDS
    expected = [turn["behaviour_logprobs"] for turn in tokens["turns"]] if tokens else [[], []]
    assert [list(turn.behaviour_logprobs) for turn in read.turns] == expected


def test_a_data_module_counts_ids_of_another_model_too(tmp_path: Path) -> None:
    path = _file(tmp_path, *[OURS] * 4, OTHERS["complete"], OURS | NONE["log-probabilities are NaN"])
    data = RolloutDataModule(logs=str(path), tokenizer=small_chat(), batch_size=2, validation_share=0.0)
    data.setup()
    assert [c.id for c in data.conversations] == ["0", "1", "2", "3"]
    assert data.dropped == {"bad tokens": 1, "other tokens": 1}
    batch = next(iter(data.train_dataloader()))
    assert batch.input_ids.tolist()[0][: len(IDS)] == IDS
    assert batch.behaviour_logprobs[0][batch.response_mask[0]].tolist() == [-0.5, -1.0, -0.25, 0.0]


OPENED = [{"role": "assistant", "content": "hello"}, *TALK]


@pytest.mark.parametrize(
    ("first", "turns"), [(None, [("hello", 0), ("y", 1)]), (1, [("hello", 0), ("y", 1)])]
)
def test_a_prompt_ends_where_its_record_says_also_when_it_is_encoded(
    tmp_path: Path, first: int | None, turns: list[tuple[str, int]]
) -> None:
    """Without `prompt_messages` an opening of the assistant is context, and with it the first response."""
    system = {"role": "user", "content": "x"} if first is None else {"role": "system", "content": "y"}
    talk = [system, *OPENED[:1], *TALK[2:]]
    record = {"id": "a", "messages": talk, "outcome": 1, "turn_outcomes": [0, 1]}
    path = tmp_path / "logs.jsonl"
    path.write_text(json.dumps(record | ({} if first is None else {"prompt_messages": first})))
    for encoder in (None, LogEncoder(small_chat(), 64)):
        (read,) = read_conversations(path, strict=True, encoder=encoder).conversations
        assert [(turn.response, turn.reward) for turn in read.turns] == turns
    assert read.has_tokens


def test_a_first_response_without_any_message_before_it_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "logs.jsonl"
    path.write_text(json.dumps({"id": "a", "messages": OPENED, "outcome": 1, "prompt_messages": 0}))
    assert len(read_conversations(path, strict=True).conversations[0].turns) == 3
    loaded = read_conversations(path, encoder=LogEncoder(small_chat(), 64))
    assert (loaded.read, loaded.dropped) == (0, {"chat template": 1})
    assert "no message before its first response" in loaded.messages[0]
