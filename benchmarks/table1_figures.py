"""The figures of ITPO's paper, from the runs of a grid."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_mtrl.credit.probe import PRMProbe
from lightning_mtrl.evaluation.intervals import mean_interval
from lightning_mtrl.runs.checkpoint import latest_checkpoint, load_checkpoint
from lightning_mtrl.runs.folder import RunFolder
from table1_report import Curve

# One colour for a credit and one line for an estimator, the same in all figures.
CREDITS = (
    "outcome",
    "trajectory_share",
    "uniform",
    "dirichlet",
    "prime",
    "itpo",
    "norm_itpo",
    "norm_itpo_paper",
    "llm_judge",
    "q_difference",
)
LINES = {"gae": "dashed", "rloo": "solid", "grpo": "dotted", "reinforce": "dashdot"}
Series = Mapping[str, Sequence[Sequence[float]]]  # by label: for each seed, a number for each iteration


def read_probe(folder: Path) -> PRMProbe | None:
    """The implicit PRM's history of a run, or None where its credit has none."""
    newest = latest_checkpoint(RunFolder(folder))
    kept = load_checkpoint(newest).loop["algorithm"]["credit"] if newest else {}
    return PRMProbe.from_state(kept) if kept.get("rewards") else None


def learning_curves(task: str, curves: Mapping[str, Sequence[Curve]]) -> Figure:
    """Mean outcome against collected conversations (figures 4 and 10)."""
    figure, axes = _figure(f"{task}: outcome of each policy")
    for label, runs in curves.items():
        _band(axes, label, [run.outcomes for run in runs], scale=runs[0].conversations, first=0)
    axes.set_xlabel("conversations")
    _legend(axes)
    return figure


def kendall_taus(task: str, probes: Mapping[str, Sequence[PRMProbe]]) -> Figure:
    """Kendall's tau of score and outcome on each iteration's conversations (figures 5 and 12)."""
    return _over_iterations(
        f"{task}: Kendall's tau of PRM score and outcome", _series(probes, lambda probe: probe.taus)
    )


def ranking_agreement(task: str, unit: str, probes: Mapping[str, Sequence[PRMProbe]]) -> Figure:
    """Spearman's correlation with the last ranking, of turns or tokens (figures 3, 6 and 11)."""
    return _over_iterations(
        f"{task}: Spearman of {unit} rewards with the last ones",
        _series(probes, lambda probe: [probe.agreement(i, -1, unit) for i in range(len(probe.rewards))]),
    )


def score_slopes(task: str, probes: Mapping[str, Sequence[PRMProbe]]) -> Figure:
    """Slope of score against outcome on the same conversations (figure 7)."""
    return _over_iterations(
        f"{task}: slope of PRM score against outcome",
        _series(probes, lambda probe: [probe.slope(i) for i in range(len(probe.rewards))]),
    )


def _series(probes: Mapping[str, Sequence[PRMProbe]], read: Callable[[PRMProbe], list[float]]) -> Series:
    return {label: [read(probe) for probe in runs] for label, runs in probes.items()}


def _over_iterations(title: str, series: Series) -> Figure:
    figure, axes = _figure(title)
    for label, runs in series.items():
        _band(axes, label, runs, scale=1, first=1)
    axes.set_xlabel("iteration")
    _legend(axes)
    return figure


def _figure(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.grid(alpha=0.3)
    return figure, axes


def _band(axes: Axes, label: str, runs: Sequence[Sequence[float]], scale: int, first: int) -> None:
    """Mean over seeds and its 95% interval; what is not defined in a run counts in none."""
    length = min(map(len, runs))
    columns = [[run[i] for run in runs if math.isfinite(run[i])] for i in range(length)]
    places = [(first + i) * scale for i in range(length)]
    credit, _, advantage = label.partition(" ")
    color = f"C{CREDITS.index(credit)}"
    means = [sum(c) / len(c) if c else math.nan for c in columns]
    axes.plot(places, means, label=label, color=color, linestyle=LINES[advantage])
    if len(runs) > 1:
        ends = [mean_interval(c) if len(c) > 1 else (math.nan, math.nan) for c in columns]
        low, high = zip(*ends, strict=True)
        axes.fill_between(places, low, high, alpha=0.08, color=color)


def _legend(axes: Axes) -> None:
    axes.legend(fontsize="x-small", ncols=2)
