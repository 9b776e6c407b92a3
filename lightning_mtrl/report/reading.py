"""What a run's folder says, read without a model library; also while a process still writes it."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

import yaml

from lightning_mtrl.conversation import Conversation
from lightning_mtrl.errors import UserError
from lightning_mtrl.rollouts.logs import read_conversations
from lightning_mtrl.runs.events import EVENT_FILES
from lightning_mtrl.runs.folder import RunFolder
from lightning_mtrl.runs.summary import Summary
from lightning_mtrl.runs.writer import BeingWritten, only_writer

_LEARNING_CURVE = "learning_curve"  # the page draws its own
_BEGUN = re.compile(r"tfevents\.(\d+)\.")
_NUMBER = re.compile(r"iteration-(\d+)")


@dataclass
class Curve:
    """One logged number over a run, NaN left out; two lists of one length.

    Attributes:
        iterations: number of the policy or the iteration, as docs/metrics.md says.
        values: finite.
    """

    iterations: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Stored:
    """The conversations of one iteration.

    Attributes:
        iteration: number of the policy that held them.
        conversations: in the order of the file.
    """

    iteration: int
    conversations: list[Conversation]


@dataclass(frozen=True)
class RunRecord:
    """All that the page tells.

    Attributes:
        path: of the run's folder.
        config: of the run, as plain data.
        config_text: the same as it is written.
        summary: empty where no policy was measured yet.
        curves: by the name of the metric; empty without metrics.csv.
        stored: conversations of the first and of the last iteration that are there: none, one or two.
        figures: PNG images that the end of the run left, by name.
        begun: when the run was started.
        from_logs: whether it learned from logs instead of an environment.
        converged: whether the algorithm said so at the newest checkpoint.
        being_written: whether a process is at work in the folder.
    """

    path: Path
    config: Mapping[str, Any]
    config_text: str
    summary: Summary
    curves: Mapping[str, Curve]
    stored: tuple[Stored, ...]
    figures: Mapping[str, bytes]
    begun: datetime
    from_logs: bool
    converged: bool
    being_written: bool

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.resolve().name

    @property
    def done(self) -> int:
        """Iterations that led to a policy which was recorded."""
        rows = self.summary.iterations
        return int(rows[-1]["iteration"]) if rows else 0

    @property
    def wanted(self) -> int:
        """Iterations that the configuration asks for."""
        return int(self.config["loop"]["iterations"])


def read_run(folder: RunFolder) -> RunRecord:
    """Read what is there of a run; nothing is written.

    Raises:
        UserError: if a file that is there cannot be read; it names the file.
    """
    text = folder.config.read_text("utf-8")
    return RunRecord(
        path=folder.path,
        config=_config(folder.config, text),
        config_text=text,
        summary=Summary.open(folder.summary),
        curves=_curves(folder.metrics),
        stored=_stored(folder),
        figures={
            file.stem: file.read_bytes()
            for file in sorted(folder.figures.glob("*.png"))
            if file.stem != _LEARNING_CURVE
        },
        begun=_begun(folder),
        from_logs=(folder.path / "report.json").is_file(),
        converged=_converged(folder),
        being_written=_being_written(folder.path),
    )


def _config(file: Path, text: str) -> Mapping[str, Any]:
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{file} is not YAML ({error}). Put the run's own file back.") from error
    if not isinstance(config, dict) or not isinstance(config.get("loop"), dict):
        raise UserError(f"{file} is not the configuration of a run: 'loop' is missing. Put the file back.")
    return config


def _curves(file: Path) -> dict[str, Curve]:
    """Each logged number; the end of a row that is just being written is left out."""
    curves: dict[str, Curve] = {}
    if not file.is_file():
        return curves
    text = file.read_text("utf-8")
    whole = text[: text.rfind("\n") + 1]
    try:
        _add_rows(curves, csv.DictReader(StringIO(whole)))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{file} cannot be read ({error!r}), but rows of iteration, step, name and value were expected. "
            f"Mend the file, or move it away to have a report without it."
        ) from error
    return curves


def _add_rows(curves: dict[str, Curve], rows: Iterable[Mapping[str, str]]) -> None:
    for row in rows:
        value = float(row["value"])
        if math.isfinite(value):
            curve = curves.setdefault(row["name"], Curve())
            curve.iterations.append(int(row["iteration"]))
            curve.values.append(value)


def _stored(folder: RunFolder) -> tuple[Stored, ...]:
    files = folder.all_rollouts()
    numbered = [(int(match[1]), file) for file in files if (match := _NUMBER.match(file.name))]
    ends = numbered[:1] + numbered[1:][-1:]
    return tuple(Stored(number, read_conversations(file, strict=True).conversations) for number, file in ends)


def _begun(folder: RunFolder) -> datetime:
    """Time in the name of the first event file, which a copy keeps; else that of config.yaml."""
    names = [file.name for file in folder.path.glob(EVENT_FILES)]
    times = [int(match[1]) for name in names if (match := _BEGUN.search(name))]
    return datetime.fromtimestamp(min(times, default=int(folder.config.stat().st_mtime)), UTC)


def _converged(folder: RunFolder) -> bool:
    """Read from the newest checkpoint that is whole; without its weights."""
    for file in sorted(folder.checkpoints.glob("iteration-*/loop.json"), reverse=True):
        try:
            return bool(json.loads(file.read_text("utf-8")).get("converged", False))
        except (OSError, ValueError, AttributeError):
            continue  # replaced just now, or damaged, which is for `fit --resume` to tell
    return False


def _being_written(path: Path) -> bool:
    try:
        with only_writer(path):
            return False
    except BeingWritten:
        return True
