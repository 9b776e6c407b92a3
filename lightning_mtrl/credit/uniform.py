"""The outcome in equal shares."""

from __future__ import annotations

from lightning_mtrl import objectives
from lightning_mtrl.batch import ConversationBatch
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.credit.base import Credit, CreditAssigner, share_outcome, turn_mask


class Uniform(CreditAssigner):
    """Each of K turns gets 1/K of the outcome. It knows nothing about turns and learns nothing.

    Source: the baseline "uniform decomposition" of ITPO (arXiv:2603.23550), table 1; `Dirichlet` is its other
    reading.
    """

    def assign(self, batch: ConversationBatch, conversations: list[Conversation]) -> Credit:
        """Equal shares at the ends of the responses."""
        return share_outcome(objectives.uniform_weights(turn_mask(batch)), batch)
