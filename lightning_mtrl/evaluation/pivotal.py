"""How often the rewards of turns find the turn that decided a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_mtrl.conversation import Conversation
from lightning_mtrl.evaluation.ranking import SUCCESS


@dataclass(frozen=True)
class PivotalRecovery:
    """Shares of conversations in which the pivotal turn ranks first.

    First means the highest reward in a success, and the lowest one, the turn to blame, in a failure.

    Attributes:
        share: of all conversations; NaN without any.
        successes, failures: of those only.
        chance: what guessing a turn gives: the mean of 1 / turns.
        conversations: how many were counted.
    """

    share: float
    successes: float
    failures: float
    chance: float
    conversations: int


def pivotal_recovery(
    turn_rewards: Sequence[Sequence[float]], conversations: Sequence[Conversation]
) -> PivotalRecovery:
    """Compare rewards of turns with the environment's own `metadata["pivotal_turn"]`.

    Conversations of one turn say nothing and are left out, as are those without a pivotal turn or outcome.

    Args:
        turn_rewards: for each conversation its rewards, turn by turn.
        conversations: in the same order.

    Raises:
        ValueError: if a conversation has another number of turns than of rewards.
    """
    found: dict[bool, list[bool]] = {True: [], False: []}
    chances = []
    for rewards, conversation in zip(turn_rewards, conversations, strict=True):
        if len(rewards) != len(conversation.turns):
            raise ValueError(
                f"{len(rewards)} rewards for the {len(conversation.turns)} turns of {conversation.id!r}"
            )
        pivotal = conversation.metadata.get("pivotal_turn")
        if pivotal is None or conversation.outcome is None or len(rewards) == 1:
            continue
        succeeded = conversation.outcome > SUCCESS
        first = max(rewards) if succeeded else min(rewards)
        # Ties are no recovery: equal rewards tell nothing.
        found[succeeded].append(list(rewards).count(first) == 1 and rewards[pivotal - 1] == first)
        chances.append(1 / len(rewards))
    everything = found[True] + found[False]
    return PivotalRecovery(
        _share(everything), _share(found[True]), _share(found[False]), _share(chances), len(everything)
    )


def _share(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
