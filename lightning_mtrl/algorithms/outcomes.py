"""Outcomes that tell no response from another, in words."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_mtrl.conversation import Conversation


def all_outcomes_are(conversations: Sequence[Conversation]) -> str:
    """That all outcomes are equal, and what is needed; empty where two of them differ.

    Args:
        conversations: those without an outcome do not count.
    """
    outcomes = [c.outcome for c in conversations if c.outcome is not None]
    if len(set(outcomes)) != 1:
        return ""
    return (
        f"all {len(outcomes)} outcomes are {outcomes[0]:g}, so none of them says which response was better; "
        f"conversations with other outcomes are needed too"
    )
