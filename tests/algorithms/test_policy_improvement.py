"""Scoring what an improvement step was given: the same numbers for every cut into passes."""

from __future__ import annotations

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
from lightning_mtrl.rollouts.engine import SampledResponse

# Prompts and responses of very different lengths: a pass over the first states needs few columns.
STATES = [[USER, *[13] * size, END, BOT] for size in (1, 2, 3, 9, 17)]
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
