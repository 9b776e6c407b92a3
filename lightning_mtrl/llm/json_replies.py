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
    # Python would read NaN and Infinity, which JSON does not have, and which pass for numbers in any range.
    decoder = json.JSONDecoder(parse_constant=_refused)
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
    if not (errors := _misfits(found, schema)):
        return None
    place = ".".join(map(str, errors[0].path))
    return f"{place}: {errors[0].message[:200]}" if place else errors[0].message[:200]


def kind_of_misfit(found: Mapping[str, Any] | None, schema: Mapping[str, Any]) -> str | None:
    """What `complaint_about` complains of, in a few words to count by; None where the object fits."""
    if found is None:
        return "no JSON object in the reply"
    if not (errors := _misfits(found, schema)):
        return None
    beyond = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
    return "number out of range" if errors[0].validator in beyond else "reply does not fit the schema"


def _misfits(found: Mapping[str, Any], schema: Mapping[str, Any]) -> list[Any]:
    from jsonschema import Draft202012Validator

    errors = Draft202012Validator(dict(schema)).iter_errors(dict(found))
    return sorted(errors, key=lambda error: list(error.path))


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
