"""Advantage estimators for whole conversations with a reward for each turn or token, by `class_path`.

Those of `lightning_mtrl.algorithms.estimators` are for single responses. Another estimator is another
subclass of `ConversationEstimator`, in any file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_mtrl import objectives
from lightning_mtrl.algorithms.ranges import expect

__all__ = ["GAE", "GRPO", "REINFORCE", "RLOO", "ConversationEstimator"]
_KEY = "estimator.init_args"


class ConversationEstimator(ABC):
    """From rewards of conversations to advantages of their tokens.

    Attributes:
        needs_values: it takes a value head's predictions.
        needs_others: it compares a conversation with the others of its group, so a group of one has none.
        additive: the advantages of two rewards add up to that of their sum, so that they may be estimated
            apart. Not so where there is one value head, or where a small reward would be scaled up alone.
    """

    needs_values: bool = False
    needs_others: bool = False
    additive: bool = True

    @abstractmethod
    def estimate(
        self,
        rewards: Float[Tensor, "B T"],
        reward_mask: Bool[Tensor, "B T"],
        values: Float[Tensor, "B T"],
        turn_index: Int[Tensor, "B T"],
        group: Int[Tensor, " B"],
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Advantages and value targets of each sampled token, 0 elsewhere.

        Args:
            rewards: reward that arrives with each token.
            reward_mask: where a reward stands.
            values: value head's predictions; zeros when `needs_values` is False.
            turn_index: k on the tokens of the k-th response, 0 elsewhere.
            group: number of the group of each conversation; groups may differ in size.
        """


class GAE(ConversationEstimator):
    """Generalised advantage estimation over the sampled tokens, with the value head as baseline (PPO).

    What follows the last token of a response is the first token of the next one. With gamma and lambda 1
    inside a response the action is the response; POAD is gamma 1 inside and less between.

    Source: Schulman et al. 2016 (arXiv:1506.02438), Eq. 16; two discounts: POAD (arXiv:2405.15821).

    Args:
        gamma: discount between two tokens of one response, in [0, 1].
        gae_lambda: 1 for Monte Carlo, between two tokens of one response, in [0, 1].
        turn_gamma: discount from one response to the next, in [0, 1].
        turn_lambda: lambda from one response to the next, in [0, 1].
    """

    needs_values = True
    additive = False

    def __init__(
        self, gamma: float = 1.0, gae_lambda: float = 1.0, turn_gamma: float = 1.0, turn_lambda: float = 1.0
    ) -> None:
        for name, value in (
            ("gamma", gamma),
            ("gae_lambda", gae_lambda),
            ("turn_gamma", turn_gamma),
            ("turn_lambda", turn_lambda),
        ):
            expect(0.0 <= value <= 1.0, f"{_KEY}.{name}", value, "in [0, 1]", 1.0)
        self.gamma, self.gae_lambda = gamma, gae_lambda
        self.turn_gamma, self.turn_lambda = turn_gamma, turn_lambda

    def estimate(
        self, rewards: Tensor, reward_mask: Tensor, values: Tensor, turn_index: Tensor, group: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Advantages, and advantages plus values."""
        return objectives.gae(
            rewards,
            values,
            turn_index > 0,
            self.gamma,
            self.gae_lambda,
            self.turn_gamma,
            self.turn_lambda,
            turn_index,
        )


class RLOO(ConversationEstimator):
    """Each conversation against the mean of the others of its group (leave one out).

    Source: Ahmadian et al. 2024 (arXiv:2402.14740), for one reward; for several, see `form`.

    Args:
        form: "exact" compares the return-to-go with those of the others at the turn of the same number, 0
            where they have ended; "total" compares the totals, and takes off what was received before;
            "released" is the released code of ITPO and PRIME, with which all RLOO numbers of ITPO's table 1
            were made: its baseline enters once for each reward, against long conversations. All are the same
            for one reward a conversation.
    """

    needs_others = True

    def __init__(self, form: Literal["exact", "total", "released"] = "exact") -> None:
        self.form = _RLOO_FORMS[form]

    def estimate(
        self, rewards: Tensor, reward_mask: Tensor, values: Tensor, turn_index: Tensor, group: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One advantage for all tokens that lead to the same reward."""
        return _spread(self.form(rewards, reward_mask, group), rewards, reward_mask, turn_index)


def _released_rloo(rewards: Tensor, reward_mask: Tensor, group: Tensor) -> Tensor:
    centred = objectives.rloo_centred_rewards(rewards, reward_mask, group)
    return objectives.returns_to_go(centred, reward_mask)


_RLOO_FORMS = {
    "exact": objectives.rloo_of_returns,
    "total": objectives.rloo_of_totals,
    "released": _released_rloo,
}


class GRPO(ConversationEstimator):
    """Rewards or returns against their mean in the group, in units of their standard deviation.

    ITPO's paper does not print its form. With one reward at the end all are the GRPO of outcomes.

    Source: Shao et al. 2024 (arXiv:2402.03300), section 4.1.3; without the division Liu et al. 2025
    (arXiv:2503.20783).

    Args:
        of: "rewards" standardises rewards and sums them from each turn on (process supervision); "returns"
            standardises the sums.
        divide_by_std: divide by the standard deviation of what was compared.
        by_turn: compare only with the turns of the same number, and not with all turns of the group.
    """

    needs_others = True

    def __init__(
        self,
        of: Literal["rewards", "returns"] = "rewards",
        divide_by_std: bool = True,
        by_turn: bool = False,
    ) -> None:
        self.form = {"rewards": objectives.grpo_of_rewards, "returns": objectives.grpo_of_returns}[of]
        self.divide_by_std, self.by_turn = divide_by_std, by_turn
        self.additive = not divide_by_std

    def estimate(
        self, rewards: Tensor, reward_mask: Tensor, values: Tensor, turn_index: Tensor, group: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One advantage for all tokens that lead to the same reward."""
        advantages = self.form(rewards, reward_mask, group, self.divide_by_std, self.by_turn)
        return _spread(advantages, rewards, reward_mask, turn_index)


class REINFORCE(ConversationEstimator):
    """The return-to-go itself; whitened over the batch it is REINFORCE++.

    Source: Williams 1992; Hu 2025 (arXiv:2501.03262).

    Args:
        gamma: discount from one reward to the next, in [0, 1].
    """

    def __init__(self, gamma: float = 1.0) -> None:
        expect(0.0 <= gamma <= 1.0, f"{_KEY}.gamma", gamma, "in [0, 1]", 1.0)
        self.gamma = gamma

    def estimate(
        self, rewards: Tensor, reward_mask: Tensor, values: Tensor, turn_index: Tensor, group: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One advantage for all tokens that lead to the same reward."""
        returns = objectives.returns_to_go(rewards, reward_mask, self.gamma)
        spread = objectives.spread_back(returns, reward_mask, turn_index > 0)
        return spread, spread


def _spread(
    advantages: Tensor, rewards: Tensor, reward_mask: Tensor, turn_index: Tensor
) -> tuple[Tensor, Tensor]:
    """Advantages and undiscounted returns of the next reward, at each sampled token."""
    responses = turn_index > 0
    returns = objectives.returns_to_go(torch.where(reward_mask, rewards, 0.0), reward_mask)
    return (
        objectives.spread_back(advantages, reward_mask, responses),
        objectives.spread_back(returns, reward_mask, responses),
    )
