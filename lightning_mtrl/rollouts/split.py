"""Which conversations a split must not separate, and who is held out."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

from lightning_mtrl.conversation import Conversation


def owners(conversations: Sequence[Conversation]) -> list[str]:
    """One name for each conversation; those with the same name stay on one side of a split.

    Together are the conversations of a customer (`metadata["customer"]`, unless that is empty), those of a
    group, which share their initial state, and whatever these two link.
    """
    sizes = Counter(_group(conversation) for conversation in conversations)
    ties = [_ties(conversation, sizes[_group(conversation)]) for conversation in conversations]
    root: dict[str, str] = {}
    for first, *others in ties:
        for other in others:
            one, two = sorted((_root(root, first), _root(root, other)))
            if one != two:
                root[two] = one
    return [_root(root, first) for first, *_ in ties]


def held_out(names: Iterable[str], share: float, seed: int) -> set[str]:
    """Who is held out: each owner with probability `share`, but at least one, and one left over.

    Args:
        names: of owners, at least two.
        share: in (0, 1).
        seed: with the name alone it decides, so more data moves nobody to the other side.
    """
    drawn = sorted((_draw(name, seed), name) for name in set(names))
    below = sum(number < share for number, _ in drawn)
    return {name for _, name in drawn[: min(max(below, 1), len(drawn) - 1)]}


def _ties(conversation: Conversation, group_size: int) -> list[str]:
    """What binds a conversation to others, at least its own id."""
    customer, group = conversation.metadata.get("customer"), _group(conversation)
    found = [] if customer in (None, "") else [f"customer/{customer}"]
    if group is not None and group_size > 1:
        found.append(group)
    return found or [f"id/{conversation.id}"]


def _group(conversation: Conversation) -> str | None:
    """Name of the group among all rollouts; None where none is known: a log has group 0 and seed 0."""
    c = conversation
    return f"group/{c.policy}/{c.seed}/{c.group}" if c.group or c.seed else None


def _root(root: dict[str, str], name: str) -> str:
    while name in root:
        name = root[name]
    return name


def _draw(name: str, seed: int) -> float:
    digest = hashlib.sha256(f"{seed}/{name}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8]) / 2**64
