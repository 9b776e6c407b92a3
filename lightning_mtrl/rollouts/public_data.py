"""Rows of public data sets as records of a log, told apart by their columns.

- CollabLLM (math-hard, medium, bigcodebench and their -large sets), also nested: `prompt`, `completion`,
  `conv_id` and `score` become one response whose outcome is the multiturn-aware reward. Rows of one
  conversation stay together in a split.
- MTMedDialog: `prompt`, `reward_model` and `response` become one response without an outcome; rows for RL,
  which have no response, are tasks and no conversations.
- Education Dialogue: of `background_info` and `conversation` the teacher's words become the responses,
  without an outcome.
- LMRL-Gym's trajectories (Wordle's file): of `sequence`, pairs (text, is_action), actions become responses,
  with their `reward`. Its files of `lines` (Twenty Questions, Car Dealer) have no actions and are not read.
- OpenAI's preferences (`input`, `preferred_output`, `non_preferred_output`) become two conversations, of
  outcome 1 and 0, which stay together in a split.
- TRL: `prompt` with `completion` (and KTO's `label`), or `chosen` and `rejected` as OpenAI's; texts become
  messages. Answers may repeat the prompt, as UltraFeedback's do.

Everything else goes on as it is: OpenAI's and TRL's `messages`, ShareGPT's `conversations`, and our own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lightning_mtrl.rollouts.log_checks import Unreadable

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
    pieces, rewards, done = row["sequence"], list(row.get("reward") or []), row.get("done")
    messages = [{"role": "assistant" if action else "user", "content": text} for text, action in pieces]
    record = {**_named(row), "messages": messages, "truncated": done is not None and not done}
    if not rewards:
        yield record
        return
    # LMRL-Gym's files leave out the reward of the first piece, which nobody could have earned.
    rewards = [0.0] * (len(pieces) == len(rewards) + 1) + rewards
    if len(rewards) != len(pieces):
        told = f"reward holds {len(rewards)} for a sequence of {len(pieces)}"
        raise Unreadable("bad value", f"{told}; one for each, or for each but the first, was expected.")
    paired = list(zip(rewards, pieces, strict=True))
    if any(reward for reward, (_, action) in paired if not action):
        raise Unreadable("bad value", "reward is not 0 for a piece that is no action; only actions earn one.")
    earned = [reward for reward, (_, action) in paired if action]
    record["turn_outcomes"] = earned
    yield record if record["truncated"] else {**record, "outcome": sum(earned)}


def _openai_preference(row: Row) -> Iterator[Row]:
    prompt = row["input"].get("messages")
    yield _answer(row, prompt, row["preferred_output"], 1.0)
    yield _answer(row, prompt, row["non_preferred_output"], 0.0)


def _preference(row: Row) -> Iterator[Row]:
    """TRL's."""
    yield _answer(row, row.get("prompt"), row["chosen"], 1.0)
    yield _answer(row, row.get("prompt"), row["rejected"], 0.0)


def _answer(row: Row, prompt: Any, answer: Any, outcome: float) -> Row:
    """One of two answers; the prompt is part of it where it has no column, and may be where it has one."""
    state, said = _messages(prompt, "user"), _messages(answer, "assistant")
    whole = prompt is not None or not isinstance(answer, str)
    if not whole or not isinstance(state, Sequence) or not isinstance(said, Sequence):
        return {"messages": None}
    start = len(said) - 1 if prompt is None else _end_of(state, said)
    messages, first = ([*state, *said], len(state)) if start is None else ([*said], start)
    name = {"id": f"{row['id']}-{'chosen' if outcome else 'rejected'}"} if _named(row) else {}
    given = row.get("metadata")
    metadata: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
    # Answers to one prompt are not independent of each other.
    metadata["customer"] = metadata.get("customer") or str(row["id"] if name else _digest(messages[:first]))
    found = {"messages": messages, "prompt_messages": first, "outcome": outcome, "metadata": metadata}
    return {**name, **found}


def _end_of(state: Sequence[Any], said: Sequence[Any]) -> int | None:
    """Where the messages of a prompt end in an answer that repeats them; None where it does not."""
    prompt, answer = _words(state), _words(said)
    places = range(len(answer) - len(prompt)) if prompt else ()
    ends = (place + len(prompt) for place in places if answer[place : place + len(prompt)] == prompt)
    return next(ends, None)


def _words(messages: Sequence[Any]) -> list[tuple[Any, Any]]:
    return [(m.get("role", m.get("from")), m.get("content", m.get("value"))) for m in messages]


def _digest(messages: Sequence[Any]) -> str:
    """A name for a prompt, the same wherever its words are."""
    return hashlib.sha256(json.dumps(_words(messages)).encode()).hexdigest()[:16]


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
    (("chosen", "rejected"), _preference),  # before the messages that UltraFeedback has besides
    (("messages",), lambda row: iter([row])),
    (("conversations",), lambda row: iter([row])),
    (("conv_id", "prompt", "completion"), _collabllm),
    (("conv_id", "turns"), _collabllm_nested),
    (("prompt", "reward_model"), _mtmed),
    (("background_info", "conversation"), _education),
    (("sequence",), _lmrl),
    (("input", "preferred_output", "non_preferred_output"), _openai_preference),
    (("prompt", "completion"), _completion),
)
