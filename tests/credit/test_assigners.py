"""Every credit assigner on conversations made by hand: what it gives to whom, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from small_models import END, PAD, move, own_weights, small_backbone, small_context, some_talks, talk, watched

from lightning_mtrl import credit, objectives
from lightning_mtrl.algorithms.base import Context
from lightning_mtrl.algorithms.fresh import FreshRollouts, fresh_rollouts
from lightning_mtrl.algorithms.policy_evaluation import EvaluationConfig
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.credit import Credit, CreditAssigner
from lightning_mtrl.errors import UserError

TALKS = [replace(c, group=i // 2) for i, c in enumerate(some_talks(8))]
LEARNING = credit.PRMConfig(beta=0.5, learning_rate=1e-2, epochs=3, minibatch_groups=2)


def learns(assigner: CreditAssigner, prm: credit.PRMConfig = LEARNING) -> Any:
    """The assigner, with its PRM learning in this way."""
    assigner.prm = prm
    return assigner


def context_for(conversations: list[Conversation], **settings: Any) -> Context:
    context = small_context(small_backbone(["policy"]))
    context.datamodule.validation_share = settings.get("validation_share", 0.0)
    context.datamodule.set_rollouts(conversations, seed=1)
    context.backbone.add_role("initial", like="policy", trainable=False)
    return context


def fresh(context: Context) -> FreshRollouts:
    return fresh_rollouts(context.datamodule.usable_conversations, "initial", context)


def assigned(
    assigner: CreditAssigner, conversations: list[Conversation] = TALKS, **settings: Any
) -> tuple[Credit, FreshRollouts]:
    """Set up, fit and assign."""
    context = context_for(conversations, **settings)
    assigner.setup(context)
    rollouts = fresh(context)
    assigner.fit(rollouts.batch, rollouts.conversations)
    return assigner.assign(rollouts.batch, rollouts.conversations), rollouts


def per_turn(found: Credit, rollouts: FreshRollouts) -> list[list[float]]:
    sums = objectives.turn_sums(found.rewards, rollouts.batch.turn_index)
    return [row[: len(c.turns)].tolist() for row, c in zip(sums, rollouts.conversations, strict=True)]


class ByLength:
    """A scripted judge: a turn's weight is the number of its tokens; some it cannot judge."""

    def __init__(self, fails: tuple[str, ...] = ()) -> None:
        self.fails = fails

    def judge(self, conversation: Conversation) -> list[float]:
        if conversation.id in self.fails:
            raise RuntimeError("the judge is asleep")
        return [float(len(turn.response_ids)) for turn in conversation.turns]


class AtOnce(ByLength):
    """The same as a coroutine."""

    async def judge(self, conversation: Conversation) -> list[float]:  # type: ignore[override]
        return super().judge(conversation)


def sharing() -> list[CreditAssigner]:
    """Those whose rewards sum to the outcome."""
    return [
        credit.Outcome(),
        credit.TrajectoryShare(),
        credit.Uniform(),
        credit.Dirichlet(0.5),
        learns(credit.NormITPO()),
        learns(credit.NormITPO(aggregate="mean_scaled", prescale="batch_max", drop_last_token=True)),
        credit.LLMJudge(ByLength()),
        credit.LLMJudge(AtOnce()),
    ]


@pytest.mark.parametrize("assigner", sharing(), ids=lambda a: type(a).__name__)
def test_shares_sum_to_the_outcome_and_stand_at_the_ends_of_responses(assigner: CreditAssigner) -> None:
    found, rollouts = assigned(assigner)
    assert found.includes_outcome
    assert torch.allclose(found.rewards.sum(1), rollouts.batch.outcome, atol=1e-6)
    ends = torch.zeros_like(found.reward_mask)
    for row, conversation in enumerate(rollouts.conversations):
        ends[row, rollouts.batch.turn_end[row, : len(conversation.turns)]] = True
    assert not found.rewards[~ends].any()
    assert not found.reward_mask[~ends].any()


