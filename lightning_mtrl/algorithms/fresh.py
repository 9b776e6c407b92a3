"""Fresh rollouts as whole-conversation methods need them: in one batch, scored by pi_0 once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lightning_mtrl.algorithms.base import Context
from lightning_mtrl.algorithms.passes import referenced
from lightning_mtrl.batch import ReferencedBatch, collate
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.credit.base import Credit
from lightning_mtrl.errors import UserError


@dataclass(frozen=True)
class FreshRollouts:
    """Conversations of the current policy that ended with an outcome.

    Attributes:
        batch: on the CPU, one row a conversation.
        conversations: the same, in order.
    """

    batch: ReferencedBatch
    conversations: list[Conversation]

    def part(self, rows: Int[Tensor, " R"]) -> Self:
        """Some of the conversations."""
        return replace(
            self,
            batch=self.batch.rows(rows),
            conversations=[self.conversations[row] for row in rows.tolist()],
        )


@dataclass(frozen=True)
class CreditedRollouts:
    """Conversations to learn from, with their credit.

    Attributes:
        fresh: the conversations.
        credit: their rewards.
        left_out: conversations that are not among them: without credit, or alone in their group.
    """

    fresh: FreshRollouts
    credit: Credit
    left_out: int


def fresh_rollouts(conversations: Sequence[Conversation], reference: str, context: Context) -> FreshRollouts:
    """Put conversations into one batch, with the log-probabilities of pi_0.

    Args:
        conversations: with outcomes.
        reference: role of pi_0.
        context: tokenizer and device.

    Raises:
        UserError: if a response was drawn for coverage, since it is none of the policy's.
    """
    if any(c.explored_turn for c in conversations):
        raise UserError(
            "data.explore_share is above 0, but this algorithm learns from the policy's own responses only, "
            "and those drawn for coverage are none. Pass --data.explore_share 0."
        )
    batch = collate(conversations, context.chat.pad_id, context.chat.header_ids)
    return FreshRollouts(referenced(batch, reference, context), list(conversations))


def credited(fresh: FreshRollouts, credit: Credit, compares: bool) -> CreditedRollouts:
    """Leave out conversations that have no credit, and with `compares` those that have no others to compare.

    Raises:
        UserError: if no conversation is left.
    """
    known = torch.ones(len(fresh.batch), dtype=torch.bool) if credit.known is None else credit.known
    kept = known & _accompanied(fresh.batch.group, known) if compares else known
    rows = kept.nonzero().flatten()
    if not len(rows):
        raise UserError(
            f"none of {len(known)} conversations can be learned from: {int((~known).sum())} have no credit, "
            f"and {int(known.sum())} are alone in their group. Mend what gives the credit, or raise "
            f"data.group_size."
        )
    part = fresh.part(rows)
    width = part.batch.input_ids.size(1)
    chosen = replace(
        credit,
        rewards=credit.rewards[rows, :width],
        reward_mask=credit.reward_mask[rows, :width],
        known=None,
    )
    return CreditedRollouts(part, chosen, len(known) - len(rows))


def _accompanied(group: Int[Tensor, " B"], known: Bool[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """True where another known conversation of the same group exists."""
    others = (group[:, None] == group) & known
    return others.sum(1) > 1
