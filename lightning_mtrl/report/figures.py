"""Figures as SVG that takes its colours from the page, so that they suit a light and a dark one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from io import StringIO
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lightning_mtrl.report.panels import Panel
from lightning_mtrl.report.reading import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that nothing else has, each in the place of a variable of the page's style.
INK, MUTED, RULE, ACCENT, SECOND, PAPER = "#010203", "#010204", "#010205", "#010206", "#010207", "#010208"
_VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    RULE: "--rule",
    ACCENT: "--accent",
    SECOND: "--second",
    PAPER: "--paper",
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: read aloud, searched, and in the page's own type
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.handlelength": 1.4,
}
_LINES = ((ACCENT, "-"), (SECOND, "--"))
_POINTS = 120  # of a line over optimizer steps; more are averaged
_FONT = re.compile(r"font(?:-family)?: (?P<size>[\d.]+px )?'[^;\"]*")
_NAMES = re.compile(r'(?P<before>\bid="|url\(#|href="#)')
_NAMESPACES = re.compile(r' (?:xmlns(?::\w+)?|version)="[^"]*"')
# What the page's own style says for all figures, and notes of the program that drew them.
_HEAD = re.compile(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", re.DOTALL)


def curve_figure(rows: Sequence[Mapping[str, Any]], key: str, optimum: float | None, name: str) -> str:
    """A figure of each policy with its 95% interval, and the optimum as a line.

    A policy whose step was not taken, and which so is the one before it, has a hollow mark.

    Args:
        rows: of the summary that have a value, at least one.
        key: "success_rate" or "mean_return".
        optimum: of the best agent; None where unknown.
        name: of the figure among those of the page.
    """
    with mpl.rc_context(_STYLE):
        figure, axes = _axes(5.0, 2.9)
        numbers, values = [row["iteration"] for row in rows], [row[key] for row in rows]
        bounds = [_bounds(row, key) for row in rows]
        lows, highs = zip(*bounds, strict=True)
        axes.fill_between(numbers, lows, highs, color=ACCENT, alpha=0.16, linewidth=0)
        axes.vlines(numbers, lows, highs, color=ACCENT, linewidth=1, label="95% interval")
        axes.plot(numbers, values, color=ACCENT, zorder=3)
        for number, value, row in zip(numbers, values, rows, strict=True):
            fill = PAPER if row.get("accepted") is False else ACCENT
            axes.plot(number, value, marker="o", color=ACCENT, markerfacecolor=fill, zorder=4, clip_on=False)
        if optimum is not None:
            axes.axhline(optimum, color=SECOND, linewidth=1.2, linestyle=(0, (5, 3)), zorder=2)
            axes.annotate(
                f"best possible {optimum:.3f}",
                (0, optimum),
                (2, 3),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                color=SECOND,
                fontsize=8,
            )
        if key == "success_rate":
            axes.set_ylim(0, 1)
        _over_policies(axes)
        return _svg(figure, name)


def panel_figure(panel: Panel, curves: Mapping[str, Curve], name: str) -> str:
    """A small figure of one or several logged numbers.

    Args:
        panel: what to draw; its first line is among the curves.
        curves: of the run.
        name: of the figure among those of the page.
    """
    with mpl.rc_context({**_STYLE, "font.size": 8}):
        figure, axes = _axes(2.75, 1.75)
        if panel.level is not None:
            axes.axhline(panel.level, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
        if panel.band and all(name in curves for name in panel.band):
            low, high = (curves[name] for name in panel.band)
            axes.fill_between(low.iterations, low.values, high.values, color=ACCENT, alpha=0.16, linewidth=0)
        labels = panel.labels or (None,) * len(panel.lines)
        draw = _draw_steps if panel.by_step else _draw_policies
        for line, label, (color, dashes) in zip(panel.lines, labels, _LINES, strict=False):
            if line in curves:
                draw(axes, curves[line], color=color, linestyle=dashes, label=label)
        if panel.labels:
            axes.legend(loc="best")
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
        axes.set_xlabel("optimizer step" if panel.by_step else "policy")
        return _svg(figure, name)


def _draw_policies(axes: Axes, curve: Curve, **style: Any) -> None:
    axes.plot(curve.iterations, curve.values, marker="o", markersize=3.5, **style)


def _draw_steps(axes: Axes, curve: Curve, **style: Any) -> None:
    """Means of neighbouring steps with a band from the least to the greatest; a rule between iterations."""
    values = curve.values
    for place, (one, next_one) in enumerate(pairwise(curve.iterations), start=1):
        if one != next_one:
            axes.axvline(place + 0.5, color=RULE, linewidth=0.6, zorder=0)
    size = -(-len(values) // _POINTS)
    parts = [values[start : start + size] for start in range(0, len(values), size)]
    steps = [1 + number * size + (len(part) - 1) / 2 for number, part in enumerate(parts)]
    if size > 1:
        lows, highs = [min(part) for part in parts], [max(part) for part in parts]
        axes.fill_between(steps, lows, highs, color=style["color"], alpha=0.16, linewidth=0)
    axes.plot(steps, [sum(part) / len(part) for part in parts], **{**style, "linewidth": 1.1})
    _leave_out_spikes(axes, values)


def _leave_out_spikes(axes: Axes, values: Sequence[float]) -> None:
    """Let a few values that are far beyond all others leave the figure, and say how far they reach."""
    ordered = sorted(values)
    skipped = len(ordered) // 50
    low, high = ordered[skipped], ordered[-1 - skipped]
    room = 0.15 * (high - low)
    beyond = [end for end in (ordered[0], ordered[-1]) if not low - 40 * room < end < high + 40 * room]
    if not beyond or not room:
        return
    axes.set_ylim(max(ordered[0], low - room), min(ordered[-1], high + room))
    told = " and ".join(f"{end:.3g}" for end in beyond)
    axes.set_title(f"reaches {told}", loc="right", color=MUTED, fontsize=7)


def _bounds(row: Mapping[str, Any], key: str) -> tuple[float, float]:
    """The interval of a value, or the value itself where none is known."""
    bounds = row.get(f"{key}_interval")
    return (row[key], row[key]) if bounds is None or None in bounds else (bounds[0], bounds[1])


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    """Inches; in the page a figure is as wide as its column."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _over_policies(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.margins(x=0.04)
    axes.set_xlabel("policy")


def _svg(figure: Figure, name: str) -> str:
    """The figure as an element of a page: no names that another figure has too, and no colours of its own."""
    file = StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = _HEAD.sub("", text[text.index("<svg") :])
    text = _FONT.sub(lambda match: f"font-size: {match['size'].strip()}" if match["size"] else "", text)
    text = _NAMES.sub(lambda match: f"{match['before']}{name}-", text)
    for color, variable in _VARIABLES.items():
        text = text.replace(color, f"var({variable})")
    head, _, rest = text.partition(">")
    head = _NAMESPACES.sub("", head)
    return f'{head} aria-hidden="true">{rest}'
