"""Some conversations of the first iteration, scored by the implicit PRM in every later one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from lightning_mtrl.conversation import Conversation
from lightning_mtrl.evaluation.ranking import rank_correlation

PROBE_CONVERSATIONS = 32


@dataclass
class PRMProbe:
    """How the PRM's opinion of the same conversations develops while it learns.

    Attributes:
        conversations: those that are scored again and again.
        rewards: for each iteration and conversation, turn by turn, the rewards of the sampled tokens.
        taus: Kendall's tau of score and outcome on each iteration's own conversations; NaN where not defined.
    """

    conversations: list[Conversation] = field(default_factory=list)
    rewards: list[list[list[list[float]]]] = field(default_factory=list)
    taus: list[float] = field(default_factory=list)

    def choose(self, conversations: Sequence[Conversation]) -> None:
        """Take some of the first iteration's conversations, from as many groups as possible; once."""
        if not self.conversations:
            step = max(1, len(conversations) // PROBE_CONVERSATIONS)
            self.conversations = list(conversations[::step][:PROBE_CONVERSATIONS])

    def turn_rewards(self, iteration: int) -> list[list[float]]:
        """Sum over the tokens of each turn, conversation by conversation."""
        return [[sum(tokens) for tokens in turns] for turns in self.rewards[iteration]]

    def agreement(self, first: int, second: int, unit: str = "turn") -> float:
        """Spearman's correlation between two iterations, over all turns or tokens; NaN when one is constant.

        Args:
            first: number of an iteration; negative numbers count from the last one.
            second: another.
            unit: "turn" or "token".
        """
        sides = [
            [number for turns in rewards for number in turns]
            for rewards in (
                [
                    [sum(tokens)] if unit == "turn" else tokens
                    for turns in self.rewards[iteration]
                    for tokens in turns
                ]
                for iteration in (first, second)
            )
        ]
        return rank_correlation(*sides)

    def slope(self, iteration: int) -> float:
        """Least-squares slope of the outcome's score: how much more a success scores than a failure.

        NaN when all outcomes are the same. Source: ITPO (arXiv:2603.23550), figure 7.
        """
        outcomes = torch.tensor([float(c.outcome or 0.0) for c in self.conversations], dtype=torch.float64)
        scores = torch.tensor([sum(turns) for turns in self.turn_rewards(iteration)], dtype=torch.float64)
        centred = outcomes - outcomes.mean()
        return float((centred * scores).sum() / centred.square().sum())

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "conversations": [c.to_json() for c in self.conversations],
            "rewards": self.rewards,
            # JSON has no NaN.
            "taus": [None if math.isnan(tau) else tau for tau in self.taus],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Read `state` back."""
        conversations = [Conversation.from_json(record) for record in state["conversations"]]
        taus = [math.nan if tau is None else tau for tau in state["taus"]]
        return cls(conversations, list(state["rewards"]), taus)
