"""No credit for turns: the outcome arrives at the end."""

from __future__ import annotations

import torch

from lightning_mtrl.batch import ConversationBatch
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.credit.base import Credit, CreditAssigner, conversation_ends


class Outcome(CreditAssigner):
    """The whole outcome is the reward of the last sampled token.

    With `GAE` it is PPO with a value model alone, the first row of each block of the paper's table 1; which
    turn mattered is then the value head's to find out. It learns nothing itself.
    """

    def assign(self, batch: ConversationBatch, conversations: list[Conversation]) -> Credit:
        """Source: the baseline "value model only" of ITPO (arXiv:2603.23550), table 1."""
        ends = conversation_ends(batch)
        rewards = torch.where(ends, batch.outcome[:, None], 0.0)
        return Credit(rewards, ends, includes_outcome=True)
