"""What texts and numbers of others must be before anything is computed with them."""

from __future__ import annotations

import math
from collections.abc import Mapping
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


def json_value(value: Any) -> Any:
    """A value as JSON has it: what JSON lacks, such as NaN, becomes its `repr`, a tuple a list.

    A time becomes its text in ISO form, and half of a character its escape, since UTF-8 has no bytes for it.
    """
    if isinstance(value, Mapping):
        return {_whole(str(key)): json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(float(value))
    if isinstance(value, str):
        return _whole(value)
    if value is None or isinstance(value, int | float):
        return value
    if hasattr(value, "isoformat"):
        return str(value.isoformat())
    # Numbers and arrays of NumPy and torch know how to become plain ones.
    return json_value(value.tolist()) if hasattr(value, "tolist") else _whole(repr(value))


def _whole(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
