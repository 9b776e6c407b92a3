"""What a credit assigner is: it says which turns or tokens of a conversation earned its outcome.

Another assigner is another subclass of `CreditAssigner`, in any file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_mtrl import objectives
from lightning_mtrl.batch import ConversationBatch
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.credit.prm_config import PRMConfig
from lightning_mtrl.modules.workload import Extent, Work, module_passes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_mtrl.algorithms.base import Context
    from lightning_mtrl.modules.base import RoleModule


@dataclass(frozen=True)
class Credit:
    """Rewards of whole conversations.

    Attributes:
        rewards: reward that arrives with each sampled token; 0 elsewhere.
        reward_mask: where a reward stands: the last token of each response, or every sampled token.
        metrics: numbers for the logs, by name without the phase.
        includes_outcome: the rewards of a conversation sum to its outcome.
        known: False for conversations that have no credit, because what gives it failed; they are left out
            of the update and counted. None where all have one.
    """

    rewards: Float[Tensor, "B T"]
    reward_mask: Bool[Tensor, "B T"]
    metrics: Mapping[str, float] = field(default_factory=dict)
    includes_outcome: bool = False
    known: Bool[Tensor, " B"] | None = None


class CreditAssigner(ABC):
    """From the rollouts of one iteration to rewards.

    Attributes:
        has_prm: it has an implicit PRM, so that `prm` counts; else `fit` says that a changed one does not.
        prm: how an implicit PRM learns, for assigners that have one; the algorithm sets it before `setup`.
    """

    has_prm: bool = False
    prm: PRMConfig = PRMConfig()

    def setup(self, context: Context) -> None:
        """Create modules and optimizers; the backbone's role "policy" is pi_0 at this moment."""
        self.context = context

    def fit(self, batch: ConversationBatch, conversations: list[Conversation]) -> Mapping[str, float]:
        """Learn from fresh conversations, before they are scored; returns numbers for the logs."""
        return {}

    @abstractmethod
    def assign(self, batch: ConversationBatch, conversations: list[Conversation]) -> Credit:
        """Rewards of conversations with an outcome.

        Args:
            batch: all conversations of the iteration, so that a scale of the batch is one of the whole.
            conversations: the same, in order.
        """

    def modules(self) -> dict[str, tuple[RoleModule, Any]]:
        """Each trained module with its optimizer, by the name used in checkpoints."""
        return {}

    def workload(self, extent: Extent) -> Sequence[Work]:
        """The largest passes of `fit` and `assign`, for a plan of memory; asked after `setup`."""
        return list(module_passes(self.modules(), extent, extent.batch_size))

    def figures(self) -> dict[str, Figure]:
        """What there is to see at the end of a run, by name."""
        return {}

    def state(self) -> dict[str, Any]:
        """Anything else that a resumed run needs, as JSON."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027  # nothing to put back by default
        """Put `state` back."""


def turn_ends(batch: ConversationBatch) -> Bool[Tensor, "B T"]:
    """True on the last token of each response."""
    following = torch.nn.functional.pad(batch.turn_index, (0, 1))[:, 1:]
    return batch.response_mask & (batch.turn_index != following)


def conversation_ends(batch: ConversationBatch) -> Bool[Tensor, "B T"]:
    """True on the last sampled token of each conversation."""
    return turn_ends(batch) & (batch.turn_index == batch.turn_index.amax(1, keepdim=True))


def turn_mask(batch: ConversationBatch) -> Bool[Tensor, "B K"]:
    """True where the conversation has a k-th response."""
    return objectives.turn_tokens(batch.turn_index) > 0


def share_outcome(
    weights: Float[Tensor, "B K"],
    batch: ConversationBatch,
    metrics: Mapping[str, float] | None = None,
    known: Bool[Tensor, " B"] | None = None,
) -> Credit:
    """Give each turn its share of the outcome, at the last token of its response.

    Args:
        weights: of the turns; those of a conversation sum to 1.
        batch: with the outcomes.
        metrics: numbers to add to those of the weights.
        known: False where the weights say nothing.
    """
    rewards = objectives.place_turn_rewards(weights * batch.outcome[:, None], batch.turn_index)
    counted = weights if known is None else weights[known]
    measured = {
        **(metrics or {}),
        "top_turn_share": objectives.top_turn_share(counted).mean().item(),
        "weight_entropy": objectives.weight_entropy(counted).mean().item(),
    }
    return Credit(rewards, turn_ends(batch), measured, includes_outcome=True, known=known)
