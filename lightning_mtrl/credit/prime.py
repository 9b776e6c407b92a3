"""PRIME: a reward for each token from the implicit PRM."""

from __future__ import annotations

from lightning_mtrl.batch import ConversationBatch
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.credit.base import Credit
from lightning_mtrl.credit.implicit import ImplicitCredit


class PRIME(ImplicitCredit):
    """Every sampled token has its own reward beta u; nothing is summed over turns.

    The published runs add the outcome with the same weight (`process_weight` 5, `outcome_weight` 5), the
    prescale "batch_max" and `drop_last_token`.

    Source: Cui et al. 2025 (arXiv:2502.01456).
    """

    def assign(self, batch: ConversationBatch, conversations: list[Conversation]) -> Credit:
        """Token rewards of the PRM."""
        rewards, report = self.token_rewards(batch)
        return Credit(rewards, batch.response_mask, report)
