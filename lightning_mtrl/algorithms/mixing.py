"""How rewards of turns, the token penalty and the outcome become one advantage (ITPO, its mixing rule)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_mtrl import objectives
from lightning_mtrl.algorithms.conversation_estimators import ConversationEstimator
from lightning_mtrl.algorithms.ranges import expect, expect_at_least
from lightning_mtrl.batch import ConversationBatch
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.credit.base import Credit, conversation_ends, turn_ends

Batch = TypeVar("Batch", bound=ConversationBatch)


@dataclass(frozen=True)
class MixingConfig:
    """Weights of what is rewarded.

    Attributes:
        process_weight: of the rewards that the credit assigner gives. Published: 5.
        outcome_weight: of the outcome at the end of the conversation. Published (table 2): 0 with Norm-ITPO,
            5 with ITPO and PRIME. A common factor of the two is removed by whitening.
        token_penalty: lambda, what a token of a message after the prompt costs, the user's included.
            Published: 5e-5 on outcomes in [0, 1].
        penalty_counts: what the penalty counts: "tokens" of the model, template glue included; "words"
            between spaces, as in the released code.
        penalty_in_outcome: as in the released code, the outcome term holds the penalty too, which then counts
            twice where both weights are above 0.
        clamp: outcome and penalty are each kept within [-1, 1], as published; what a credit assigner learns
            from is the outcome as it is.
        whiten: scale advantages to mean 0 and variance 1 over all sampled tokens ("token", as in the released
            code), with every response weighing the same ("turn"), or not ("none").
    """

    process_weight: float = 5.0
    outcome_weight: float = 0.0
    token_penalty: float = 5e-5
    penalty_counts: Literal["tokens", "words"] = "tokens"
    penalty_in_outcome: bool = False
    clamp: bool = True
    whiten: Literal["token", "turn", "none"] = "token"

    def __post_init__(self) -> None:
        for name in ("process_weight", "outcome_weight", "token_penalty"):
            expect_at_least(f"settings.{name}", getattr(self, name), 0, 5)
        weights = (self.process_weight, self.outcome_weight)
        expect(any(weights), "settings.process_weight", 0.0, "above 0 where outcome_weight is 0", 5)


@dataclass(frozen=True)
class Stream:
    """One kind of reward, with its weight in the advantage.

    Attributes:
        weight: factor of its advantage.
        rewards: at each token; 0 where none stands.
        mask: where a reward stands.
    """

    weight: float
    rewards: Float[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]


def rewarded(batch: Batch, config: MixingConfig) -> Batch:
    """The batch with its outcomes as they are rewarded, at the end or in shares."""
    return replace(batch, outcome=batch.outcome.clamp(-1.0, 1.0)) if config.clamp else batch


def penalties(conversations: Sequence[Conversation], config: MixingConfig) -> Float[Tensor, " B"]:
    """-lambda N of each conversation, N counting all messages after the prompt."""
    count = _COUNTS[config.penalty_counts]
    found = -config.token_penalty * torch.tensor([float(count(c)) for c in conversations])
    return found.clamp(-1.0, 1.0) if config.clamp else found


def reward_streams(
    credit: Credit, batch: ConversationBatch, conversations: Sequence[Conversation], config: MixingConfig
) -> list[Stream]:
    """What is rewarded, without what weighs nothing.

    The penalty is spread over turns by their length. It joins rewards that are shares of the outcome, at the
    ends of responses (Norm-ITPO: A = w_phi Adv[r + p]); else it is a stream of its own with their weight
    (ITPO: A = w_phi Adv[r] + w_phi Adv[p]).

    Args:
        credit: of the conversations.
        batch: the same, with outcomes as they are `rewarded`.
        conversations: the same, in order.
        config: weights.

    Source: ITPO (arXiv:2603.23550), with the penalty placed as in its released code.
    """
    ends, last = turn_ends(batch), conversation_ends(batch)
    penalty = penalties(conversations, config)
    spread = objectives.place_turn_rewards(
        objectives.spread_by_length(penalty, batch.turn_index), batch.turn_index
    )
    score = batch.outcome + (penalty if config.penalty_in_outcome else 0.0)
    streams = [Stream(config.outcome_weight, torch.where(last, score[:, None], 0.0), last)]
    if credit.includes_outcome and torch.equal(credit.reward_mask, ends):
        streams.append(Stream(config.process_weight, credit.rewards + spread, ends))
    else:
        streams.append(Stream(config.process_weight, credit.rewards, credit.reward_mask))
        streams.append(Stream(config.process_weight * (config.token_penalty > 0), spread, ends))
    return [stream for stream in streams if stream.weight]


def mixed_advantages(
    streams: Sequence[Stream],
    estimator: ConversationEstimator,
    values: Float[Tensor, "B T"],
    batch: ConversationBatch,
    whiten: Literal["token", "turn", "none"],
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Advantages and value targets: sum of weight * Adv[rewards], each estimated apart, then whitened.

    An estimator that is not additive gets their sum instead, in units of the largest weight so that a value
    head's targets have the size of an outcome. GRPO, which divides by the spread of what it compares, would
    make a token penalty of some thousandths as large as the outcome.

    Source: ITPO (arXiv:2603.23550), its mixing rule.
    """
    if not estimator.additive:
        streams = [_joined(streams)]
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    for stream in streams:
        advantage, target = estimator.estimate(
            stream.rewards, stream.mask, values, batch.turn_index, batch.group
        )
        advantages, returns = advantages + stream.weight * advantage, returns + stream.weight * target
    return _WHITENED[whiten](advantages, batch), returns


def _joined(streams: Sequence[Stream]) -> Stream:
    """All rewards together, in units of the largest weight."""
    largest = max(stream.weight for stream in streams)
    rewards = sum(stream.weight / largest * stream.rewards for stream in streams)
    assert isinstance(rewards, Tensor)
    mask = torch.stack([stream.mask for stream in streams]).any(0)
    return Stream(1.0, rewards, mask)


def _tokens(conversation: Conversation) -> int:
    return len(conversation.token_ids()) - len(conversation.prompt_ids)


def _words(conversation: Conversation) -> int:
    said = (text or "" for turn in conversation.turns for text in (turn.response, turn.observation))
    return sum(len(text.split()) for text in said)


def _over_tokens(advantages: Tensor, batch: ConversationBatch) -> Tensor:
    return objectives.masked_whiten(advantages, batch.response_mask)


def _over_turns(advantages: Tensor, batch: ConversationBatch) -> Tensor:
    return objectives.whiten_turns(advantages, batch.turn_index)


def _not_at_all(advantages: Tensor, batch: ConversationBatch) -> Tensor:
    return advantages


_COUNTS = {"tokens": _tokens, "words": _words}
_WHITENED = {"token": _over_tokens, "turn": _over_turns, "none": _not_at_all}