def test_the_plain_ones_give_what_their_names_say() -> None:
    for assigner in (credit.Outcome(), credit.TrajectoryShare()):
        for rewards, c in zip(per_turn(*assigned(assigner)), TALKS, strict=True):
            assert rewards == [*[0.0] * (len(c.turns) - 1), c.outcome]
    for rewards, c in zip(per_turn(*assigned(credit.Uniform())), TALKS, strict=True):
        assert rewards == pytest.approx([(c.outcome or 0.0) / len(c.turns)] * len(c.turns))
    judged = per_turn(*assigned(credit.LLMJudge(ByLength())))
    # Three turns of 2, 2 and 3 tokens, outcome 1.
    assert judged[5] == pytest.approx([2 / 7, 2 / 7, 3 / 7])


def test_random_shares_are_new_in_each_iteration_and_the_same_when_it_is_done_again() -> None:
    assigner = credit.Dirichlet()
    context = context_for(TALKS)
    assigner.setup(context)
    rollouts = fresh(context)

    def draw(seed: int) -> torch.Tensor:
        context.seed = seed
        return assigner.assign(rollouts.batch, rollouts.conversations).rewards

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_turn_rewards_of_itpo_are_sums_of_primes_tokens_and_both_sum_to_the_logit() -> None:
    found, rollouts = assigned(learns(credit.ITPO()))
    tokens, _ = assigned(learns(credit.PRIME()))
    assert not found.includes_outcome
    assert torch.equal(tokens.reward_mask, rollouts.batch.response_mask)
    sums = objectives.turn_sums(tokens.rewards, rollouts.batch.turn_index)
    assert torch.allclose(objectives.turn_sums(found.rewards, rollouts.batch.turn_index), sums, atol=1e-6)
    again = learns(credit.ITPO())
    result, _ = assigned(again)
    with torch.no_grad():
        scores = again.module.eval().scores(rollouts.batch)
    assert scores.abs().max() > 0.1
    assert torch.allclose(result.rewards.sum(1), scores, atol=1e-4)


def test_before_it_has_learned_itpo_rewards_nothing_and_norm_itpo_shares_evenly() -> None:
    for assigner, wanted in (
        (credit.ITPO(), None),
        (credit.NormITPO(prescale="batch_max"), credit.Uniform()),
    ):
        context = context_for(TALKS)
        assigner.setup(context)
        rollouts = fresh(context)
        got = assigner.assign(rollouts.batch, rollouts.conversations).rewards
        even = assigned(wanted)[0].rewards if wanted else torch.zeros_like(got)
        assert torch.allclose(got, even, atol=1e-6)


def test_released_options_drop_the_last_token_and_scale_by_the_batch() -> None:
    plain, rollouts = assigned(learns(credit.PRIME()))
    dropped, _ = assigned(learns(credit.PRIME(drop_last_token=True)))
    scaled, _ = assigned(learns(credit.PRIME(prescale="batch_max")))
    for row, conversation in enumerate(rollouts.conversations):
        last = int(rollouts.batch.turn_end[row, len(conversation.turns) - 1])
        assert plain.rewards[row, last] != 0
        assert dropped.rewards[row, last] == 0
        assert torch.equal(dropped.rewards[row, :last], plain.rewards[row, :last])
    assert scaled.rewards.flip(1).cumsum(1).abs().max().item() == pytest.approx(1.0, abs=1e-4)


def test_the_prm_learns_who_won_and_moves_its_role_alone() -> None:
    assigner = learns(credit.NormITPO(), replace(LEARNING, epochs=12))
    context = context_for(TALKS)
    assigner.setup(context)
    rollouts = fresh(context)
    with watched(context.backbone) as moved:
        report = assigner.fit(rollouts.batch, rollouts.conversations)
    assert moved["prm"]
    assert moved["policy"] == moved["initial"] == moved["base"] == []
    scores = assigner.module.eval().scores(rollouts.batch).detach()
    won = rollouts.batch.outcome == 1
    assert scores[won].min() > scores[~won].max()
    # The report is of the first look at each conversation, when little was known yet.
    assert report["prm_loss"] > 0.5
    assert {"auc", "kendall_tau", "pair_accuracy", "reward_stability"} <= set(report)


