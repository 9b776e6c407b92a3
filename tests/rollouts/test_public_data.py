"""Small files with the schemas of public data sets, made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from record_files import write_records

from lightning_mtrl.conversation import Conversation
from lightning_mtrl.rollouts.logs import read_conversations
from lightning_mtrl.rollouts.split import owners

ASK, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
HISTORY = [ASK, ANSWER, {"role": "user", "content": "more"}]


def _read(folder: Path, ending: str, *rows: Any) -> list[Conversation]:
    return read_conversations(write_records(folder, ending, rows), strict=True).conversations


def _told(conversation: Conversation) -> tuple[list[str], list[tuple[str | None, str]], float | None]:
    """Prompt, turns and outcome, in short."""
    return (
        [f"{m.role}: {m.content}" for m in conversation.prompt],
        [(turn.response, turn.observation) for turn in conversation.turns],
        conversation.outcome,
    )


def _collabllm(completion: str, score: float, turn: int) -> dict[str, Any]:
    return {
        "prompt": HISTORY,
        "completion": completion,
        "conv_id": 7,
        "turn_id": turn,
        "score": score,
        "single_turn_prompt": "solve it",
        "single_turn_completion": "42",
        "single_turn_metadata": {"level": "Level 5", "type": "Algebra"},
        "sessions": [[ASK, ANSWER]],
        "rewards": {"MR": [score], "accuracy": [1.0], "interactivity": [0.5], "token_amount": [0.1]},
    }


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
def test_rows_of_collabllm_are_responses_with_their_reward(tmp_path: Path, ending: str) -> None:
    rows = [_collabllm("x", 0.75, 2), _collabllm("y", -0.25, 2)]
    first, second = _read(tmp_path, ending, *rows)
    state = ["user: q", "assistant: a", "user: more"]
    assert _told(first) == (state, [("x", "")], 0.75)
    assert _told(second) == (state, [("y", "")], -0.25)
    assert first.rewards == [0.75]
    assert first.metadata["single_turn_metadata"] == {"level": "Level 5", "type": "Algebra"}
    assert len({first.id, second.id}) == 2
    assert len(set(owners([first, second]))) == 1, "rows of one conversation could straddle the split"


def test_large_sets_of_collabllm_have_structs_for_sessions(tmp_path: Path) -> None:
    sessions = {
        "0": {"forward_chat": [ASK], "average_score": 0.5, "interactivity": {"score": 1, "thought": "t"}}
    }
    (read,) = _read(tmp_path, "parquet", {**_collabllm("x", 0.5, 0), "sessions": sessions})
    assert _told(read)[1:] == ([("x", "")], 0.5)


def test_nested_rows_of_collabllm_give_every_response(tmp_path: Path) -> None:
    answers = [{"completion": "x", "score": 1.0}, {"completion": "y", "score": 0.0}]
    turns = [{"prompt": [ASK], "responses": answers}, {"prompt": HISTORY, "responses": answers[:1]}]
    read = _read(tmp_path, "jsonl", {"conv_id": "c", "turns": turns})
    assert [_told(c)[1:] for c in read] == [([("x", "")], 1.0), ([("y", "")], 0.0), ([("x", "")], 1.0)]
    assert len({c.id for c in read}) == 3
    assert len(set(owners(read))) == 1


def test_supervised_rows_of_mtmeddialog_are_responses_and_rows_for_rl_are_no_conversations(
    tmp_path: Path,
) -> None:
    model = {
        "ground_truth": {"diagnosis": "flu", "recommendation": "rest"},
        "patient_information": [{"doctor_question": ["where?"], "patient_response": ["here"]}],
    }
    task = {"data_source": "d", "prompt": [ASK], "reward_model": model, "extra_info": {"index": 3}}
    response = "<think>so</think><answer>Question: where?</answer>"
    (read,) = _read(tmp_path, "parquet", {**task, "response": response})
    assert _told(read) == (["user: q"], [(response, "")], None)
    assert read.metadata["reward_model"]["ground_truth"]["diagnosis"] == "flu"
    path = tmp_path / "rl.jsonl"
    path.write_text(json.dumps({**task, "reward_model": {**model, "enhanced_description": "e"}}) + "\n")
    assert read_conversations(path).dropped == {"no response": 1}


def test_education_dialogue_gives_the_teachers_responses(tmp_path: Path) -> None:
    background = {
        "topic": "tides",
        "student_prefrences": "s",
        "teacher_prefrences": "t",
        "student_reactions": "r",
        "teacher reactions": "u",
    }
    talk = [
        {"role": "Teacher", "text": "Hello."},
        {"role": "Student", "text": "Why?"},
        {"role": "Teacher", "text": "The moon."},
        {"role": "Student", "text": "Ah."},
    ]
    (read,) = _read(tmp_path, "json", {"background_info": background, "conversation": talk})
    assert _told(read) == (
        ["system: Teach the student: tides", "assistant: Hello.", "user: Why?"], [("The moon.", "Ah.")], None,
    )  # fmt: skip
    assert read.metadata["background_info"] == background


def test_trajectories_of_lmrl_gym_keep_the_reward_of_each_action(tmp_path: Path) -> None:
    pieces = [["start", False], ["is it red?", True], ["No", False], ["is it a car?", True], ["Yes", False]]
    done, null, cut = _read(
        tmp_path,
        "jsonl",
        {"sequence": pieces, "reward": [0.0, -1.0, 0.0, 0.0, 0.0], "done": True},
        {"sequence": pieces, "reward": [0.0, -1.0, 0.0, 0.0, 0.0], "done": None},
        {"sequence": pieces[:3], "reward": [0.0, -1.0, 0.0], "done": False},
    )
    assert _told(done) == (["user: start"], [("is it red?", "No"), ("is it a car?", "Yes")], -1.0)
    assert done.rewards == [-1.0, 0.0]
    assert (null.truncated, null.outcome, null.rewards) == (False, -1.0, [-1.0, 0.0])
    assert (cut.truncated, cut.outcome, cut.rewards) == (True, None, [-1.0])


def test_wordle_of_lmrl_gym_has_no_reward_for_its_first_piece(tmp_path: Path) -> None:
    """Its own reader takes `[0.0] + reward`: -1 for each guess that is not the word, 0 for the word."""
    start = ["Wordle:\n", 0.0]
    wrong = [["c r a n e\n", 1.0], ["b y b b b\n", 0.0]]
    right = [["s l a t e\n", 1.0], ["g g g g g\n", 0.0]]
    lost, won, last = _read(
        tmp_path,
        "jsonl",
        {"sequence": [start, *wrong * 6], "reward": [-1.0, 0.0] * 6, "done": True},
        {"sequence": [start, *wrong, *right], "reward": [-1.0, 0.0, 0.0, 0.0], "done": True},
        {"sequence": [start, *wrong, right[0]], "reward": [-1.0, 0.0, 0.0], "done": True},
    )
    assert (lost.rewards, lost.outcome) == ([-1.0] * 6, -6.0)
    assert (won.rewards, won.outcome) == ([-1.0, 0.0], -1.0)
    assert (last.rewards, last.outcome, last.turns[-1].observation) == ([-1.0, 0.0], -1.0, "")


PREFERENCES = [
    {"prompt": "q", "chosen": "x", "rejected": "y"},
    {"prompt": [ASK], "chosen": [{**ANSWER, "content": "x"}], "rejected": [{**ANSWER, "content": "y"}]},
    {"chosen": [ASK, {**ANSWER, "content": "x"}], "rejected": [ASK, {**ANSWER, "content": "y"}]},
    {
        "input": {"messages": [ASK], "tools": [], "parallel_tool_calls": True},
        "preferred_output": [{**ANSWER, "content": "x"}],
        "non_preferred_output": [{**ANSWER, "content": "y"}],
    },
]


@pytest.mark.parametrize("row", PREFERENCES)
def test_a_preference_is_two_conversations_of_outcome_1_and_0(tmp_path: Path, row: Any) -> None:
    better, worse = _read(tmp_path, "jsonl", row)
    assert _told(better) == (["user: q"], [("x", "")], 1.0)
    assert _told(worse) == (["user: q"], [("y", "")], 0.0)


REPEATED = [  # the prompt stands in the answers too, as in UltraFeedback's sets
    {
        "prompt": "q",
        "prompt_id": "p",
        "messages": [ASK, {**ANSWER, "content": "x"}],
        "chosen": [ASK, {**ANSWER, "content": "x"}],
        "rejected": [ASK, {**ANSWER, "content": "y"}],
        "score_chosen": 8.0,
        "score_rejected": 3.0,
    },
    {
        "prompt": "q",
        "chosen": [ASK, {**ANSWER, "content": "x"}],
        "rejected": [ASK, {**ANSWER, "content": "y"}],
    },
    {"prompt": [ASK], "chosen": [ASK, {**ANSWER, "content": "x"}], "rejected": [{**ANSWER, "content": "y"}]},
]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("row", REPEATED)
def test_answers_that_repeat_their_prompt_are_a_preference_and_not_twice_the_prompt(
    tmp_path: Path, row: Any, ending: str
) -> None:
    better, worse = _read(tmp_path, ending, row)
    assert _told(better) == (["user: q"], [("x", "")], 1.0)
    assert _told(worse) == (["user: q"], [("y", "")], 0.0)


def test_a_repeated_prompt_behind_a_system_message_is_found(tmp_path: Path) -> None:
    system = {"role": "system", "content": "s"}
    answers = {key: [system, ASK, {**ANSWER, "content": key}] for key in ("chosen", "rejected")}
    better, worse = _read(tmp_path, "jsonl", {"prompt": "q", **answers})
    assert _told(better) == (["system: s", "user: q"], [("chosen", "")], 1.0)
    assert _told(worse) == (["system: s", "user: q"], [("rejected", "")], 0.0)


def _preferences(number: int, **more: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"q{n}", "chosen": "x", "rejected": "y", **more} for n in range(number)]


@pytest.mark.parametrize("named", [True, False])
def test_both_answers_of_a_preference_stay_on_one_side_of_a_split(tmp_path: Path, named: bool) -> None:
    rows = [{**row, **({"id": f"r{n}"} if named else {})} for n, row in enumerate(_preferences(50))]
    read = _read(tmp_path, "jsonl", *rows)
    names = owners(read)
    assert names[::2] == names[1::2]
    assert len(set(names)) == 50
    if named:
        assert [c.id for c in read[:3]] == ["r0-chosen", "r0-rejected", "r1-chosen"]


def test_a_preference_keeps_its_metadata_and_its_customer(tmp_path: Path) -> None:
    rows = _preferences(2, metadata={"customer": "ann", "shop": 3})
    read = _read(tmp_path, "jsonl", *rows)
    assert all(c.metadata == {"customer": "ann", "shop": 3} for c in read)
    assert len(set(owners(read))) == 1


@pytest.mark.parametrize(
    ("row", "outcome"),
    [
        ({"prompt": "q", "completion": "a"}, None),
        ({"prompt": [ASK], "completion": [ANSWER]}, None),
        ({"prompt": "q", "completion": "a", "label": True}, 1.0),
        ({"prompt": [ASK], "completion": [ANSWER], "label": False}, 0.0),
        ({"prompt": "q", "completion": "a", "outcome": 0.25}, 0.25),
        ({"messages": [ASK, ANSWER], "outcome": 0.5}, 0.5),
    ],
)
def test_formats_of_trl_are_read(tmp_path: Path, row: Any, outcome: float | None) -> None:
    (read,) = _read(tmp_path, "jsonl", row)
    assert _told(read) == (["user: q"], [("a", "")], outcome)


@pytest.mark.parametrize(
    "row",
    [
        {"conv_id": 1, "turns": [{"prompt": [ASK]}]},
        {"sequence": ["only texts"], "reward": [0.0]},
        {"sequence": [["q", False], ["a", True], ["o", False]], "reward": [1.0]},
        {"sequence": [["q", False], ["a", True]], "reward": [0.0, 1.0, 0.0]},
        {"sequence": [["q", False], ["a", True]], "reward": [1.0, 0.0]},
        {"lines": ["Is it red? No."], "correct": False, "word": ["car"]},
        {"background_info": {}, "conversation": ["only texts"]},
        {"input": "q", "preferred_output": "x", "non_preferred_output": "y"},
        {"prompt": 3, "completion": 4},
    ],
)
def test_a_row_that_only_looks_like_one_of_these_is_left_out_and_counted(tmp_path: Path, row: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    loaded = read_conversations(path)
    assert (loaded.read, sum(loaded.dropped.values())) == (0, 1)
    assert loaded.messages[0].startswith(f"{path}, line 1")


def test_answers_in_one_text_with_their_prompt_are_no_conversations(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"chosen": "Human: q Assistant: x", "rejected": "Human: q Assistant: y"}))
    assert read_conversations(path).dropped == {"no messages": 2}
