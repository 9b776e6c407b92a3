"""Logged conversations in files: JSON lines, a JSON list, Parquet, or a data set of the Hugging Face Hub.

A record is what `Conversation.to_json` gives. OpenAI's `messages` and ShareGPT's `conversations` are read as
they are; what they lack takes the defaults of `Conversation.from_json`. OpenAI's `weight` is not looked at.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_mtrl.conversation import DISPOSITIONS, Conversation
from lightning_mtrl.errors import UserError
from lightning_mtrl.rollouts.columns import read_hub, read_parquet, write_parquet
from lightning_mtrl.rollouts.tokens import opening_as_prompt

HUB = "hub:"
MESSAGES_SHOWN = 5
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "tool": "tool",
    "observation": "tool",
}

_logger = logging.getLogger(__name__)


@dataclass
class LoadedLogs:
    """What a file held.

    Attributes:
        conversations: those that could be read, in order.
        dropped: number of records that could not, by cause.
        messages: one for each of them: file, place, id, and what was expected.
    """

    conversations: list[Conversation] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    messages: list[str] = field(default_factory=list)

    def counts(self) -> str:
        """How many were read and left out, and why, in one line."""
        causes = ", ".join(f"{cause} {number}" for cause, number in self.dropped.most_common())
        hidden = len(self.messages) - MESSAGES_SHOWN
        rest = f"; {hidden} more are not shown" if hidden > 0 else ""
        return f"{len(self.conversations)} conversations read, {len(self.messages)} left out ({causes}){rest}"


class _Unreadable(ValueError):
    """A record that is left out: a short cause to count by, and what was found and expected."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause


def write_conversations(path: str | Path, conversations: Iterable[Conversation]) -> None:
    """Write conversations as `.jsonl` or `.parquet`; equal conversations give equal bytes.

    The file is there in full or not at all: it is written beside its place and renamed.

    Raises:
        UserError: for another ending of the file's name.
        ValueError: for a NaN or an infinity, which JSON does not have.
    """
    path = Path(path)
    if path.suffix not in (".jsonl", ".parquet"):
        raise UserError(f"{path} ends with {path.suffix!r}, but '.jsonl' or '.parquet' was expected.")
    records = [_sorted(c.to_json()) for c in conversations]
    with _replacing(path) as beside:
        if path.suffix == ".parquet":
            write_parquet(beside, records)
            return
        lines = [json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records]
        beside.write_text("".join(lines), encoding="utf-8")


def read_conversations(path: str | Path, strict: bool = False) -> LoadedLogs:
    """Read logged conversations; a record that cannot be read is left out, counted and shown.

    A conversation without a response is left out too. An assistant's message that opens one becomes part of
    its prompt (`opening_as_prompt`), unless the record's `prompt_messages` says where the prompt ends.

    Args:
        path: a `.jsonl`, `.json` (one list) or `.parquet` file, or "hub:NAME" or "hub:NAME:SPLIT" for a data
            set of the Hub (split "train" by default).
        strict: raise for the first record that cannot be read.

    Raises:
        UserError: if there is no such file, or (`strict`) a record in it cannot be read.
    """
    loaded = LoadedLogs()
    ids: set[str] = set()
    for place, number, found in _records(str(path)):
        record: Any = found
        try:
            record = _parsed(found)
            conversation = _conversation(record, f"{Path(path).stem}-{number}")
            if conversation.id in ids:
                raise _Unreadable("id twice", "another record before it has the same id.")
        except _Unreadable as error:
            name = f" (id {record['id']!r})" if isinstance(record, Mapping) and "id" in record else ""
            _note(loaded, error.cause, f"{path}, {place} {number}{name}: {error}", strict)
        else:
            ids.add(conversation.id)
            loaded.conversations.append(conversation)
    if loaded.messages:
        _logger.warning("%s: %s", path, loaded.counts())
    return loaded


def _note(loaded: LoadedLogs, cause: str, message: str, strict: bool) -> None:
    if strict:
        raise UserError(message)
    loaded.dropped[cause] += 1
    loaded.messages.append(message)
    if len(loaded.messages) <= MESSAGES_SHOWN:
        _logger.warning("left out: %s", message)


