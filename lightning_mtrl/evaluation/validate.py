"""Measure a policy: fresh conversations on fixed seeds, so that every policy meets the same situations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning_mtrl.conversation import Conversation
from lightning_mtrl.evaluation.intervals import CONFIDENCE, mean_interval
from lightning_mtrl.evaluation.samples import Sample
from lightning_mtrl.models.adapters import Backbone
from lightning_mtrl.rollouts.collector import Collector
from lightning_mtrl.rollouts.split import owners

MEASURED = (
    *("success_rate", "success_rate_interval", "mean_return", "mean_return_interval"),
    *("conversations", "turns", "tokens", "truncated", "dropped"),
)
SUCCESS = 0.5  # an outcome above this counts as success; graded outcomes lie in [0, 1]


@dataclass(frozen=True)
class Validation:
    """A policy's figures.

    Attributes:
        success_rate: share of conversations whose outcome is above `SUCCESS`.
        success_rate_interval: 95%; Wilson's, or Student's where conversations share a customer or a group.
        mean_return: mean discounted return.
        mean_return_interval: Student interval, 95%, robust to customers and groups.
        conversations: number of conversations measured.
        turns: mean number of responses.
        tokens: mean number of sampled tokens.
        truncated: conversations that a limit cut off; they count as no success, whatever their environment
            gave them, so that a policy cannot look better by stalling.
        dropped: conversations whose environment failed, by cause; they count nowhere.
        returns: discounted return of each conversation, in order of their seeds.
        samples: the conversations.
    """

    success_rate: float
    success_rate_interval: tuple[float, float]
    mean_return: float
    mean_return_interval: tuple[float, float]
    conversations: int
    turns: float
    tokens: float
    truncated: int
    dropped: dict[str, int]
    returns: list[float] = field(repr=False)
    samples: list[Conversation] = field(repr=False)

    @property
    def without_outcome(self) -> int:
        """Conversations that were cut off before an outcome, and so count as no success."""
        return sum(c.outcome is None for c in self.samples)

    def row(self) -> dict[str, Any]:
        """The figures by their names in `summary.json`."""
        return {
            "success_rate": self.success_rate,
            "success_rate_interval": list(self.success_rate_interval),
            "mean_return": self.mean_return,
            "mean_return_interval": list(self.mean_return_interval),
            "conversations": self.conversations,
            "turns": self.turns,
            "tokens": self.tokens,
            "truncated": self.truncated,
            "dropped": self.dropped,
        }


def validate(
    collector: Collector, backbone: Backbone, *, conversations: int, seed: int, gamma: float, policy: str
) -> Validation:
    """Measure the backbone's role "policy".

    Args:
        collector: with the sampling that is to be measured, and without exploration.
        backbone: the model.
        conversations: how many.
        seed: the same for every policy that is to be compared.
        gamma: discount for each response.
        policy: name of the policy, for the conversations' record.
    """
    with collector.speaker(backbone) as model:
        rollouts = collector.collect(model, conversations=conversations, seed=seed, policy=policy)
    return figures_of(rollouts.conversations, gamma, rollouts.truncated, rollouts.dropped)


def figures_of(
    conversations: list[Conversation], gamma: float, truncated: int, dropped: dict[str, int]
) -> Validation:
    """What conversations of one policy say of it.

    Args:
        conversations: those that count.
        gamma: discount for each response.
        truncated: how many a limit cut off.
        dropped: how many there are besides, by cause.
    """
    returns = [discounted_return(c, gamma) for c in conversations]
    names = owners(conversations)
    succeeded = [float((c.outcome or 0.0) > SUCCESS and not c.truncated) for c in conversations]
    sampled = sum(len(turn.response_ids) for c in conversations for turn in c.turns)
    return Validation(
        success_rate=sum(succeeded) / max(1, len(conversations)),
        success_rate_interval=Sample.of(succeeded, names).interval(CONFIDENCE),
        mean_return=sum(returns) / max(1, len(conversations)),
        mean_return_interval=mean_interval(returns, clusters=names),
        conversations=len(conversations),
        turns=sum(len(c.turns) for c in conversations) / max(1, len(conversations)),
        tokens=sampled / max(1, len(conversations)),
        truncated=truncated,
        dropped=dropped,
        returns=returns,
        samples=conversations,
    )


def discounted_return(conversation: Conversation, gamma: float) -> float:
    """sum_i gamma^i r_{i+1} over the conversation's responses."""
    return float(sum(gamma**i * reward for i, reward in enumerate(conversation.rewards)))
