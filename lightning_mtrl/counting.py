"""Numbers of things in words."""

from __future__ import annotations

from collections.abc import Mapping


def counted(number: int, thing: str) -> str:
    """A number with what it counts, in singular or plural.

    >>> counted(1, "attempt"), counted(2, "attempt")
    ('1 attempt', '2 attempts')
    """
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def by_cause(counts: Mapping[str, int]) -> str:
    """How many of each, the most frequent first.

    >>> by_cause({"not JSON": 1, "no outcome": 12})
    'no outcome 12, not JSON 1'
    """
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{cause} {number}" for cause, number in ordered)
