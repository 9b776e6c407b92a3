"""One side of a comparison: what of its logged conversations is compared, and what is only counted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from lightning_mtrl.conversation import Conversation
from lightning_mtrl.counting import by_cause, counted
from lightning_mtrl.errors import UserError
from lightning_mtrl.evaluation.samples import Sample
from lightning_mtrl.rollouts.behaviour import Coverage, told
from lightning_mtrl.rollouts.split import owners

NO_VALUE = "(none)"


@dataclass(frozen=True)
class Arm:
    """The conversations of one log.

    Attributes:
        role: "baseline" or "candidate".
        file: where they were read from.
        conversations: those to compare; their turns are not looked at.
        left_out: number of records that could not be read, by cause.
        coverage: number of conversations that are not the policy's own (`coverage_of`), by kind.
        coverage_counts: whether these are among `conversations`; else they were left out.
    """

    role: str
    file: str
    conversations: Sequence[Conversation]
    left_out: Mapping[str, int] = field(default_factory=dict)
    coverage: Counter[Coverage] = field(default_factory=Counter)
    coverage_counts: bool = False

    @cached_property
    def scored(self) -> list[Conversation]:
        """Conversations with an outcome; the others are counted and never a zero."""
        return [c for c in self.conversations if c.outcome is not None]

    @property
    def missing(self) -> int:
        """Conversations without an outcome."""
        return len(self.conversations) - len(self.scored)

    @property
    def coverage_told(self) -> str:
        """How many conversations are not the policy's own, in words; empty for none."""
        return told(self.coverage)

    @property
    def truncated(self) -> int:
        """Conversations that a limit cut off, with or without an outcome."""
        return sum(c.truncated for c in self.conversations)

    @property
    def policies(self) -> list[str]:
        """Names of the policies that held the conversations."""
        return sorted({c.policy for c in self.conversations if c.policy})

    def expect_outcomes(self) -> None:
        """Refuse a log without outcomes.

        Raises:
            UserError: if there is none.
        """
        if not self.conversations and self.coverage and not self.coverage_counts:
            raise UserError(
                f"--{self.role}: {self.file} holds no conversation of the policy alone, but "
                f"{self.coverage_told}. Pass --coverage count to compare these, or collect without personas "
                f"and exploration."
            )
        if not self.scored:
            number = counted(len(self.conversations), "conversation")
            left_out = f" Left out: {by_cause(self.left_out)}." if self.left_out else ""
            raise UserError(
                f"--{self.role}: {self.file} holds {number}, but none with an outcome; a number under "
                f"'outcome' was expected in at least one of them.{left_out}"
            )

    def expect_key(self, option: str, key: str) -> None:
        """Refuse a key of the metadata that no conversation has.

        Raises:
            UserError: if none has it.
        """
        if any(_look_up(c.metadata, key) is not None for c in self.conversations):
            return
        known = Counter(name for c in self.conversations for name in c.metadata)
        there = f"There are: {', '.join(sorted(known))}." if known else "There is no metadata at all."
        raise UserError(
            f"{option} is {key!r}, but no conversation of {self.file} has that key in its metadata. {there}"
        )

    def clusters(self, key: str | None, other: Arm | None = None) -> list[str]:
        """What each scored conversation belongs to.

        Args:
            key: of the metadata; a conversation without it stands for itself. None takes what links
                conversations anyhow: their customer, and the group that shares an initial state.
            other: side of the comparison, whose conversations link customers and groups too, so that both
                sides have one name for the same.
        """
        if key is not None:
            values = (_look_up(c.metadata, key) for c in self.scored)
            names = [
                f"id/{c.id}" if v is None else f"key/{v}" for c, v in zip(self.scored, values, strict=True)
            ]
        else:
            names = owners([*self.scored, *(other.scored if other else ())])[: len(self.scored)]
        # Equal ids in two logs are chance, other names are not.
        return [f"{self.role}/{name}" if name.startswith("id/") else name for name in names]

    def sample(self, cluster: str | None = None, other: Arm | None = None) -> Sample:
        """The outcomes.

        Args:
            cluster: see `clusters`.
            other: see `clusters`.
        """
        return Sample.of([float(c.outcome or 0.0) for c in self.scored], self.clusters(cluster, other))

    def segments(self, key: str) -> dict[str, Arm]:
        """The conversations by their value of a key of the metadata."""
        parts: dict[str, list[Conversation]] = {}
        for conversation in self.conversations:
            parts.setdefault(_text(_look_up(conversation.metadata, key)), []).append(conversation)
        return {value: replace(self, conversations=part, left_out={}) for value, part in parts.items()}


def outcome_only(conversation: Conversation, keys: Sequence[str | None] = ()) -> Conversation:
    """A conversation without what was said in it, so that very many fit into memory.

    Args:
        conversation: as read.
        keys: of the metadata that are kept, besides the customer; the names of all others are.
    """
    kept = {"customer", *(key.partition(".")[0] for key in keys if key)} | {key for key in keys if key}
    found = conversation.metadata
    metadata = {name: found[name] if name in kept else None for name in found}
    return replace(conversation, prompt=(), turns=(), prompt_ids=(), metadata=metadata)


def _look_up(metadata: Mapping[str, Any], key: str) -> Any:
    """A value by its key, or by a path such as "facts.urgency"; None where there is none."""
    if key in metadata:
        return metadata[key]
    outer, dot, inner = key.partition(".")
    found = metadata.get(outer)
    return _look_up(found, inner) if dot and isinstance(found, Mapping) else None


def _text(value: Any) -> str:
    if value is None:
        return NO_VALUE
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    # Half of a character, which no terminal can print, is shown as an escape.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
