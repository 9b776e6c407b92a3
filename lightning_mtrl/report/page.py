"""The page of a run: what was read, in the words and figures of a self-contained HTML document."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from lightning_mtrl.report import settings
from lightning_mtrl.report.figures import curve_figure, panel_figure
from lightning_mtrl.report.panels import groups_in
from lightning_mtrl.report.reading import RunRecord, Stored
from lightning_mtrl.report.samples import RANKS, Sample, chosen, sample_of
from lightning_mtrl.report.wording import (
    UNKNOWN,
    dropped,
    duration,
    figure,
    interval,
    result,
    seconds,
    share,
    state,
)

Row = Mapping[str, Any]
_LOSSES = {"q_loss": "Q loss", "prm_loss": "PRM loss"}


@dataclass(frozen=True)
class Drawing:
    """A figure of the page.

    Attributes:
        title: above it.
        unit: beside the title.
        source: name of what is drawn, as in metrics.csv or summary.json.
        told: the figure in words, for those who cannot see it.
        svg: the figure.
    """

    title: str
    unit: str
    source: str
    told: str
    svg: str


@dataclass(frozen=True)
class Column:
    """A column of the table of policies; `text` writes its cell."""

    title: str
    text: Callable[[Row], str]
    group: str = ""


def render(run: RunRecord, now: datetime | None = None) -> str:
    """The whole document.

    Texts of conversations, names and configurations are escaped wherever they stand (only the style and the
    figures, which are ours and hold no text of a run, are written as they are), and the page allows
    itself no script and no address: nothing in a run can become part of the page's own markup.

    Args:
        run: what was read.
        now: when the page is made; None for the time of the call.
    """
    loader = PackageLoader("lightning_mtrl.report", "")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    style = loader.get_source(environment, "page.css")[0]
    text = environment.get_template("page.html").render(
        style=style, made=_time(now or datetime.now(UTC)), **_content(run)
    )
    # Half a character, which a conversation may hold, cannot be written in a file.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _content(run: RunRecord) -> dict[str, Any]:
    summary, config = run.summary, run.config
    is_over, progress = state(run)
    columns = _columns(summary.iterations)
    return {
        "name": run.name,
        "kinds": [
            settings.class_name(config, "algorithm"),
            settings.class_name(config, "environment"),
            str(config.get("model", {}).get("name", UNKNOWN)),
        ],
        "facts": {
            "Begun": _time(run.begun),
            "Seed": str(config.get("seed", UNKNOWN)),
            "Computed for": duration(summary.seconds),
            "Policies": progress if is_over else f"{run.done} of {run.wanted} iterations so far",
        },
        "versions": ", ".join(f"{name} {number}" for name, number in summary.versions.items()),
        "unfinished": "" if is_over else progress,
        "result": result(summary.iterations, summary.optimum_success_rate),
        "curves": _learning_curves(run),
        "columns": columns,
        "headings": [(group, len(list(same))) for group, same in groupby(column.group for column in columns)],
        "rows": summary.iterations,
        "situations": _situations(summary.iterations),
        "groups": _groups(run),
        "stages": [stored.iteration for stored in run.stored],
        "samples": _samples(run.stored),
        "images": {name.replace("_", " "): b64encode(data).decode() for name, data in run.figures.items()},
        "differing": settings.differing(config),
        "config": run.config_text,
    }


def _learning_curves(run: RunRecord) -> list[Drawing]:
    rows = [row for row in run.summary.iterations if row["success_rate"] is not None]
    if not rows:
        return []
    wanted = (
        ("Success rate", "success_rate", run.summary.optimum_success_rate),
        ("Mean return", "mean_return", run.summary.optimum_return),
    )
    return [
        Drawing(
            title,
            "with 95% intervals",
            key,
            _told(title, [(row["iteration"], row[key]) for row in rows]),
            curve_figure(rows, key, optimum, key),
        )
        for title, key, optimum in wanted
    ]


def _groups(run: RunRecord) -> dict[str, list[Drawing]]:
    found: dict[str, list[Drawing]] = {}
    for group, panels in groups_in(run.curves):
        for number, panel in enumerate(panels):
            curve = run.curves[panel.lines[0]]
            places = range(1, len(curve.values) + 1) if panel.by_step else curve.iterations
            drawing = Drawing(
                panel.title,
                panel.unit,
                panel.lines[0],
                _told(panel.title, list(zip(places, curve.values, strict=True)), panel.by_step),
                panel_figure(panel, run.curves, f"{group.split()[-1]}-{number}"),
            )
            found.setdefault(group, []).append(drawing)
    return found


def _told(title: str, points: Sequence[tuple[int, float]], by_step: bool = False) -> str:
    """A curve in words: where it begins, where it ends."""
    place = "optimizer step" if by_step else "policy"
    (first, before), (last, after) = points[0], points[-1]
    ends = f" and {figure(after)} at {place} {last}" if len(points) > 1 else ""
    return f"{title}: {figure(before)} at {place} {first}{ends}."


def _columns(rows: Sequence[Row]) -> list[Column]:
    """Columns of the table; of the two losses the one that the method has, of phases those that took time."""
    losses = [key for key in _LOSSES if any(row.get(key) is not None for row in rows)]
    phases = dict.fromkeys(phase for row in rows for phase in row["seconds"])
    return [
        Column("Policy", lambda row: str(row["iteration"])),
        Column("rate", lambda row: share(row["success_rate"]), "Success"),
        Column("95% interval", lambda row: interval(row["success_rate_interval"]), "Success"),
        Column("mean", lambda row: share(row["mean_return"]), "Return"),
        Column("95% interval", lambda row: interval(row["mean_return_interval"]), "Return"),
        Column("Turns", lambda row: share(row["turns"], 2)),
        Column("Tokens", lambda row: share(row["tokens"], 1)),
        Column("KL", lambda row: share(row["kl"])),
        *(_column_of(key) for key in losses or ["q_loss"]),
        Column("Calibration error", lambda row: share(row["calibration_error"])),
        Column("Step", lambda row: _STEPS[row["accepted"]]),
        Column("Dropped", lambda row: dropped(row["dropped"])),
        *(_phase(phase) for phase in phases),
    ]


_STEPS = {True: "taken", False: "not taken", None: UNKNOWN}


def _column_of(key: str) -> Column:
    return Column(_LOSSES[key], lambda row: share(row.get(key)))


def _phase(phase: str) -> Column:
    return Column(phase, lambda row: seconds(row["seconds"].get(phase)), "Seconds")


def _situations(rows: Sequence[Row]) -> str:
    """How many conversations measured each policy, where that is one number."""
    numbers = {row["conversations"] for row in rows} - {None}
    return f"{numbers.pop()} " if len(numbers) == 1 else ""


def _samples(stored: Sequence[Stored]) -> dict[str, list[Sample | None]]:
    """By rank, one conversation of each iteration that is stored."""
    found = [chosen(one.conversations) for one in stored]
    ranked = {rank: [sample_of(one[rank]) if rank in one else None for one in found] for rank in RANKS}
    return {rank: samples for rank, samples in ranked.items() if any(samples)}


def _time(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
