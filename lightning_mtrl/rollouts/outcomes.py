"""Outcomes that stand in a file of their own, and join the logged conversations by id."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from lightning_mtrl.errors import UserError
from lightning_mtrl.rollouts.columns import read_parquet
from lightning_mtrl.rollouts.log_files import expect_utf_8
from lightning_mtrl.well_formed import is_finite

ROUNDING = 1e-9  # of equal outcomes, one of them written as decimals
LONGEST_CELL = 2**31 - 1  # characters of a CSV, of which Python takes 131,072 unless told otherwise
ENDINGS = (".jsonl", ".csv", ".parquet")


@dataclass
class Outcomes:
    """The outcomes of a file: JSON lines, CSV or Parquet, with `id` and `outcome` in each row.

    Attributes:
        path: of the file.
        by_id: outcome and place of each conversation, by its id.
        refused: rows that give none: cause, place, and what was expected.
        contradicted: records whose own outcome was another one; that of the file holds.
    """

    path: Path
    by_id: dict[str, tuple[float, str]] = field(default_factory=dict)
    refused: list[tuple[str, str, str]] = field(default_factory=list)
    contradicted: int = 0
    _met: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, path: Path | str) -> Outcomes:
        """Read a file of outcomes.

        Raises:
            UserError: if there is no such file, its name ends in another way, or no row of it can be used.
        """
        found = cls(Path(path))
        expect_outcomes(str(path))
        for place, row in _rows(found.path):
            found._take(f"{path}, {place}", row)
        if found.refused and not found.by_id:
            reason, where, told = found.refused[0]
            raise UserError(f"none of the outcomes of {path} can be used ({reason}). {where}: {told}")
        return found

    def joined(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """A record of a log with its outcome from here; its own holds where there is none.

        Outcomes of turns that add up to another one are those of an earlier scoring, and go; so do flags of
        messages, of which one says that the outcome was reached where it is another one here.
        """
        name = str(record.get("id"))
        if record.get("id") is None or name not in self.by_id:
            return record
        self._met.add(name)
        outcome, turns = self.by_id[name][0], record.get("turn_outcomes")
        own = _plain(record.get("outcome"))
        other = math.isfinite(own) and not math.isclose(own, outcome, abs_tol=ROUNDING)
        joined = {**record, "outcome": outcome}
        if isinstance(turns, list) and not math.isclose(sum(map(_plain, turns)), outcome, abs_tol=ROUNDING):
            joined.pop("turn_outcomes", None)
        for key in ("messages", "conversations"):
            if outcome != 1 and _says_reached(record.get(key)):
                joined[key], other = [_without_flag(message) for message in record[key]], True
        self.contradicted += other
        return joined

    def left_over(self) -> Iterator[tuple[str, str]]:
        """Place and problem of each outcome that no record of the log asked for."""
        for name, (_, place) in self.by_id.items():
            if name not in self._met:
                yield place, f"the log has no conversation of id {name!r}."

    def _take(self, place: str, row: Any) -> None:
        if not isinstance(row, Mapping) or row.get("id") in (None, ""):
            self.refused.append(("outcome without id", place, "an id and an outcome were expected."))
            return
        name, outcome = str(row["id"]), _number(row.get("outcome"))
        if outcome is None:
            told = f"outcome is {row.get('outcome')!r}; a finite number was expected."
            self.refused.append(("outcome is no number", f"{place} (id {name!r})", told))
        elif name in self.by_id:
            told = f"{self.by_id[name][1]} has an outcome of the same id."
            self.refused.append(("outcome twice", f"{place} (id {name!r})", told))
        else:
            self.by_id[name] = (outcome, place)


def expect_outcomes(path: str) -> None:
    """Refuse a path at which there can be no outcomes, before anything long begins.

    Raises:
        UserError: if there is no such file, its name ends in another way, or it is in UTF-16.
    """
    if not Path(path).is_file():
        raise UserError(f"{path} is not a file, but outcomes were expected there.")
    if Path(path).suffix not in ENDINGS:
        raise UserError(f"{path} ends with {Path(path).suffix!r}, but {', '.join(ENDINGS)} was expected.")
    expect_utf_8(Path(path))


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Each row with its place; None for a line that is no JSON."""
    if path.suffix == ".parquet":
        yield from ((f"row {number}", row) for number, row in enumerate(read_parquet(path), 1))
        return
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        if path.suffix == ".csv":
            yield from _cells(path, file)
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"line {number}", _object(line)


def _cells(path: Path, file: TextIO) -> Iterator[tuple[str, Any]]:
    """Each row of a CSV; its cells may be of any length, as that of a transcript."""
    usual = csv.field_size_limit(LONGEST_CELL)
    rows = csv.DictReader(file)
    try:
        _expect_columns(path, rows.fieldnames)
        yield from ((f"line {rows.line_num}", row) for row in rows)
    except csv.Error as error:
        raise UserError(
            f"{path}, line {rows.line_num}, could not be read as CSV ({error}). Export it with quotes around "
            f"cells that hold quotes or line breaks."
        ) from error
    finally:
        csv.field_size_limit(usual)


def _expect_columns(path: Path, found: Sequence[str] | None) -> None:
    if not {"id", "outcome"} <= set(found or ()):
        raise UserError(
            f"{path} begins with {','.join(found or ())!r}, but a first line with the columns id and "
            f"outcome, separated by a comma, was expected. Name its columns so, and export it with commas."
        )


def _object(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _says_reached(messages: Any) -> bool:
    """Whether a message of a record has the outcome flag 1."""
    found = messages if isinstance(messages, list) else []
    return any(isinstance(message, Mapping) and message.get("outcome") == 1 for message in found)


def _without_flag(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message
    return {key: value for key, value in message.items() if key != "outcome"}


def _plain(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and is_finite(value) else math.nan


_TRUTHS = {"true": 1.0, "false": 0.0}


def _number(value: Any) -> float | None:
    """A finite number or a truth value, also from the text of a CSV's cell; None for anything else."""
    if isinstance(value, str) and value.strip().lower() in _TRUTHS:
        return _TRUTHS[value.strip().lower()]
    try:
        number = float(value) if isinstance(value, str | int | float) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
