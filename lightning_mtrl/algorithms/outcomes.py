"""Outcomes that tell no response from another, in words."""

from __future__ import annotations

from collections.abc import Iterable


def all_outcomes_are(outcomes: Iterable[float | None]) -> str:
    """That all outcomes are equal, and what is needed; empty where two of them differ.

    Args:
        outcomes: of conversations; unknown ones do not count.
    """
    known = [outcome for outcome in outcomes if outcome is not None]
    if len(set(known)) != 1:
        return ""
    return (
        f"all {len(known)} outcomes are {known[0]:g}, so none of them says which response was better; "
        f"conversations with other outcomes are needed too"
    )
