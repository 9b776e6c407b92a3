"""Scoring what an improvement step was given: the same numbers for every cut into passes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from small_models import BOT, END, USER, move, small_backbone, small_context

from lightning_mtrl.algorithms import policy_improvement
from lightning_mtrl.algorithms.estimators import GAE, RLOO, AdvantageEstimator
from lightning_mtrl.algorithms.improvement_config import ImprovementConfig
from lightning_mtrl.algorithms.policy_improvement import ScoredGroups, SingleTurnImprover
from lightning_mtrl.algorithms.stepping import Stepper
from lightning_mtrl.batch import ImprovementBatch
from lightning_mtrl.modules.policy import Policy
from lightning_mtrl.modules.q_critic import QCritic
from lightning_mtrl.modules.value_head import ValueHead
from lightning_mtrl.rollouts.datamodule import State
from lightning_mtrl.rollouts.engine import SampledResponse

# Prompts and responses of very different lengths: a pass over the first states needs few columns.
STATES = [
    State((USER, *[13] * size, END, BOT), name, 1, name)
    for name, size in zip("abbbc", (1, 2, 3, 9, 17), strict=True)
]
RESPONSES = [
    [SampledResponse((*([4 + size] * size), END), (-1.0,) * (size + 1), True) for size in sizes]
    for sizes in ((1, 2), (2, 1), (1, 5), (8, 3), (6, 9))
]


def _improver(estimator: AdvantageEstimator) -> SingleTurnImprover:
    backbone = small_backbone(["policy", "reference", "critic"])
    context, critic, policy = small_context(backbone), QCritic(backbone), Policy(backbone)
    value = ValueHead(backbone, "value")
    move([*critic.head.parameters(), *value.own_parameters()], seed=7)
    steppers = [Stepper(context, module, 1.0, None) for module in (policy, value)]
    return SingleTurnImprover(
        ImprovementConfig(samples=2), estimator, critic, steppers[0], steppers[1], context
    )


def _scored(estimator: AdvantageEstimator) -> tuple[ScoredGroups, ImprovementBatch, float]:
    improver = _improver(estimator)
    scored = improver.score(STATES, RESPONSES)
    return scored, improver.prepare(scored)[0], improver.kl(scored)


@pytest.mark.parametrize("estimator", [RLOO(), GAE()], ids=["RLOO", "GAE"])
@pytest.mark.parametrize("states_in_a_pass", [1, 2, 3])
def test_more_states_than_one_pass_holds_get_the_same_numbers(
    estimator: AdvantageEstimator, states_in_a_pass: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, batch, kl = _scored(estimator)
    assert (batch.values.abs().sum() > 0.1) == isinstance(estimator, GAE)
    assert batch.reference_logprobs.abs().sum() > 1.0
    monkeypatch.setattr(policy_improvement, "SCORING_STATES", states_in_a_pass)
    cut, batch_of_cut, kl_of_cut = _scored(estimator)
    assert torch.allclose(cut.q, whole.q, atol=1e-5)
    for name in ("reference_logprobs", "values", "advantages", "returns"):
        assert torch.allclose(getattr(batch_of_cut, name), getattr(batch, name), atol=1e-5), name
    assert kl_of_cut == pytest.approx(kl, abs=1e-5)


def test_the_interval_of_the_gain_takes_states_of_one_conversation_for_one() -> None:
    """Gains of -1, 3, 3, 3 and 4 of the conversations a, b, b, b and c, about their mean of 2.4."""
    improver = _improver(RLOO())
    before = improver.score(STATES, RESPONSES)
    assert before.owners == ("a", "b", "b", "b", "c")
    after = replace(before, q=before.q + torch.tensor([-1.0, 3.0, 3.0, 3.0, 4.0])[:, None])
    gain, low, high = improver.gain(before, after)
    assert gain == pytest.approx(2.4)
    # The conversations move it by -3.4, 1.8 and 1.6 fifths; t with two degrees of freedom is 4.302653.
    half = 4.302653 * math.sqrt(3 / 2 * (3.4**2 + 1.8**2 + 1.6**2)) / 5
    assert (low, high) == pytest.approx((2.4 - half, 2.4 + half), abs=1e-5)


def test_states_keep_their_owners_when_they_are_put_in_the_order_of_their_lengths() -> None:
    scored = _improver(RLOO()).sample(STATES[::-1], seed=0)
    assert scored.owners == ("a", "b", "b", "b", "c")
