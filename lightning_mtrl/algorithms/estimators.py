"""Advantage estimators for fresh responses of logged states: GAE, RLOO and GRPO, by `class_path`.

Another estimator is another subclass of `AdvantageEstimator`, in any file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_mtrl import objectives
from lightning_mtrl.algorithms.conversation_estimators import ConversationEstimator
from lightning_mtrl.algorithms.ranges import expect
from lightning_mtrl.idle_keys import Idle


class AdvantageEstimator(ABC):
    """From rewards of responses to advantages of their tokens."""

    needs_values: bool

    @abstractmethod
    def estimate(
        self,
        rewards: Float[Tensor, "N L"],
        values: Float[Tensor, "N L"],
        mask: Bool[Tensor, "N L"],
        group: Int[Tensor, " N"],
    ) -> tuple[Float[Tensor, "N L"], Float[Tensor, "N L"]]:
        """Advantages and value targets, one row a response.

        Args:
            rewards: reward of each token (the Q of the response on its last one).
            values: value head's predictions; zeros when `needs_values` is False.
            mask: True on sampled tokens.
            group: number of the state that a response belongs to.
        """


class GAE(AdvantageEstimator):
    """Generalised advantage estimation over tokens, with the value head as baseline (PPO).

    Args:
        gae_lambda: in [0, 1]; 1 for no bootstrapping from the value head.
        whiten: subtract the batch's mean and divide by its standard deviation. Off by default: dividing
            amplifies the noise of a Q that hardly tells responses apart.
    """

    needs_values = True

    def __init__(self, gae_lambda: float = 0.95, whiten: bool = False) -> None:
        expect(0.0 <= gae_lambda <= 1.0, "estimator.init_args.gae_lambda", gae_lambda, "in [0, 1]", 0.95)
        self.gae_lambda, self.whiten = gae_lambda, whiten

    def estimate(self, rewards: Tensor, values: Tensor, mask: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
        """Source: Schulman et al. 2016 (arXiv:1506.02438), Eq. 16; the problem is one response long."""
        advantages, returns = objectives.gae(rewards, values, mask, gae_lambda=self.gae_lambda)
        return (objectives.masked_whiten(advantages, mask) if self.whiten else advantages), returns


class RLOO(AdvantageEstimator):
    """Each response against the mean of the others of its state.

    Source: Ahmadian et al. 2024 (arXiv:2402.14740).
    """

    needs_values = False

    def estimate(self, rewards: Tensor, values: Tensor, mask: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
        """One advantage for all tokens of a response."""
        total = objectives.masked_sum(rewards, mask, dim=-1)
        advantages = objectives.rloo_advantages(total, group)[:, None] * mask
        return advantages, total[:, None] * mask


class GRPO(AdvantageEstimator):
    """Each response against the mean of its state's responses, in units of their standard deviation.

    Source: Shao et al. 2024 (arXiv:2402.03300); without the division it is the form of Dr. GRPO
    (arXiv:2503.20783).

    Args:
        divide_by_std: divide by the group's standard deviation.
    """

    needs_values = False

    def __init__(self, divide_by_std: bool = True) -> None:
        self.divide_by_std = divide_by_std

    def estimate(self, rewards: Tensor, values: Tensor, mask: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
        """One advantage for all tokens of a response."""
        total = objectives.masked_sum(rewards, mask, dim=-1)
        advantages = (
            objectives.grpo_advantages(total, group, divide_by_std=self.divide_by_std)[:, None] * mask
        )
        return advantages, total[:, None] * mask


def idle_of_values(
    key: str, settings: object, estimator: AdvantageEstimator | ConversationEstimator
) -> list[Idle]:
    """The settings of a value head, where an estimator needs none.

    Args:
        key: of the settings in a configuration.
        settings: a dataclass with those of a value head among them.
        estimator: of responses or of whole conversations.
    """
    if estimator.needs_values:
        return []
    names = ("value_role", "value_learning_rate", "value_clip_range")
    return [Idle(key, settings, names, f"{type(estimator).__name__} needs no value head")]
