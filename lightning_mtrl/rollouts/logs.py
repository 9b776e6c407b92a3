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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from lightning_mtrl.conversation import Conversation
from lightning_mtrl.counting import by_cause, counted
from lightning_mtrl.errors import UserError
from lightning_mtrl.rollouts.columns import write_parquet
from lightning_mtrl.rollouts.log_checks import Unreadable, adds_up
from lightning_mtrl.rollouts.log_files import records_in
from lightning_mtrl.rollouts.log_records import Demands, conversation_of, parsed
from lightning_mtrl.rollouts.log_tokens import LogEncoder
from lightning_mtrl.rollouts.outcomes import Outcomes
from lightning_mtrl.rollouts.public_data import Row, records_of

MESSAGES_SHOWN = 5
ENCODED_TOGETHER = 1024  # records
NO_SUM = "whose turn_outcomes do not add up to the outcome"
WEIGHT_IGNORED = "with a weight that is not used, since only messages have one"

_logger = logging.getLogger(__name__)


@dataclass
class LoadedLogs:
    """What a file held.

    Attributes:
        path: of the file, or name of the data set.
        outcomes: path of the file of outcomes; None where the log has them.
        conversations: those that could be read, in order; none while they are streamed.
        records: number of records.
        read: number of those that could be read.
        dropped: number of records that could not be used, by cause.
        outcomes_dropped: the same of a file of outcomes.
        messages: one for each of these: file, place, id, and what was expected.
        remarks: number of records that were read in another way than their author may think, by what it is.
        places: where each conversation stands, by its id.
    """

    path: str = ""
    outcomes: str | None = None
    conversations: list[Conversation] = field(default_factory=list)
    records: int = 0
    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    outcomes_dropped: Counter[str] = field(default_factory=Counter)
    messages: list[str] = field(default_factory=list)
    remarks: Counter[str] = field(default_factory=Counter)
    places: dict[str, str] = field(default_factory=dict)

    def counts(self) -> str:
        """How many were read and left out, and why, in one line."""
        told = [f"{counted(self.read, 'conversation')} read, {self.dropped.total()} left out"]
        if self.dropped:
            told[0] += f" ({by_cause(self.dropped)})"
        if self.outcomes_dropped:
            number = counted(self.outcomes_dropped.total(), "outcome")
            told.append(f"{number} of {self.outcomes} not used ({by_cause(self.outcomes_dropped)})")
        told += [f"{number} {remark}" for remark, number in self.remarks.items()]
        hidden = len(self.messages) - MESSAGES_SHOWN
        if hidden > 0:
            told.append(f"{hidden} more {'are' if hidden > 1 else 'is'} not shown")
        return "; ".join(told)

    def note(self, cause: str, place: str, problem: str, strict: bool, of_outcomes: bool = False) -> None:
        """Count a record, or an outcome, that cannot be used.

        Args:
            cause: to count by.
            place: file and place.
            problem: what was found, and what was expected.
            strict: end here instead.
            of_outcomes: it stands in the file of outcomes.

        Raises:
            UserError: if `strict`.
        """
        message = f"{place}: {problem}"
        if strict:
            raise UserError(message)
        (self.outcomes_dropped if of_outcomes else self.dropped)[cause] += 1
        self.messages.append(message)
        if len(self.messages) <= MESSAGES_SHOWN:
            _logger.warning("left out: %s", message)


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
        # Half a character, which metadata may hold, becomes the escape that JSON has for it.
        with beside.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
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
    loaded.path, loaded.outcomes = str(path), None if outcomes is None else str(outcomes)
    found = _readable(loaded, strict, demands)
    yield from found if encoder is None else encoded(found, loaded, encoder, strict)
    if loaded.messages or loaded.remarks:
        _logger.warning("%s: %s", path, loaded.counts())


def encoded(
    conversations: Iterable[Conversation], loaded: LoadedLogs, encoder: LogEncoder, strict: bool = False
) -> Iterator[Conversation]:
    """Conversations of a log with their token ids; those that cannot have them are left out and counted.

    Args:
        conversations: as they were read.
        loaded: by whom; takes what is counted.
        encoder: gives the ids.
        strict: raise for the first that cannot have them.

    Raises:
        UserError: for it.
    """
    given = iter(conversations)
    while chunk := list(islice(given, ENCODED_TOGETHER)):
        for conversation, found in zip(chunk, encoder.encode(chunk), strict=True):
            if isinstance(found, Unreadable):
                loaded.read -= 1
                place = f"{loaded.path}, {loaded.places[conversation.id]}"
                loaded.note(found.cause, place, str(found), strict)
            else:
                yield found


def _readable(loaded: LoadedLogs, strict: bool, demands: Demands) -> Iterator[Conversation]:
    """The conversations of a log without ids; what cannot be read is noted."""
    joined = Outcomes.read(loaded.outcomes) if loaded.outcomes is not None else None
    for cause, place, problem in joined.refused if joined is not None else ():
        loaded.note(cause, place, problem, strict, of_outcomes=True)
    for place, found in _found(loaded, demands, joined):
        loaded.records += 1
        if isinstance(found, Unreadable):
            loaded.note(found.cause, f"{loaded.path}, {place}", str(found), strict)
        else:
            loaded.read += 1
            if not adds_up(found):
                loaded.remarks[NO_SUM] += 1
            yield found
    if joined is None:
        return
    for place, problem in joined.left_over():
        loaded.note("outcome of no conversation", place, problem, strict, of_outcomes=True)
    if joined.contradicted:
        loaded.remarks[f"with another outcome than in {joined.path}, which holds"] = joined.contradicted


Placed = tuple[str, Conversation | Unreadable]


def _found(loaded: LoadedLogs, demands: Demands, outcomes: Outcomes | None) -> Iterator[Placed]:
    """Each record's place (with its id, where it has one), and its conversation or why it has none."""
    stem = Path(loaded.path).stem
    for kind, number, found in records_in(loaded.path):
        place, name = f"{kind} {number}", f"{stem}-{number}"
        for part, record in enumerate(_parts(found)):
            default_id = f"{name}-{part + 1}" if part else name
            if isinstance(record, Mapping) and record.get("weight") not in (None, 1):
                loaded.remarks[WEIGHT_IGNORED] += 1
            yield _placed(place, record, default_id, demands, outcomes, loaded.places)


def _parts(found: Any) -> list[Row | Unreadable]:
    """The records of a line or row, or why there is none."""
    try:
        return list(records_of(parsed(found)))
    except Unreadable as error:
        return [error]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        return [Unreadable("bad value", f"a value does not fit ({error!r}).")]


def _placed(
    place: str,
    record: Row | Unreadable,
    default_id: str,
    demands: Demands,
    outcomes: Outcomes | None,
    places: dict[str, str],
) -> Placed:
    if isinstance(record, Unreadable):
        return place, record
    place += f" (id {record['id']!r})" if "id" in record else ""
    try:
        joined = outcomes.joined(record) if outcomes is not None else record
        conversation = conversation_of(joined, default_id, demands)
    except Unreadable as error:
        return place, error
    if (other := places.get(conversation.id)) is not None:
        problem = f"{other.partition(' (')[0]} has the same id; one of its own was expected."
        return place, Unreadable("id twice", problem)
    places[conversation.id] = place
    return place, conversation


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
