"""Figures for the logs, drawn without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from lightning_mtrl.evaluation.calibration import QReport


def calibration_figure(report: QReport) -> Figure:
    """The critic's calibration curve on held-out conversations."""
    figure = Figure(figsize=(4.5, 4.5), layout="constrained")
    axes = figure.subplots()
    top = max([1e-9, *(max(b.predicted, b.observed) for b in report.curve)])
    axes.plot([0, top], [0, top], color="0.7", linestyle="--", label="perfect")
    axes.plot(
        [b.predicted for b in report.curve], [b.observed for b in report.curve], marker="o", label="critic"
    )
    axes.set_xlabel("predicted Q")
    axes.set_ylabel("mean return")
    axes.set_title(
        f"held-out loss {report.loss:.3f}, constant {report.constant_loss:.3f}, {report.turns} turns"
    )
    axes.legend()
    return figure


def learning_curve(rows: Sequence[Mapping[str, Any]], optimum: float | None) -> Figure:
    """Success rate of each policy with its 95% interval.

    Args:
        rows: of a summary, one a policy; those that were not measured are left out.
        optimum: success rate of the best agent, where it is known.
    """
    figure = Figure(figsize=(5.0, 3.5), layout="constrained")
    axes = figure.subplots()
    rows = [row for row in rows if row["success_rate"] is not None]
    numbers = [row["iteration"] for row in rows]
    lows, highs = zip(*(row["success_rate_interval"] for row in rows), strict=True)
    axes.fill_between(numbers, lows, highs, alpha=0.2, label="95% interval")
    axes.plot(numbers, [row["success_rate"] for row in rows], marker="o", label="success rate")
    if optimum is not None:
        axes.axhline(optimum, color="0.5", linestyle="--", label="best possible")
    axes.set_xlabel("policy")
    axes.locator_params(axis="x", integer=True)
    axes.set_ylim(0.0, 1.0)
    axes.legend()
    return figure
