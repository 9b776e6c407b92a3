"""Logged conversations in files: JSON lines, a JSON list, Parquet, or a data set of the Hugging Face Hub.

A record is what `Conversation.to_json` gives. OpenAI's `messages` and ShareGPT's `conversations` are read as
they are; what they lack takes the defaults of `Conversation.from_json`. A response of `weight` 0 is context.
Rows of public data sets are told apart by their columns (`rollouts.public_data`).
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from lightning_mtrl.conversation import Conversation
from lightning_mtrl.errors import UserError
from lightning_mtrl.rollouts.columns import read_hub, read_parquet, write_parquet
from lightning_mtrl.rollouts.log_records import MARK, Demands, Unreadable, conversation_of, parsed
from lightning_mtrl.rollouts.log_tokens import LogEncoder
from lightning_mtrl.rollouts.outcomes import Outcomes
from lightning_mtrl.rollouts.public_data import Row, records_of

HUB = "hub:"
MESSAGES_SHOWN = 5
ENCODED_TOGETHER = 1024  # records

_logger = logging.getLogger(__name__)


@dataclass
class LoadedLogs:
    """What a file held.

    Attributes:
        conversations: those that could be read, in order; none while they are streamed.
        read: number of those that could be read.
        dropped: number of records that could not, by cause.
        messages: one for each of them: file, place, id, and what was expected.
    """

    conversations: list[Conversation] = field(default_factory=list)
    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    messages: list[str] = field(default_factory=list)

    def counts(self) -> str:
        """How many were read and left out, and why, in one line."""
        causes = ", ".join(f"{cause} {number}" for cause, number in self.dropped.most_common())
        hidden = len(self.messages) - MESSAGES_SHOWN
        rest = f"; {hidden} more are not shown" if hidden > 0 else ""
        told = f"{self.read} conversations read, {len(self.messages)} left out"
        return f"{told} ({causes}){rest}" if causes else told


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
    records = (_sorted(c.to_json()) for c in conversations)
    with _replacing(path) as beside:
        if path.suffix == ".parquet":
            write_parquet(beside, list(records))
            return
        with beside.open("w", encoding="utf-8", newline="\n") as file:
            # One after the other, so that a stream of conversations is never held in memory.
            file.writelines(
                json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records
            )


def read_conversations(
    path: str | Path,
    strict: bool = False,
    demands: Demands = Demands(),  # noqa: B008  # frozen, so it can be shared
    outcomes: str | Path | None = None,
    encoder: LogEncoder | None = None,
) -> LoadedLogs:
    """Read logged conversations; a record that cannot be read is left out, counted and shown.

    A conversation without a response is left out too. An assistant's message that opens one becomes part of
    its prompt (`opening_as_prompt`), unless the record's `prompt_messages` says where the prompt ends.

    Args:
        path: a `.jsonl`, `.json` (one list) or `.parquet` file, or "hub:NAME" or "hub:NAME:SPLIT" for a data
            set of the Hub (split "train" by default).
        strict: raise for the first record that cannot be read.
        demands: what is asked of a record beyond that.
        outcomes: a file with the outcomes, joined by id (`Outcomes`).
        encoder: gives the conversations their token ids, and leaves out those that it cannot.

    Raises:
        UserError: if there is no such file, or (`strict`) a record in it cannot be read.
    """
    loaded = LoadedLogs()
    loaded.conversations.extend(stream_conversations(path, loaded, strict, demands, outcomes, encoder))
    return loaded


def stream_conversations(
    path: str | Path,
    loaded: LoadedLogs,
    strict: bool = False,
    demands: Demands = Demands(),  # noqa: B008  # frozen, so it can be shared
    outcomes: str | Path | None = None,
    encoder: LogEncoder | None = None,
) -> Iterator[Conversation]:
    """The conversations of `read_conversations`, one after the other; JSON lines are never held together.

    Args:
        path: as there.
        loaded: takes what is counted; its `conversations` stay empty.
        strict: as there.
        demands: as there.
        outcomes: as there.
        encoder: as there.
    """
    joined = Outcomes.read(outcomes) if outcomes is not None else None
    for cause, message in joined.refused if joined is not None else ():
        _note(loaded, cause, message, strict)
    found = _found(str(path), demands, joined)
    while chunk := list(islice(found, ENCODED_TOGETHER)):
        for place, conversation in _encoded(chunk, encoder):
            if isinstance(conversation, Unreadable):
                _note(loaded, conversation.cause, f"{path}, {place}: {conversation}", strict)
            else:
                loaded.read += 1
                yield conversation
    for message in joined.left_over() if joined is not None else ():
        _note(loaded, "outcome of no conversation", message, strict)
    if loaded.messages:
        _logger.warning("%s: %s", path, loaded.counts())


Placed = tuple[str, Conversation | Unreadable]


def _found(path: str, demands: Demands, outcomes: Outcomes | None) -> Iterator[Placed]:
    """Each record's place (with its id, where it has one), and its conversation or why it has none."""
    ids: set[str] = set()
    for kind, number, found in _records(path):
        place, name = f"{kind} {number}", f"{Path(path).stem}-{number}"
        for part, record in enumerate(_parts(found)):
            default_id = f"{name}-{part + 1}" if part else name
            yield _placed(place, record, default_id, demands, outcomes, ids)


