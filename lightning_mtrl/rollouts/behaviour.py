"""Whose behaviour a conversation shows: the policy's own, or one that was made to differ for coverage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

from lightning_mtrl.conversation import Conversation

Coverage = Literal["explored", "persona"]
_WORDS: tuple[tuple[Coverage, str], ...] = (
    ("explored", "drawn to be explored"),
    ("persona", "under a persona"),
)


def coverage_of(conversation: Conversation) -> Coverage | None:
    """Why a conversation as it was collected is not the policy's own; None where it is.

    "persona": it was led under one, whose text the prompt still has (`data.persona_share`). "explored": a
    turn was drawn whose response is sampled from a flattened distribution (`data.explore_share`), whether the
    conversation got there or not: how long one lasts has to do with its outcome. A key "persona" in the
    metadata of somebody's log, without that text in the prompt, means nothing here.
    """
    if conversation.plain_prompt != conversation.prompt:
        return "persona"
    return "explored" if conversation.explored_turn else None


def told(counts: Counter[Coverage]) -> str:
    """How many of each, in words; empty where there are none.

    >>> told(Counter({"explored": 3, "persona": 1}))
    '3 drawn to be explored and 1 under a persona'
    """
    return " and ".join(f"{counts[kind]} {text}" for kind, text in _WORDS if counts[kind])


def count_coverage(conversations: Iterable[Conversation]) -> Counter[Coverage]:
    """How many conversations are not the policy's own, by `coverage_of`."""
    return Counter(kind for kind in map(coverage_of, conversations) if kind is not None)
