"""Reading JSON out of what a language model says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def object_in(text: str) -> dict[str, Any] | None:
    """The first JSON object in a text, whatever stands around it; None if there is none.

    >>> object_in('Sure! ```json {"score": 7} ``` Anything else?')
    {'score': 7}
    """
    decoder = json.JSONDecoder()
    start = text.find("{")
    while start >= 0:
        try:
            found, _ = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            start = text.find("{", start + 1)
        else:
            return dict(found)
    return None


def complaint_about(found: Mapping[str, Any] | None, schema: Mapping[str, Any]) -> str | None:
    """Why an object does not fit a JSON Schema, in one line; None where it does."""
    if found is None:
        return "there is no JSON object"
    from jsonschema import Draft202012Validator

    errors = sorted(
        Draft202012Validator(dict(schema)).iter_errors(dict(found)), key=lambda error: list(error.path)
    )
    if not errors:
        return None
    place = ".".join(map(str, errors[0].path))
    return f"{place}: {errors[0].message[:200]}" if place else errors[0].message[:200]