def _parts(found: Any) -> list[Row | Unreadable]:
    """The records of a line or row, or why there is none."""
    try:
        return list(records_of(parsed(found)))
    except Unreadable as error:
        return [error]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return [Unreadable("bad value", f"a value does not fit ({error!r}).")]


def _placed(
    place: str,
    record: Row | Unreadable,
    default_id: str,
    demands: Demands,
    outcomes: Outcomes | None,
    ids: set[str],
) -> Placed:
    if isinstance(record, Unreadable):
        return place, record
    place += f" (id {record['id']!r})" if "id" in record else ""
    try:
        joined = outcomes.joined(record) if outcomes is not None else record
        conversation = conversation_of(joined, default_id, demands)
    except Unreadable as error:
        return place, error
    if conversation.id in ids:
        return place, Unreadable("id twice", "another record before it has the same id.")
    ids.add(conversation.id)
    return place, conversation


def _encoded(chunk: list[Placed], encoder: LogEncoder | None) -> Iterator[Placed]:
    if encoder is None:
        yield from chunk
        return
    encoded = encoder.encode([found for _, found in chunk if isinstance(found, Conversation)])
    for place, found in chunk:
        yield place, next(encoded) if isinstance(found, Conversation) else found


def expect_logs(path: str) -> None:
    """Refuse a path at which there can be no logged conversations, before anything long begins.

    Raises:
        UserError: if there is no such file, or its name ends in another way.
    """
    if path.startswith(HUB):
        return
    if not Path(path).is_file():
        raise UserError(f"{path} is not a file, but logged conversations were expected there.")
    if Path(path).suffix not in (".jsonl", ".json", ".parquet"):
        raise UserError(
            f"{path} ends with {Path(path).suffix!r}, but .jsonl, .json or .parquet was expected."
        )


def _note(loaded: LoadedLogs, cause: str, message: str, strict: bool) -> None:
    if strict:
        raise UserError(message)
    loaded.dropped[cause] += 1
    loaded.messages.append(message)
    if len(loaded.messages) <= MESSAGES_SHOWN:
        _logger.warning("left out: %s", message)


def _records(path: str) -> Iterator[tuple[str, int, Any]]:
    """Kind of place, its number from 1, and the record there; of a line, its bytes."""
    expect_logs(path)
    if path.startswith(HUB):
        yield from (("row", *numbered) for numbered in enumerate(read_hub(path.removeprefix(HUB)), 1))
        return
    file = Path(path)
    if file.suffix == ".parquet":
        yield from (("row", *numbered) for numbered in enumerate(read_parquet(file), 1))
    elif file.suffix == ".json":
        yield from (("record", *numbered) for numbered in enumerate(_json_list(file), 1))
    else:
        with file.open("rb") as lines:
            numbered = enumerate(lines, 1)
            yield from (
                ("line", number, line) for number, line in numbered if line.removeprefix(MARK).strip()
            )


def _json_list(file: Path) -> list[Any]:
    try:
        records = json.loads(file.read_bytes().decode("utf-8-sig"))
    except ValueError as error:
        raise UserError(f"{file} is not JSON ({error}); a list of conversations was expected.") from error
    if not isinstance(records, list):
        raise UserError(f"{file} holds no list of conversations; for one JSON object a line, name it .jsonl.")
    return records


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