def _records(path: str) -> Iterator[tuple[str, int, Any]]:
    """Kind of place, its number from 1, and the record there; of a line, its bytes."""
    if path.startswith(HUB):
        yield from (("row", *numbered) for numbered in enumerate(read_hub(path.removeprefix(HUB)), 1))
        return
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{path} is not a file, but logged conversations were expected there.")
    if file.suffix == ".parquet":
        yield from (("row", *numbered) for numbered in enumerate(read_parquet(file), 1))
    elif file.suffix == ".json":
        yield from (("record", *numbered) for numbered in enumerate(_json_list(file), 1))
    elif file.suffix == ".jsonl":
        with file.open("rb") as lines:
            yield from (("line", number, line) for number, line in enumerate(lines, 1) if line.strip())
    else:
        raise UserError(f"{path} ends with {file.suffix!r}, but .jsonl, .json or .parquet was expected.")


def _json_list(file: Path) -> list[Any]:
    try:
        records = json.loads(file.read_bytes())
    except ValueError as error:
        raise UserError(f"{file} is not JSON ({error}); a list of conversations was expected.") from error
    if not isinstance(records, list):
        raise UserError(f"{file} holds no list of conversations; for one JSON object a line, name it .jsonl.")
    return records


def _parsed(record: Any) -> Mapping[str, Any]:
    if isinstance(record, bytes):
        try:
            record = json.loads(record)
        except ValueError as error:
            raise _Unreadable(
                "not JSON", f"not JSON ({error}); one JSON object a line was expected."
            ) from error
    if not isinstance(record, Mapping):
        raise _Unreadable("not an object", f"found {type(record).__name__}; a JSON object was expected.")
    return record


def _conversation(record: Mapping[str, Any], default_id: str) -> Conversation:
    kept = {"id": default_id} | {key: value for key, value in record.items() if value is not None}
    kept["messages"] = _messages(kept)
    try:
        conversation = Conversation.from_json(kept)
    except UserError as error:
        raise _Unreadable("turns", str(error)) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _Unreadable("bad value", f"a value does not fit ({error!r}).") from error
    _check_numbers(conversation, kept.get("turn_outcomes"))
    if "prompt_messages" not in kept:
        conversation = opening_as_prompt(conversation)
    if not conversation.turns:
        raise _Unreadable("no response", "no response to a user; at least one message of it was expected.")
    return conversation


def _check_numbers(conversation: Conversation, turn_outcomes: Any) -> None:
    if turn_outcomes and len(turn_outcomes) != len(conversation.turns):
        raise _Unreadable(
            "bad value",
            f"{len(turn_outcomes)} turn_outcomes for {len(conversation.turns)}; one a response was expected.",
        )
    numbers = [*conversation.rewards, conversation.outcome or 0.0]
    if not all(math.isfinite(number) for number in numbers):
        raise _Unreadable(
            "bad value", "outcome or turn_outcomes hold NaN or infinity; numbers were expected."
        )


def _messages(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Messages in our form, from OpenAI's or ShareGPT's."""
    found = record.get("messages", record.get("conversations"))
    if not isinstance(found, list) or not all(isinstance(message, Mapping) for message in found):
        raise _Unreadable("no messages", "no list of messages; 'messages' or 'conversations' was expected.")
    messages = [_message(index, message) for index, message in enumerate(found)]
    if "messages" not in record and isinstance(record.get("system"), str):
        messages.insert(0, {"role": "system", "content": record["system"]})
    return messages


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    role = message.get("role", message.get("from"))
    if not isinstance(role, str) or role not in ROLES:
        roles = ", ".join(ROLES)
        raise _Unreadable("unknown role", f"messages[{index}] is from {role!r}; one of {roles} was expected.")
    if message.get("tool_calls") or message.get("function_call"):
        raise _Unreadable("tool call", f"messages[{index}] calls a tool; responses in text were expected.")
    kept = {key: message[key] for key in ("suggestion", "disposition") if key in message}
    disposition, known = kept.get("disposition"), ", ".join(DISPOSITIONS)
    if disposition not in (None, *DISPOSITIONS):
        detail = f"messages[{index}].disposition is {disposition!r}; one of {known} was expected."
        raise _Unreadable("bad value", detail)
    return {
        "role": ROLES[role],
        "content": _text(index, message.get("content", message.get("value"))),
        **kept,
    }


def _text(index: int, content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise _Unreadable("not text", f"messages[{index}].content is more than text; text was expected.")
    return "\n".join(map(str, texts))


def _sorted(record: dict[str, Any]) -> dict[str, Any]:
    """The record with the keys of its mappings of any content in order."""
    free = {key: record[key] for key in ("metadata", "turn_details") if key in record}
    sorted_ones: dict[str, Any] = json.loads(json.dumps(free, sort_keys=True, allow_nan=False))
    return {**record, **sorted_ones}


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes the place of `path` once the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.unfinished")
    try:
        yield beside
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
