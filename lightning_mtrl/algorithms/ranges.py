"""The checks of `lightning_mtrl.ranges` for arguments of an algorithm, under their full keys."""

from __future__ import annotations

from lightning_mtrl import ranges

_PREFIX = "algorithm.init_args"  # where a configuration file has the arguments of an algorithm


def expect(holds: bool, key: str, value: object, expected: str, example: object) -> None:
    """Refuse a value; `key` is one of the algorithm's arguments, such as "improvement.samples"."""
    ranges.expect(holds, f"{_PREFIX}.{key}", value, expected, example)


def expect_at_least(key: str, value: float | None, least: float, example: object) -> None:
    """Refuse numbers below `least`, NaN and infinity; None passes."""
    ranges.expect_at_least(f"{_PREFIX}.{key}", value, least, example)


def expect_above_zero(key: str, value: float | None, example: object) -> None:
    """Refuse zero, negative numbers, NaN and infinity; None passes."""
    ranges.expect_above_zero(f"{_PREFIX}.{key}", value, example)
