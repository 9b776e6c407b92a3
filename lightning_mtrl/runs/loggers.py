"""Loggers of a run for Fabric, which know where the loop is.

`self.log` of a LightningModule under Fabric says no step, so every number would land on step 0; these loggers
take it from the loop's `Clock`.
"""

from __future__ import annotations

import csv
import itertools
import logging
import shutil
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.loggers.logger import Logger
from lightning.fabric.loggers.tensorboard import TensorBoardLogger
from torch import Tensor

from lightning_mtrl.runs.atomic import write_text
from lightning_mtrl.runs.checkpoint import CheckpointState
from lightning_mtrl.runs.events import keep_summaries
from lightning_mtrl.runs.folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = ("iteration", "step", "name", "value")

_logger = logging.getLogger(__name__)


@dataclass
class Clock:
    """Where the loop is; the loop moves it, the loggers read it. A checkpoint keeps all four numbers.

    Attributes:
        iteration: number of the current iteration, from 0.
        step: optimizer steps of all phases since the run began.
        rows: rows of metrics.csv, which the logger counts. At the start it is the number that a resumed run
            had when its checkpoint was written; None keeps what is there.
        summaries: what TensorBoard's event files hold, in the same way.
    """

    iteration: int = 0
    step: int = 0
    rows: int | None = None
    summaries: int | None = None


def clock_at(state: CheckpointState | None) -> Clock:
    """Where a run goes on: at its checkpoint, or without one at the very start."""
    if state is None:
        return Clock(rows=0, summaries=0)
    # Checkpoints of earlier versions do not count the summaries; then none is cut.
    loop = state.loop
    return Clock(state.iteration, loop["step"], loop["rows"], loop.get("summaries"))


class ClockedTensorBoardLogger(TensorBoardLogger):
    """TensorBoard events directly in the run's folder.

    Args:
        folder: of the run. At the start its event files are cut to `clock.summaries` summaries, since a
            resumed run writes again what came after its checkpoint.
        clock: gives the step where a caller gives none, and counts the summaries.
    """

    def __init__(self, folder: Path, clock: Clock) -> None:
        clock.summaries = keep_summaries(folder, clock.summaries)
        # The files have nothing of later steps, but a TensorBoard that is open meanwhile has to be told.
        purged = clock.step + 1 if clock.step else None
        super().__init__(root_dir=folder, name="", version="", purge_step=purged)
        self._clock = clock

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics(dict(metrics), self._clock.step if step is None else step)
        self._count(len(metrics))

    def log_text(self, name: str, text: str) -> None:
        """Log a text (Markdown)."""
        self.experiment.add_text(name, text, self._clock.step)
        self._count(1)

    def log_figure(self, name: str, figure: Figure) -> None:
        """Log a matplotlib figure, and close it."""
        self.experiment.add_figure(name, figure, self._clock.step, close=True)
        self._count(1)

    def log_histogram(self, name: str, values: Tensor) -> None:
        """Log the distribution of finite values, of which there is at least one."""
        self.experiment.add_histogram(name, values, self._clock.step)
        self._count(1)

    def _count(self, summaries: int) -> None:
        self._clock.summaries = (self._clock.summaries or 0) + summaries


class CsvLogger(Logger):
    """metrics.csv in long form: one row for each number, only ever appended to.

    Args:
        file: metrics.csv. At the start it is cut to `clock.rows` rows, since a resumed run writes again what
            came after its checkpoint.
        clock: gives iteration and step, and counts the rows.
    """

    def __init__(self, file: Path, clock: Clock) -> None:
        self._file = file
        self._clock = clock
        clock.rows = _cut(file, clock.rows)

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    @property
    def root_dir(self) -> str:
        return str(self._file.parent)

    def log_metrics(self, metrics: Mapping[str, float | Tensor], step: int | None = None) -> None:
        place = (self._clock.iteration, self._clock.step if step is None else step)
        # One write for each call, so that a killed process leaves at most one row cut off, at the end.
        with self._file.open("a", encoding="utf-8", newline="") as file:
            file.write(_lines([(*place, name, float(value)) for name, value in metrics.items()]))
        self._clock.rows = (self._clock.rows or 0) + len(metrics)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: config.yaml has them."""


def _cut(file: Path, rows: int | None) -> int:
    """Keep the first `rows` rows under the header, or all whole ones; returns how many there are.

    A file from which more would be lost than what a killed process cut off stays beside the new one.
    """
    text = file.read_text("utf-8", errors="replace") if file.is_file() else _lines([COLUMNS])
    header, *lines = text.split("\n")
    found = [_row(line) for line in lines[:-1]]  # behind the last end of a line, a row was cut off
    kept = [row for row in found if row is not None][:rows]
    if header != ",".join(COLUMNS) or None in found or len(kept) < (rows or 0):
        _keep_aside(file, len(kept), rows)
    write_text(file, _lines([COLUMNS, *kept]))
    return len(kept)


def _row(line: str) -> list[str] | None:
    """The cells of a line; None where it is no row of metrics.csv."""
    try:
        iteration, step, name, value = next(csv.reader([line]))
        int(iteration), int(step), float(value)
    except (ValueError, csv.Error):
        return None
    return [iteration, step, name, value]


def _keep_aside(file: Path, kept: int, rows: int | None) -> None:
    names = (file.with_stem(f"{file.stem}-broken-{number}") for number in itertools.count(1))
    beside = next(path for path in names if not path.exists())
    told = ""
    if file.is_file():
        shutil.copy2(file, beside)
        told = f" It is kept as {beside}."
    expected = "" if rows is None else f" of {rows}"
    _logger.warning("%s is not as the run wrote it; it goes on with %d%s rows.%s", file, kept, expected, told)


def _lines(rows: Sequence[Sequence[object]]) -> str:
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


class RunLog:
    """All that a run shows besides its summary: numbers, texts, figures, histograms.

    Args:
        folder: of the run.
        kinds: "tensorboard", "csv".
        clock: where the loop is, or goes on from.
    """

    def __init__(self, folder: RunFolder, kinds: Sequence[str], clock: Clock) -> None:
        self.clock = clock
        self._tensorboard = ClockedTensorBoardLogger(folder.path, clock) if "tensorboard" in kinds else None
        csv_logger = CsvLogger(folder.metrics, clock) if "csv" in kinds else None
        #: for `Fabric(loggers=...)`
        self.loggers: list[Logger] = [each for each in (self._tensorboard, csv_logger) if each is not None]

    def metrics(self, values: Mapping[str, float]) -> None:
        """Log numbers at the clock's step, in every logger."""
        for logger in self.loggers:
            logger.log_metrics(dict(values))

    def text(self, name: str, text: str) -> None:
        """Log a text (Markdown) to TensorBoard."""
        if self._tensorboard is not None:
            self._tensorboard.log_text(name, text)

    def figure(self, name: str, figure: Figure) -> None:
        """Log a matplotlib figure to TensorBoard, and close it."""
        if self._tensorboard is not None:
            self._tensorboard.log_figure(name, figure)

    def histogram(self, name: str, values: Tensor) -> None:
        """Log the distribution of the finite ones among `values` to TensorBoard."""
        finite = values.detach().float().flatten()
        finite = finite[finite.isfinite()]
        if self._tensorboard is not None and finite.numel() > 0:
            self._tensorboard.log_histogram(name, finite)

    def flush(self) -> None:
        """Bring everything to the disk, as before a checkpoint."""
        for logger in self.loggers:
            logger.save()

    def close(self) -> None:
        """Flush, and end the files."""
        for logger in self.loggers:
            logger.finalize("success")
