"""What the numbers of a configuration may be; a wrong one is told before a model loads."""

from __future__ import annotations

import math

from lightning_mtrl.errors import UserError


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