def test_turn_rewards_are_compared_with_those_of_the_iteration_before() -> None:
    assigner = learns(credit.ITPO())
    context = context_for(TALKS)
    assigner.setup(context)
    rollouts = fresh(context)
    first, second = (assigner.fit(rollouts.batch, rollouts.conversations) for _ in range(2))
    assert math.isnan(first["reward_stability"])
    assert 0 < second["reward_stability"] < 1
    still = learns(credit.ITPO(), credit.PRMConfig(learning_rate=0.0))
    still.setup(context)
    still.load_state(assigner.state())
    assert still.fit(rollouts.batch, rollouts.conversations)["reward_stability"] == pytest.approx(1.0)


def test_with_a_held_out_share_the_report_is_on_those_conversations() -> None:
    talks = [replace(c, group=i // 2) for i, c in enumerate(some_talks(24))]
    assigner = learns(credit.ITPO(), replace(LEARNING, epochs=8))
    context = context_for(talks, validation_share=0.4)
    held_out = {c.id for c in context.datamodule.validation_conversations}
    assert 2 <= len(held_out) <= 20
    assigner.setup(context)
    rollouts = fresh(context)
    to_fit = rollouts.part(torch.tensor([i for i, n in enumerate(rollouts.batch.ids) if n not in held_out]))
    assigner.fit(to_fit.batch, to_fit.conversations)
    assert set(assigner.module.latest_scores) == set(to_fit.batch.ids)
    found = assigner.assign(rollouts.batch, rollouts.conversations)
    rows = torch.tensor([i for i, name in enumerate(rollouts.batch.ids) if name in held_out])
    scores = found.rewards.sum(1)[rows]
    wanted = torch.nn.functional.binary_cross_entropy_with_logits(scores, rollouts.batch.outcome[rows])
    assert found.metrics["prm_loss"] == pytest.approx(wanted.item(), abs=1e-5)


def test_a_judge_that_fails_leaves_the_conversation_out() -> None:
    found, _ = assigned(credit.LLMJudge(ByLength(fails=("c-1", "c-6"))))
    assert found.known is not None
    assert found.known.tolist() == [i not in (1, 6) for i in range(8)]
    assert found.metrics["judge_failures"] == 2
    assert found.metrics["top_turn_share"] <= 1


@pytest.mark.parametrize("answer", [[1.0], [1.0, -1.0], [1.0, float("nan")], ["a", "b"], "ab", None])
def test_an_answer_that_is_no_list_of_weights_is_a_failure(answer: Any) -> None:
    class Broken:
        def judge(self, conversation: Conversation) -> Any:
            return answer

    found, _ = assigned(credit.LLMJudge(Broken()), [c for c in TALKS if len(c.turns) == 2])
    assert found.known is not None
    assert not found.known.any()
    assert found.rewards.isfinite().all()


def test_differences_of_q_telescope_to_the_outcome() -> None:
    talks = some_talks(16)
    assigner = credit.QDifference(EvaluationConfig(gamma=1.0, epochs=1, learning_rate=1e-2))
    found, rollouts = assigned(assigner, talks, validation_share=0.3)
    move(assigner.critic.head.parameters(), seed=1)
    found = assigner.assign(rollouts.batch, rollouts.conversations)
    assert torch.allclose(found.rewards.sum(1), rollouts.batch.outcome, atol=1e-5)
    q = assigner.critic.values(rollouts.batch)
    for row, rewards in enumerate(per_turn(found, rollouts)):
        outcome = rollouts.batch.outcome[row].item()
        known = [0.0, *q[row, : len(rewards) - 1].tolist(), outcome]
        assert rewards == pytest.approx([b - a for a, b in pairwise(known)], abs=1e-5)


def test_a_q_critic_needs_conversations_that_are_held_out_and_rewards_that_are_the_outcome() -> None:
    with pytest.raises(UserError, match=r"data\.validation_share is 0"):
        assigned(credit.QDifference())
    odd = [replace(c, outcome=0.25) for c in some_talks(8)]
    with pytest.raises(UserError, match="rewards that sum to"):
        assigned(credit.QDifference(), odd, validation_share=0.3)


def test_returns_that_a_q_critic_cannot_fit_are_refused_before_anything_moves() -> None:
    talks, large = some_talks(16), talk("large", [[4, END]], [3.0])
    for loss in ("bce", "hl_gauss"):
        context = context_for([*talks, large], validation_share=0.3)
        assigner = credit.QDifference(EvaluationConfig(loss=loss, gamma=1.0))
        assigner.setup(context)
        heads, rollouts = own_weights(assigner.critic), fresh(context)
        with (
            watched(context.backbone) as moved,
            pytest.raises(UserError, match=f"'large' has return 3 .*'{loss}' needs returns from 0 to 1"),
        ):
            assigner.fit(rollouts.batch, rollouts.conversations)
        assert moved["critic"] == []
        assert all(torch.equal(a, b) for a, b in zip(heads, own_weights(assigner.critic), strict=True))
    assigned(
        credit.QDifference(EvaluationConfig(loss="mse", gamma=1.0)), [*talks, large], validation_share=0.3
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: credit.NormITPO(eta=0.0), r"credit\.init_args\.eta is 0\.0"),
        (lambda: credit.NormITPO(eta=-1.0), r"credit\.init_args\.eta is -1\.0"),
        (lambda: credit.PRMConfig(beta=0.0), r"algorithm\.init_args\.prm\.beta is 0\.0"),
        (lambda: credit.PRMConfig(beta=float("nan")), r"prm\.beta is nan"),
        (lambda: credit.PRMConfig(minibatch_groups=0), r"prm\.minibatch_groups is 0"),
        (lambda: credit.PRMConfig(loss="pairwise", micro_batch_size=2), r"null with the loss 'pairwise'"),
        (lambda: credit.Dirichlet(0.0), r"concentration is 0\.0"),
    ],
)
def test_numbers_that_cannot_work_are_refused_at_once(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


def test_outcomes_that_cannot_be_learned_or_shared_are_refused_before_anything_moves() -> None:
    too_large = [replace(c, outcome=2.0) for c in TALKS]
    negative = [replace(c, outcome=-0.5) for c in TALKS]
    for assigner, talks, message in (
        (credit.ITPO(), too_large, "needs outcomes from 0 to 1"),
        (credit.NormITPO(), negative, "shares out outcomes >= 0"),
        (learns(credit.NormITPO(), credit.PRMConfig(loss="pairwise")), negative, "shares out outcomes >= 0"),
    ):
        context = context_for(talks)
        assigner.setup(context)
        rollouts = fresh(context)
        with watched(context.backbone) as moved, pytest.raises(UserError, match=message):
            assigner.fit(rollouts.batch, rollouts.conversations)
        assert moved["prm"] == []
    found, rollouts = assigned(
        learns(credit.ITPO(), credit.PRMConfig(loss="pairwise", learning_rate=1e-2)), too_large
    )
    assert found.rewards.isfinite().all()


def test_a_conversation_of_one_turn_is_outcome_learning_with_norm_itpo() -> None:
    talks = [talk(f"s-{i}", [[4 + i, 5, 1]], [i / 4]) for i in range(4)]
    shares, rollouts = assigned(learns(credit.NormITPO()), talks)
    whole, _ = assigned(credit.Outcome(), talks)
    assert torch.allclose(shares.rewards, whole.rewards)
    assert rollouts.batch.input_ids[0, -1] != PAD
