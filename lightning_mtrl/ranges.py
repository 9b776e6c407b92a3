"""What the numbers of a configuration may be; a wrong one is told before a model loads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lightning_mtrl.errors import UserError


@dataclass(frozen=True)
class Range:
    """A rule that a configuration and the class that reads it share, each under its own name of the number.

    Attributes:
        holds: True for a number that is right; False for NaN.
        expected: what it must be, to follow "it must be".
        example: a value that works, for the advice.
    """

    holds: Callable[[float], bool]
    expected: str
    example: float


TOP_K = Range(lambda value: value >= 0, "a whole number >= 0 (0 keeps every token)", 0)
TOP_P = Range(lambda value: 0 < value <= 1, "a number in (0, 1] (1 keeps every token)", 1.0)
MIN_P = Range(lambda value: 0 <= value < 1, "a number in [0, 1) (0 keeps every token)", 0.0)
SHARE = Range(lambda value: 0 <= value <= 1, "a share between 0 and 1", 0.2)
COUNT = Range(lambda value: 1 <= value < 2**31, "a whole number of at least 1 and at most 2147483647", 32)
SEED = Range(lambda value: 0 <= value < 2**32, "a whole number from 0 to 4294967295", 0)
# The rest would be nothing new to learn from, or nothing to measure with.
PART = Range(lambda value: 0 <= value < 1, "at least 0 and below 1", 0.2)
HEAT = Range(lambda value: math.isfinite(value) and value > 0, "a number > 0", 1.0)


def expect_in(allowed: Range, key: str, value: float) -> None:
    """Refuse what is out of a range."""
    expect(allowed.holds(value), key, value, allowed.expected, allowed.example)


def expect(holds: bool, key: str, value: object, expected: str, example: object) -> None:
    """Refuse a value.

    Args:
        holds: True when the value is right.
        key: full key in a configuration file, such as "data.conversations".
        value: what was given.
        expected: what it must be, to follow "it must be".
        example: a value that works, for the advice.

    Raises:
        UserError: if `holds` is False.
    """
    if not holds:
        raise UserError(
            f"{key} is {value!r}, but it must be {expected}. Set it in the configuration file, "
            f"or pass --{key} {example}."
        )


def expect_at_least(key: str, value: float | None, least: float, example: object) -> None:
    """Refuse numbers below `least`, NaN and infinity; None passes."""
    holds = value is None or (math.isfinite(value) and value >= least)
    expect(holds, key, value, f"at least {least}", example)


def expect_above_zero(key: str, value: float | None, example: object) -> None:
    """Refuse zero, negative numbers, NaN and infinity; None passes."""
    expect(value is None or (math.isfinite(value) and value > 0.0), key, value, "a number > 0", example)
