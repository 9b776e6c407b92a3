"""Rows of public data sets as records of a log, told apart by their columns.

- CollabLLM (math-hard, medium, bigcodebench and their -large sets), also nested: `prompt`, `completion`,
  `conv_id` and `score` become one response whose outcome is the multiturn-aware reward. Rows of one
  conversation stay together in a split.
- MTMedDialog: `prompt`, `reward_model` and `response` become one response without an outcome; rows for RL,
  which have no response, are tasks and no conversations.
- Education Dialogue: of `background_info` and `conversation` the teacher's words become the responses,
  without an outcome.
- LMRL-Gym: of `sequence`, pairs (text, is_action), actions become responses, with their `reward`.
- OpenAI's preferences (`input`, `preferred_output`, `non_preferred_output`) become two conversations, of
  outcome 1 and 0.
- TRL: `prompt` with `completion` (and KTO's `label`), or with `chosen` and `rejected`; texts become messages.

Everything else goes on as it is: OpenAI's and TRL's `messages`, ShareGPT's `conversations`, and our own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
SPEAKERS = {"teacher": "assistant", "student": "user"}  # of Education Dialogue


def records_of(row: Row) -> Iterator[Row]:
    """The records that a row holds: one, unless it compares responses.

    What does not have the expected form is passed on, to be refused where the record is read.
    """
    for columns, convert in _FORMS:
        if all(column in row and row[column] is not None for column in columns):
            yield from convert(row)
            return
    yield row


def _collabllm(row: Row) -> Iterator[Row]:
    kept = ("single_turn_prompt", "single_turn_completion", "single_turn_metadata", "turn_id", "rewards")
    metadata = {name: row[name] for name in kept if row.get(name) is not None}
    metadata["customer"] = str(row["conv_id"])
    yield _pair(row["prompt"], row["completion"], row.get("score"), metadata)


def _collabllm_nested(row: Row) -> Iterator[Row]:
    for number, turn in enumerate(row["turns"]):
        metadata = {"customer": str(row["conv_id"]), "turn_id": number}
        for response in turn["responses"]:
            yield _pair(turn["prompt"], response["completion"], response.get("score"), metadata)


def _mtmed(row: Row) -> Iterator[Row]:
    model, facts = row["reward_model"], ("data_source", "extra_info")
    metadata = {"reward_model": model, **{name: row[name] for name in facts if row.get(name) is not None}}
    yield _pair(row["prompt"], row.get("response"), None, metadata)


def _education(row: Row) -> Iterator[Row]:
    background = row["background_info"]
    messages = [
        {"role": SPEAKERS.get(str(said.get("role")).lower(), said.get("role")), "content": said.get("text")}
        for said in row["conversation"]
    ]
    topic = background.get("topic") if isinstance(background, Mapping) else None
    if topic:
        messages.insert(0, {"role": "system", "content": f"Teach the student: {topic}"})
    yield {**_named(row), "messages": messages, "metadata": {"background_info": background}}


def _lmrl(row: Row) -> Iterator[Row]:
    pieces, rewards = row["sequence"], row.get("reward") or []
    messages = [{"role": "assistant" if action else "user", "content": text} for text, action in pieces]
    earned = [r for r, (_, action) in zip(rewards, pieces, strict=False) if action]
    done = bool(row.get("done", True))
    record = {**_named(row), "messages": messages, "turn_outcomes": earned, "truncated": not done}
    yield record | ({"outcome": sum(earned)} if rewards and done else {})


def _openai_preference(row: Row) -> Iterator[Row]:
    prompt = row["input"].get("messages")
    yield _pair(prompt, row["preferred_output"], 1.0, {})
    yield _pair(prompt, row["non_preferred_output"], 0.0, {})


def _preference(row: Row) -> Iterator[Row]:
    """TRL's; the prompt is part of both answers where it has no column."""
    for answer, outcome in ((row["chosen"], 1.0), (row["rejected"], 0.0)):
        if row.get("prompt") is None:
            yield {"messages": answer, "prompt_messages": len(answer) - 1, "outcome": outcome}
        else:
            yield _pair(row["prompt"], answer, outcome, {})


def _completion(row: Row) -> Iterator[Row]:
    label = row.get("outcome", row.get("label"))
    outcome = float(label) if isinstance(label, bool) else label
    yield {**_named(row), **_pair(row["prompt"], row["completion"], outcome, row.get("metadata") or {})}


def _pair(prompt: Any, completion: Any, outcome: Any, metadata: Row) -> Row:
    """A state and what was said in it, from texts or messages."""
    state, said = _messages(prompt, "user"), _messages(completion, "assistant")
    if not isinstance(state, Sequence) or not isinstance(said, Sequence):
        return {"messages": None}
    return {
        "messages": [*state, *said],
        "prompt_messages": len(state),
        "outcome": outcome,
        "metadata": metadata,
    }


def _messages(content: Any, role: str) -> Any:
    return [{"role": role, "content": content}] if isinstance(content, str) else content or []


def _named(row: Row) -> Row:
    return {"id": row["id"]} if row.get("id") is not None else {}


_FORMS: tuple[tuple[tuple[str, ...], Callable[[Row], Iterator[Row]]], ...] = (
    (("messages",), lambda row: iter([row])),
    (("conversations",), lambda row: iter([row])),
    (("conv_id", "prompt", "completion"), _collabllm),
    (("conv_id", "turns"), _collabllm_nested),
    (("prompt", "reward_model"), _mtmed),
    (("background_info", "conversation"), _education),
    (("sequence",), _lmrl),
    (("input", "preferred_output", "non_preferred_output"), _openai_preference),
    (("chosen", "rejected"), _preference),
    (("prompt", "completion"), _completion),
)
