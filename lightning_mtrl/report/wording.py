"""Numbers with sensible digits, and the sentences at the head of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_mtrl.counting import by_cause, counted
from lightning_mtrl.report.reading import RunRecord

UNKNOWN = "—"

Row = Mapping[str, Any]


def share(value: float | None, places: int = 3) -> str:
    """A number near 1, such as a rate or a return, to three places or fewer.

    >>> share(0.30078), share(None), share(-0.0001)
    ('0.301', '—', '0.000')
    """
    return UNKNOWN if value is None else f"{value:z.{places}f}"


def interval(bounds: Sequence[float | None] | None) -> str:
    """A pair of bounds.

    >>> interval([0.2627, 0.3419]), interval(None), interval([None, None])
    ('[0.263, 0.342]', '—', '—')
    """
    if bounds is None or None in bounds:
        return UNKNOWN
    return f"[{share(bounds[0])}, {share(bounds[1])}]"


def figure(value: float | None) -> str:
    """A number of any size, to three digits.

    >>> [figure(value) for value in (1.37006, 0.00012345, 12345.6, 0, None)]
    ['1.37', '0.000123', '12,346', '0', '—']
    """
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:z.3g}"


def seconds(value: float | None) -> str:
    """A time of a phase in seconds.

    >>> seconds(1.8505), seconds(87.3), seconds(None)
    ('1.9', '87', '—')
    """
    if value is None:
        return UNKNOWN
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def duration(value: float) -> str:
    """A time in words.

    >>> duration(8.4), duration(141.97), duration(7384)
    ('8 s', '2 min 22 s', '2 h 3 min')
    """
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, left = divmod(minutes, 60)
    return f"{hours} h {left} min" if hours else f"{minutes} min {rest} s"


def dropped(counts: Mapping[str, int] | None) -> str:
    """How many were dropped, by cause.

    >>> dropped({}), dropped({"simulator failed": 3}), dropped(None)
    ('0', 'simulator failed 3', '—')
    """
    return UNKNOWN if counts is None else by_cause(counts) or "0"


def result(rows: Sequence[Row], optimum: float | None) -> str:
    """What the run achieved, in one sentence; in a second one the return where the success rate says little.

    Args:
        rows: of the summary, one a policy.
        optimum: success rate of the best agent; None where unknown.

    >>> early = {"iteration": 0, "success_rate": 0.3, "success_rate_interval": [0.26, 0.34]}
    >>> late = {"iteration": 2, "success_rate": 0.8, "success_rate_interval": [0.76, 0.84]}
    >>> result([early, late], 0.85)
    'The success rate rose from 0.300 [0.260, 0.340] to 0.800 [0.760, 0.840], of 0.850 possible.'
    """
    measured = [row for row in rows if row["success_rate"] is not None]
    if not measured:
        return "No policy has been measured yet."
    best = "" if optimum is None else f", of {share(optimum)} possible"
    first, last = measured[0], measured[-1]
    if first is last:
        rate = _with_interval(first, "success_rate")
        return f"Policy {first['iteration']} succeeds at a rate of {rate}{best}."
    told = f"The success rate {_course(first, last, 'success_rate')}{best}."
    if _verb(first, last, "success_rate") != "went":
        return told
    return f"{told} The mean return {_course(first, last, 'mean_return')}."


def _course(first: Row, last: Row, key: str) -> str:
    verb = _verb(first, last, key)
    return f"{verb} from {_with_interval(first, key)} to {_with_interval(last, key)}"


def _with_interval(row: Row, key: str) -> str:
    return f"{share(row[key])} {interval(row[f'{key}_interval'])}"


def _verb(first: Row, last: Row, key: str) -> str:
    """`went` where the intervals share a number, or one is not known."""
    before, after = (row[f"{key}_interval"] for row in (first, last))
    if any(bounds is None or None in bounds for bounds in (before, after)):
        return "went"
    if after[0] > before[1]:
        return "rose"
    return "fell" if after[1] < before[0] else "went"


def state(run: RunRecord) -> tuple[bool, str]:
    """Whether the run is over, and how far it is."""
    if run.from_logs:
        return True, "learned from logs, without an environment"
    of_all = f"{run.done} of {counted(run.wanted, 'iteration')}"
    if run.done >= run.wanted:
        return True, f"all {counted(run.wanted, 'iteration')} done" if run.wanted > 1 else "1 iteration done"
    if run.converged:
        return True, f"converged after {of_all}"
    if run.being_written:
        return False, f"The run is still going: {of_all} done. This page shows it as it stands now."
    return False, (
        f"The run is not finished: {of_all} done, and no process is at work in its folder. "
        f"fit --resume {run.path} continues it."
    )
