"""Norm-ITPO: each turn's share of the outcome is the posterior that it was the pivotal one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from lightning_mtrl import objectives
from lightning_mtrl.algorithms.ranges import expect_above_zero
from lightning_mtrl.batch import ConversationBatch
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.credit.base import Credit, share_outcome, turn_mask
from lightning_mtrl.credit.implicit import ImplicitCredit, Prescale
from lightning_mtrl.errors import UserError

EVIDENCE = {
    "sum": objectives.turn_sums,
    "mean_scaled": objectives.scaled_turn_means,
    "mean": objectives.turn_means,
}


class NormITPO(ImplicitCredit):
    """r_k = w_k R with w = softmax(e / eta) over the turns of a conversation, and e the PRM's turn rewards.

    The shares sum to the outcome, so a value head has a fixed target; a failure (R = 0) blames nobody. The
    paper writes the softmax over turn sums of beta times the log-ratio. What its table 1 was made with is the
    released code's: `aggregate` "mean_scaled", `prescale` "batch_max", `drop_last_token` and eta 0.4, with
    `process_weight` 5 and `outcome_weight` 0. Without a prescale a good eta depends on beta and on the length
    of responses, and at beta 0.005 the shares are nearly equal.

    Source: ITPO (arXiv:2603.23550), Norm-ITPO.

    Args:
        eta: temperature, above 0: large for equal shares, small for winner takes all. Published: 0.4.
        aggregate: evidence of a turn: "sum" over its tokens (the paper); "mean_scaled" for their mean times
            the mean length of all responses (the released code); "mean".
        prescale: "none" (the paper) or "batch_max" (the released code); see `ImplicitCredit`.
        drop_last_token: as in the released code, the reward of a conversation's last sampled token is 0.
    """

    def __init__(
        self,
        eta: float = 0.4,
        aggregate: Literal["sum", "mean_scaled", "mean"] = "sum",
        prescale: Prescale = "none",
        drop_last_token: bool = False,
    ) -> None:
        super().__init__(prescale, drop_last_token)
        expect_above_zero("credit.init_args.eta", eta, 0.4)
        self.eta = eta
        self.evidence = EVIDENCE[aggregate]

    def fit(self, batch: ConversationBatch, conversations: list[Conversation]) -> Mapping[str, float]:
        """Train the PRM, once the outcomes are known to be fit for sharing."""
        _check(batch)
        return super().fit(batch, conversations)

    def assign(self, batch: ConversationBatch, conversations: list[Conversation]) -> Credit:
        """Shares of the outcome.

        Raises:
            UserError: for a negative outcome.
        """
        _check(batch)
        rewards, report = self.token_rewards(batch)
        evidence = self.evidence(rewards, batch.turn_index)
        weights = objectives.norm_itpo_weights(evidence, turn_mask(batch), self.eta)
        return share_outcome(weights, batch, report)


def _check(batch: ConversationBatch) -> None:
    if bool((batch.outcome < 0).any()):
        place = int((batch.outcome < 0).nonzero()[0])
        raise UserError(
            f"conversation {batch.ids[place]!r} has outcome {batch.outcome[place].item():g}, but Norm-ITPO "
            f"shares out outcomes >= 0: of a negative one the turn with the most credit would get the most "
            f"blame. Shift the environment's outcomes, or use the credit ITPO."
        )
