"""Advantages of whole conversations: hand numbers, what equals what, and where the released code fails."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_models import conversations_batch, talk
from torch import Tensor

from lightning_mtrl import objectives
from lightning_mtrl.algorithms.conversation_estimators import (
    GAE,
    GRPO,
    REINFORCE,
    RLOO,
    ConversationEstimator,
)
from lightning_mtrl.algorithms.mixing import (
    MixingConfig,
    mixed_advantages,
    penalties,
    reward_streams,
    rewarded,
)
from lightning_mtrl.batch import ConversationBatch
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.credit.base import Credit, conversation_ends, share_outcome, turn_ends, turn_mask
from lightning_mtrl.errors import UserError

EVERY = [GAE(), RLOO(), RLOO("total"), RLOO("released"), GRPO(), GRPO("returns", False, True), REINFORCE()]
END = 1


def talks(outcomes: list[float], turns: list[int]) -> list[Conversation]:
    """Conversations of one group whose responses have 2 tokens; observations have 4, the prompt too."""
    found = []
    for i, (outcome, number) in enumerate(zip(outcomes, turns, strict=True)):
        found.append(talk(f"t-{i}", [[5, END]] * number, [0.0] * (number - 1) + [outcome]))
    return found


def estimated(
    estimator: ConversationEstimator, credit: Credit, batch: ConversationBatch, values: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    given = torch.zeros_like(credit.rewards) if values is None else values
    return estimator.estimate(credit.rewards, credit.reward_mask, given, batch.turn_index, batch.group)


def uniform(batch: ConversationBatch) -> Credit:
    return share_outcome(objectives.uniform_weights(turn_mask(batch)), batch)


def outcome_at_end(batch: ConversationBatch) -> Credit:
    ends = conversation_ends(batch)
    return Credit(torch.where(ends, batch.outcome[:, None], 0.0), ends)


def of_turn(values: Tensor, batch: ConversationBatch, row: int, turn: int) -> set[float]:
    return {round(v, 5) for v in values[row][batch.turn_index[row] == turn].tolist()}


def test_the_tokens_of_a_response_share_the_advantage_of_its_turn() -> None:
    batch = conversations_batch(talks([1.0, 0.0], [2, 3]))
    exact, returns = estimated(RLOO(), uniform(batch), batch)
    # Returns 1, 0.5 against 0, 0, 0.
    assert [of_turn(exact, batch, 0, k) for k in (1, 2)] == [{1.0}, {0.5}]
    assert [of_turn(exact, batch, 1, k) for k in (1, 2, 3)] == [{-1.0}, {-0.5}, {0.0}]
    assert [of_turn(returns, batch, 0, k) for k in (1, 2)] == [{1.0}, {0.5}]
    total, _ = estimated(RLOO("total"), uniform(batch), batch)
    assert [of_turn(total, batch, 0, k) for k in (1, 2)] == [{1.0}, {0.5}]
    assert [of_turn(total, batch, 1, k) for k in (1, 2, 3)] == [{-1.0}, {-1.0}, {-1.0}]
    released, _ = estimated(RLOO("released"), uniform(batch), batch)
    # n/(n-1) r - mean rewards (0.5 + 0): 2 * 0.5 - 0.5 twice; -0.5 three times.
    assert [of_turn(released, batch, 0, k) for k in (1, 2)] == [{1.0}, {0.5}]
    assert [of_turn(released, batch, 1, k) for k in (1, 2, 3)] == [{-1.5}, {-1.0}, {-0.5}]
    plain, _ = estimated(REINFORCE(gamma=0.5), uniform(batch), batch)
    assert [of_turn(plain, batch, 0, k) for k in (1, 2)] == [{0.75}, {0.5}]


def test_gae_discounts_from_turn_to_turn_and_not_from_token_to_token() -> None:
    batch = conversations_batch(talks([1.0], [2]))
    values = torch.full(batch.input_ids.shape, 0.25)
    advantages, returns = estimated(GAE(turn_gamma=0.5), outcome_at_end(batch), batch, values)
    assert [of_turn(advantages, batch, 0, k) for k in (1, 2)] == [{0.25}, {0.75}]
    assert [of_turn(returns, batch, 0, k) for k in (1, 2)] == [{0.5}, {1.0}]
    short, _ = estimated(GAE(turn_lambda=0.0), outcome_at_end(batch), batch, values)
    assert [of_turn(short, batch, 0, k) for k in (1, 2)] == [{0.0}, {0.75}]


def test_without_values_gae_is_reinforce() -> None:
    batch = conversations_batch(talks([0.3, 0.9, 0.1], [3, 1, 2]))
    for credit in (uniform(batch), outcome_at_end(batch)):
        got, wanted = estimated(GAE(), credit, batch)[0], estimated(REINFORCE(), credit, batch)[0]
        assert torch.allclose(got, wanted, atol=1e-6)


@pytest.mark.parametrize("estimator", EVERY[1:6], ids=lambda e: type(e).__name__)
def test_equal_outcomes_in_every_group_leave_nothing_to_learn(estimator: ConversationEstimator) -> None:
    found = [replace(c, group=i // 3) for i, c in enumerate(talks([0.7] * 6, [2] * 6))]
    batch = conversations_batch(found)
    got, _ = estimated(estimator, outcome_at_end(batch), batch)
    assert got.tolist() == torch.zeros_like(got).tolist()
    streams = reward_streams(outcome_at_end(batch), batch, found, MixingConfig(token_penalty=0.0))
    mixed, _ = mixed_advantages(streams, estimator, torch.zeros_like(got), batch, "token")
    assert mixed.tolist() == torch.zeros_like(got).tolist()


@pytest.mark.parametrize("estimator", EVERY, ids=lambda e: type(e).__name__)
def test_uneven_groups_and_conversations_without_a_response_are_safe(
    estimator: ConversationEstimator,
) -> None:
    """Seven rows that no group size divides; one has only a prompt."""
    found = talks([1.0, 0.0, 0.5, 0.25, 1.0, 0.0, 0.75], [1, 2, 3, 1, 2, 3, 2])
    found[2] = replace(found[2], turns=())
    batch = conversations_batch([replace(c, group=int(i > 3)) for i, c in enumerate(found)])
    batch = replace(batch, outcome=torch.nan_to_num(batch.outcome))
    for credit in (uniform(batch), outcome_at_end(batch)):
        advantages, returns = estimated(estimator, credit, batch)
        assert advantages.isfinite().all()
        assert not advantages[~batch.response_mask].any()
        assert not returns[~batch.response_mask].any()


@pytest.mark.parametrize("form", ["exact", "total", "released"])
def test_a_group_of_one_has_no_others(form: str) -> None:
    batch = conversations_batch(talks([1.0], [2]))
    with pytest.raises(ValueError, match="only one"):
        estimated(RLOO(form), uniform(batch), batch)  # type: ignore[arg-type]
    for estimator in (GRPO(), REINFORCE(), GAE()):
        assert estimated(estimator, uniform(batch), batch)[0].isfinite().all()


def test_the_penalty_counts_tokens_or_words_of_all_messages_after_the_prompt() -> None:
    found = talks([1.0, 1.0], [1, 2])
    # Responses of 2 tokens, an observation of 4 between; words: "said", "heard", "said".
    assert penalties(found, MixingConfig(token_penalty=0.01)).tolist() == pytest.approx([-0.02, -0.08])
    words = MixingConfig(token_penalty=0.01, penalty_counts="words")
    assert penalties(found, words).tolist() == pytest.approx([-0.01, -0.03])
    assert penalties(found, MixingConfig(token_penalty=0.3)).tolist() == pytest.approx([-0.6, -1.0])
    free = MixingConfig(token_penalty=0.3, clamp=False)
    assert penalties(found, free).tolist() == pytest.approx([-0.6, -2.4])


def test_outcomes_are_rewarded_within_one_at_the_end_and_in_shares() -> None:
    found = talks([3.0, -2.0, 0.5], [1, 2, 2])
    config = MixingConfig(process_weight=2.0, outcome_weight=3.0, token_penalty=0.0)
    for clamp, wanted in ((True, [1.0, -1.0, 0.5]), (False, [3.0, -2.0, 0.5])):
        chosen = replace(config, clamp=clamp)
        batch = rewarded(conversations_batch(found), chosen)
        streams = reward_streams(uniform(batch), batch, found, chosen)
        assert [stream.rewards.sum(1).tolist() for stream in streams] == [wanted, wanted]


def test_the_penalty_is_counted_once_and_spread_by_length() -> None:
    found = talks([1.0, 0.5], [1, 2])
    batch = conversations_batch(found)
    shares = MixingConfig(process_weight=2.0, outcome_weight=0.0, token_penalty=0.01)
    joined = reward_streams(uniform(batch), batch, found, shares)
    assert [stream.weight for stream in joined] == [2.0]
    assert joined[0].rewards.sum(1).tolist() == pytest.approx([1 - 0.02, 0.5 - 0.08])
    process = Credit(torch.where(turn_ends(batch), 3.0, 0.0), turn_ends(batch))
    apart = reward_streams(process, batch, found, replace(shares, outcome_weight=5.0))
    assert [stream.weight for stream in apart] == [5.0, 2.0, 2.0]
    outcome, rewards, penalty = (stream.rewards for stream in apart)
    assert outcome.sum(1).tolist() == pytest.approx([1.0, 0.5])
    assert rewards.sum(1).tolist() == [3.0, 6.0]
    assert penalty[1][turn_ends(batch)[1]].tolist() == pytest.approx([-0.04, -0.04])
    twice = replace(shares, outcome_weight=5.0, penalty_in_outcome=True)
    assert reward_streams(process, batch, found, twice)[0].rewards.sum(1).tolist() == pytest.approx(
        [0.98, 0.42]
    )


def test_every_stream_is_estimated_apart_and_then_weighted() -> None:
    found = talks([1.0, 0.5, 0.0], [1, 2, 2])
    batch = conversations_batch(found)
    config = MixingConfig(process_weight=2.0, outcome_weight=3.0, token_penalty=0.01)
    process = Credit(torch.where(turn_ends(batch), batch.turn_index / 4, 0.0), turn_ends(batch))
    streams = reward_streams(process, batch, found, config)
    estimator = GRPO(divide_by_std=False)
    zeros = torch.zeros_like(process.rewards)
    got, _ = mixed_advantages(streams, estimator, zeros, batch, "none")
    wanted = sum(
        weight * estimated(estimator, Credit(stream.rewards, stream.mask), batch)[0]
        for weight, stream in zip((3.0, 2.0, 2.0), streams, strict=True)
    )
    assert torch.allclose(got, wanted)
    whitened, _ = mixed_advantages(streams, estimator, zeros, batch, "token")
    assert torch.allclose(whitened, objectives.masked_whiten(got, batch.response_mask))
    by_turn, _ = mixed_advantages(streams, estimator, zeros, batch, "turn")
    assert torch.allclose(by_turn, objectives.whiten_turns(got, batch.turn_index))


def test_a_value_head_sees_all_rewards_together_in_the_size_of_an_outcome() -> None:
    found = talks([1.0, 0.5], [1, 2])
    batch = conversations_batch(found)
    streams = reward_streams(uniform(batch), batch, found, MixingConfig(5.0, 5.0, token_penalty=0.0))
    _, returns = mixed_advantages(streams, GAE(), torch.zeros_like(streams[0].rewards), batch, "none")
    assert [of_turn(returns, batch, 0, 1), of_turn(returns, batch, 1, 1)] == [{2.0}, {1.0}]


@pytest.mark.parametrize("name", ["gamma", "gae_lambda", "turn_gamma", "turn_lambda"])
def test_discounts_outside_their_range_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=rf"estimator\.init_args\.{name} is 1\.5"):
        GAE(**{name: 1.5})


def test_weights_of_nothing_are_refused() -> None:
    with pytest.raises(UserError, match="process_weight"):
        MixingConfig(process_weight=0.0, outcome_weight=0.0)
    with pytest.raises(UserError, match="token_penalty is -1"):
        MixingConfig(token_penalty=-1.0)


def test_a_small_penalty_stays_small_beside_an_outcome() -> None:
    """The published estimator would scale it up to the outcome's size if it were compared alone."""
    conversations = talks([1.0, 0.0, 1.0, 0.0], [2, 3, 3, 2])
    batch = conversations_batch(conversations)
    plain = GRPO("returns", by_turn=True)
    without, with_penalty = (
        mixed_advantages(
            reward_streams(
                replace(outcome_at_end(batch), includes_outcome=True),
                batch,
                conversations,
                MixingConfig(token_penalty=penalty),
            ),
            plain,
            torch.zeros(batch.input_ids.shape),
            batch,
            "none",
        )[0]
        for penalty in (0.0, 5e-5)
    )
    first_turn = batch.turn_index == 1
    assert without[first_turn].abs().min() > 0.8
    assert torch.allclose(with_penalty[first_turn], without[first_turn], rtol=0.01)
