"""ITPO: a reward for each turn, the sum of the implicit PRM's token rewards."""

from __future__ import annotations

from lightning_mtrl import objectives
from lightning_mtrl.batch import ConversationBatch
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.credit.base import Credit, turn_ends
from lightning_mtrl.credit.implicit import ImplicitCredit


class ITPO(ImplicitCredit):
    """R_k = beta times the summed log-ratio of response k, at its last token.

    One token's log-ratio is noise, and a sum over a unit of meaning is less so. Turns of a failure can be
    blamed, unlike with `NormITPO`. The rewards of a conversation sum to its logit, whose relation to the
    outcome drifts while the PRM learns. The paper's table 1 was made with `process_weight` 5 and
    `outcome_weight` 5, its released scripts with 5 : 0 (math tutoring), 15 : 0 (document writing) and 5 : 5
    (medical), the prescale "batch_max" and `drop_last_token`.

    Source: ITPO (arXiv:2603.23550).
    """

    def assign(self, batch: ConversationBatch, conversations: list[Conversation]) -> Credit:
        """Turn sums of the PRM's token rewards."""
        rewards, report = self.token_rewards(batch)
        sums = objectives.turn_sums(rewards, batch.turn_index)
        return Credit(objectives.place_turn_rewards(sums, batch.turn_index), turn_ends(batch), report)
