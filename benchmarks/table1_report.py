"""Reads the runs of a grid back and writes its table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_mtrl.evaluation.intervals import mean_interval

TARGET = 0.9  # of the best-known outcome
COLUMNS = (
    "advantage", "credit", "seeds", "outcome x100", "score x100", "tokens", "best policy x100",
    "worst fall x100", "conversations to 90%", "reached", "s a run",
)  # fmt: skip
TOKEN_PENALTY = 5e-5  # of the paper's score, for each token


@dataclass(frozen=True)
class Curve:
    """What one run measured.

    Attributes:
        outcomes: mean outcome of pi_0 and of each later policy on the same fresh conversations.
        tokens: mean number of sampled tokens of a conversation of the last policy.
        conversations: collected in each iteration.
        seconds: that the run took.
    """

    outcomes: tuple[float, ...]
    tokens: float
    conversations: int
    seconds: float

    @property
    def score(self) -> float:
        """Outcome of the last policy less the price of its tokens."""
        return self.outcomes[-1] - TOKEN_PENALTY * self.tokens

    def conversations_to(self, target: float) -> float:
        """Conversations collected until the curve first reaches a target, interpolated; infinity if never."""
        if self.outcomes[0] >= target:
            return 0.0
        for number, (before, after) in enumerate(zip(self.outcomes, self.outcomes[1:], strict=False)):
            if after >= target:
                return self.conversations * (number + (target - before) / (after - before))
        return math.inf


@dataclass(frozen=True)
class Row:
    """One cell of the table, over its seeds.

    Attributes:
        task, credit, advantage: which cell.
        seeds: number of runs.
        outcome: mean outcome of the last policies, with its 95% interval (Student, over seeds).
        best: mean over seeds of the best policy of the run, which is chosen on what it is measured on.
        score: outcome less 5e-5 a token, with its interval.
        tokens: sampled tokens of a conversation of the last policies.
        worst_drop: mean over seeds of the largest fall of the curve below its highest point before.
        needed: mean conversations until 90% of the best-known outcome; infinite when a seed never got there.
        needed_interval: its 95% interval.
        reached: seeds that got there.
        seconds: mean of a run.
    """

    task: str
    credit: str
    advantage: str
    seeds: int
    outcome: float
    outcome_interval: tuple[float, float]
    best: float
    score: float
    score_interval: tuple[float, float]
    tokens: float
    worst_drop: float
    needed: float
    needed_interval: tuple[float, float]
    reached: int
    seconds: float


def read_curve(folder: Path) -> Curve | None:
    """The curve of a run's folder, or None where no run has finished."""
    from lightning_mtrl.parsing import load_config

    if not (folder / "summary.json").is_file():
        return None
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    config = load_config(folder / "config.yaml")
    rows = summary["iterations"]
    if len(rows) <= config.loop.iterations:
        return None
    return Curve(
        tuple(row["mean_return"] for row in rows),
        rows[-1]["tokens"],
        config.data.conversations,
        summary["seconds"],
    )


def row_of(task: str, credit: str, advantage: str, curves: Sequence[Curve], best_known: float) -> Row:
    """Means and intervals of one cell."""
    outcomes, scores = [c.outcomes[-1] for c in curves], [c.score for c in curves]
    needed = [c.conversations_to(TARGET * best_known) for c in curves]
    everyone = all(map(math.isfinite, needed))
    return Row(
        task,
        credit,
        advantage,
        len(curves),
        _mean(outcomes),
        mean_interval(outcomes),
        _mean([max(c.outcomes) for c in curves]),
        _mean(scores),
        mean_interval(scores),
        _mean([c.tokens for c in curves]),
        _mean([_worst_drop(c.outcomes) for c in curves]),
        _mean(needed) if everyone else math.inf,
        mean_interval(needed) if everyone else (math.nan, math.nan),
        sum(map(math.isfinite, needed)),
        _mean([c.seconds for c in curves]),
    )


def best_known(curves: Iterable[Curve]) -> float:
    """The highest mean outcome that a policy of any run of a task reached."""
    return max(max(curve.outcomes) for curve in curves)


def markdown(rows: Sequence[Row], best: dict[str, float]) -> str:
    """The table, task by task, as the paper orders it."""
    parts = []
    for task in dict.fromkeys(row.task for row in rows):
        parts.append(
            f"## {task}\n\nBest-known outcome {best[task]:.3f}; 90% of it is {TARGET * best[task]:.3f}.\n\n"
            f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
        )
        parts += [_line(row) for row in rows if row.task == task]
        parts.append("")
    return "\n".join(parts)


def write_report(output: Path, rows: Sequence[Row], best: dict[str, float]) -> None:
    """table.md and table.json in the grid's folder."""
    output.joinpath("table.md").write_text(markdown(rows, best), "utf-8")
    content: dict[str, Any] = {"best_known": best, "rows": [_plain(asdict(row)) for row in rows]}
    output.joinpath("table.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _line(row: Row) -> str:
    needed = "more than was run" if math.isinf(row.needed) else _with(row.needed, row.needed_interval, 1, 0)
    cells = (
        row.advantage,
        row.credit,
        row.seeds,
        _with(row.outcome, row.outcome_interval, 100, 1),
        _with(row.score, row.score_interval, 100, 1),
        f"{row.tokens:.1f}",
        f"{100 * row.best:.1f}",
        f"{100 * row.worst_drop:.1f}",
        needed,
        f"{row.reached}/{row.seeds}",
        f"{row.seconds:.0f}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def _with(value: float, interval: tuple[float, float], factor: float, digits: int) -> str:
    low, high = (factor * end for end in interval)
    if not math.isfinite(high - low):
        return f"{factor * value:.{digits}f}"  # one seed bounds nothing
    return f"{factor * value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _worst_drop(outcomes: Sequence[float]) -> float:
    return max(max(outcomes[: place + 1]) - value for place, value in enumerate(outcomes))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity and no NaN."""
    return {name: _finite(value) for name, value in row.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
