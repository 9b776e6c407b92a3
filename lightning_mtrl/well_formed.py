"""What texts and numbers of others must be before anything is computed with them."""

from __future__ import annotations

import math
from typing import Any


def lone_surrogate(text: str) -> str | None:
    r"""The first half of a character without its other half; None where every character is whole.

    JSON may hold one, as of an emoji that was cut in two; UTF-8 has no bytes for it, and a model no tokens.

    >>> lone_surrogate("café"), lone_surrogate("hi \ud83d x") == "\ud83d"
    (None, True)
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return None


def is_finite(value: Any) -> bool:
    """Whether it is a number that a float can hold: no NaN, infinity, larger integer, text or None.

    >>> [is_finite(value) for value in (1, True, 0.5, 10**400, float("nan"), "1", None)]
    [True, True, True, False, False, False, False]
    """
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False
