"""Figures for the logs, drawn without a display."""

from __future__ import annotations

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
