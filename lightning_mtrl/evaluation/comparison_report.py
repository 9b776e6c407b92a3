"""What a comparison says, on a terminal and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lightning_mtrl.evaluation.arms import Arm
from lightning_mtrl.evaluation.compare import Comparison, Finding
from lightning_mtrl.evaluation.sample_size import Plan

_LEAST_P = 0.0001
_WIDTH = 110  # of what is no terminal, such as a file


def show(comparison: Comparison | None, plan: Plan | None, console: Console | None = None) -> None:
    """Print what there is.

    Args:
        comparison: of two logs.
        plan: of the next comparison.
        console: where to; standard output by default.
    """
    console = console or Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH, file=console.file)
    parts = [] if comparison is None else list(_shown(comparison))
    for part in [*parts, *([] if plan is None else [Text(_planned(plan))])]:
        console.print(part)


def as_json(comparison: Comparison | None, plan: Plan | None) -> dict[str, Any]:
    """The same numbers as one JSON object; null where a number is not finite."""
    result: dict[str, Any] = {}
    if comparison is not None:
        found = comparison
        result = {
            "baseline": _arm(found.baseline, found, 0),
            "candidate": _arm(found.candidate, found, 1),
            **_finding(found.whole, found.alpha),
            "confidence": round(1 - found.alpha, 12),
            "coverage": "count" if found.baseline.coverage_counts else "leave_out",
            "looks": {
                "look": found.looks.number,
                "fractions": list(found.looks.fractions),
                "boundary": found.looks.boundary,
                "critical_value": found.looks.critical_value(found.alpha),
                "nominal_level": found.looks.nominal_level(found.alpha),
            },
            "segments": [
                {"segment": segment.segment, **_finding(segment, found.alpha)} for segment in found.segments
            ],
            "notes": list(found.notes),
        }
    if plan is not None:
        result["plan"] = {
            "detect": plan.detect,
            "power": plan.power,
            "confidence": round(1 - plan.alpha, 12),
            "baseline_mean": plan.baseline_mean,
            "conversations_per_arm": plan.conversations,
            "scored_per_arm": plan.scored,
            "conversations_per_look": list(plan.per_look),
            "design_effect": plan.design_effect,
            "inflation": plan.inflation,
        }
    return result


def _arm(arm: Arm, comparison: Comparison, side: int) -> dict[str, Any]:
    return {
        "file": arm.file,
        "policies": arm.policies,
        "conversations": len(arm.conversations),
        "scored": len(arm.scored),
        "missing": arm.missing,
        "truncated": arm.truncated,
        "left_out": dict(arm.left_out),
        "coverage": dict(arm.coverage),
        "clusters": comparison.clusters[side],
        "mean": _finite(comparison.whole.means[side]),
        "interval": _ends(comparison.intervals[side]),
    }


def _finding(finding: Finding, alpha: float) -> dict[str, Any]:
    found = finding.difference
    return {
        "difference": None if found is None else found.estimate,
        "interval": _ends(finding.interval),
        "p_value": finding.p_value,
        "nominal_p_value": finding.nominal_p_value,
        "method": None if found is None else found.method,
        "verdict": finding.verdict(alpha),
        **(
            {}
            if finding.segment is None
            else {"scored": list(finding.sizes), "means": [_finite(mean) for mean in finding.means]}
        ),
    }


def _ends(interval: tuple[float, float]) -> list[float | None]:
    return [_finite(end) for end in interval]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _shown(comparison: Comparison) -> Iterator[RenderableType]:
    yield _arms(comparison)
    yield Text(_answer(comparison))
    if comparison.segments:
        yield _segments(comparison)
    for note in comparison.notes:
        yield Text(f"Note: {note}")


def _arms(comparison: Comparison) -> Table:
    clustered = any(
        number < len(arm.scored)
        for number, arm in zip(comparison.clusters, (comparison.baseline, comparison.candidate), strict=True)
    )
    headers = ["", "log", "conversations", "missing", "truncated"]
    headers += [*(["clusters"] if clustered else []), "success rate" if comparison.binary else "mean outcome"]
    table = _table([*headers, f"{1 - comparison.alpha:.0%} interval"], texts=2)
    for side, arm in enumerate((comparison.baseline, comparison.candidate)):
        counts = [len(arm.conversations), arm.missing, arm.truncated]
        counts += [comparison.clusters[side]] if clustered else []
        table.add_row(
            arm.role,
            escape(Path(arm.file).name),
            *map(str, counts),
            f"{comparison.whole.means[side]:.3f}",
            _interval(comparison.intervals[side]),
        )
    return table


def _answer(comparison: Comparison) -> str:
    found, looks, alpha = comparison.whole, comparison.looks, comparison.alpha
    assert found.difference is not None, "both sides have outcomes"
    told = (
        f"Difference {found.difference.estimate:+.3f} {_interval(found.interval, signed=True)}, "
        f"p {_p(found.p_value)}: {comparison.verdict} ({found.difference.method}, two-sided)."
    )
    if len(looks.fractions) > 1:
        told += (
            f"\nLook {looks.number} of {len(looks.fractions)}, {looks.boundary}: the comparison ends if |z| "
            f"is above {looks.critical_value(alpha):.3f}, which is a level of "
            f"{looks.nominal_level(alpha):.4f} at this look; interval and p are corrected for all looks (by "
            f"itself the test has p {_p(found.nominal_p_value)})."
        )
    return told


def _segments(comparison: Comparison) -> Table:
    headers = ["segment", "baseline", "candidate", "difference", "interval", "p (Holm)", ""]
    table = _table(headers, texts=1)
    table.caption = (
        f"Intervals hold together with {1 - comparison.alpha:.0%}; p is corrected by Holm's procedure."
    )
    for finding in comparison.segments:
        sides = [
            f"{mean:.3f} of {size}" if size else "none"
            for mean, size in zip(finding.means, finding.sizes, strict=True)
        ]
        if finding.difference is None:
            table.add_row(escape(str(finding.segment)), *sides, "", "", "", finding.verdict(comparison.alpha))
            continue
        table.add_row(
            escape(str(finding.segment)),
            *sides,
            f"{finding.difference.estimate:+.3f}",
            _interval(finding.interval, signed=True),
            _p(finding.p_value).removeprefix("= "),
            finding.verdict(comparison.alpha),
        )
    return table


def _planned(plan: Plan) -> str:
    told = (
        f"To see a difference of {plan.detect:+g} from {plan.baseline_mean:.3f} with power {plan.power:g} "
        f"(two-sided, {1 - plan.alpha:.0%}), {plan.conversations} conversations of each policy are needed"
    )
    if plan.conversations > plan.scored:
        told += f", of which {plan.scored} have an outcome"
    reasons = []
    if plan.design_effect is None:
        reasons.append("what clusters cost is unknown with one alone, so nothing is added for them")
    elif plan.design_effect > 1:
        reasons.append(f"clusters cost {plan.design_effect:.2f} times as many")
    if plan.inflation > 1:
        by_look = ", ".join(map(str, plan.per_look))
        reasons.append(f"{len(plan.per_look)} looks {plan.inflation:.3f} times; by each look {by_look}")
    return told + (f" ({'; '.join(reasons)})." if reasons else ".")


def _table(headers: Sequence[str], texts: int) -> Table:
    table = Table(box=None, pad_edge=False, caption_justify="left")
    for place, header in enumerate(headers):
        right = texts <= place < len(headers) - (headers[-1] == "")
        table.add_column(escape(header), justify="right" if right else "left", overflow="fold")
    return table


def _interval(ends: tuple[float, float], signed: bool = False) -> str:
    low, high = (f"{end:+.3f}" if signed else f"{end:.3f}" for end in ends)
    return f"[{low}, {high}]"


def _p(value: float) -> str:
    return f"< {_LEAST_P:g}" if value < _LEAST_P else f"= {value:.4f}"
