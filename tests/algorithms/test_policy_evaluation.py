"""Fitting the Q-critic: what is kept of a fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import move, small_backbone, small_context, some_talks

from lightning_mtrl.algorithms import policy_evaluation
from lightning_mtrl.algorithms.critic_inputs import CriticInputs
from lightning_mtrl.algorithms.fit_targets import LoggedTargets
from lightning_mtrl.algorithms.off_policy_targets import fit_targets
from lightning_mtrl.algorithms.policy_evaluation import EvaluationConfig, fit_critic, measure, why_untrusted
from lightning_mtrl.algorithms.stepping import Learned, Stepper
from lightning_mtrl.errors import UserError
from lightning_mtrl.evaluation.calibration import QReport
from lightning_mtrl.modules.q_critic import QCritic


def _fit(losses: list[float], monkeypatch: pytest.MonkeyPatch, **options: Any) -> Learned:
    """What a critic has learned after a fit with these held-out losses: before it, and after each epoch."""
    backbone = small_backbone(["policy"])
    context = small_context(backbone, seed=5)
    context.datamodule.set_rollouts(some_talks(12))
    config = EvaluationConfig(epochs=len(losses) - 1, **options)
    critic = QCritic(backbone, td_lambda=config.td_lambda, learning_rate=1e-2)
    inputs, stepper = CriticInputs(critic, context), Stepper(context, critic, 1.0, None)
    told = iter(losses)
    monkeypatch.setattr(policy_evaluation, "_loss", lambda *_: next(told))
    fit_critic(inputs, stepper, config, fit_targets(inputs, config))
    assert [*told] == []
    return stepper.learned()


@pytest.mark.parametrize("options", [{}, {"td_lambda": 0.5, "target_refresh": 3}], ids=["log", "moving"])
def test_a_fit_that_went_on_for_too_long_leaves_the_critic_and_the_optimizer_of_one_that_ended(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = _fit([0.9, 0.5], monkeypatch, **options)
    too_long = _fit([0.9, 0.5, 0.6, 0.7], monkeypatch, **options)
    assert ended.optimizer["state"]
    torch.testing.assert_close(vars(too_long), vars(ended), rtol=0, atol=0)


def test_a_fit_that_did_harm_alone_leaves_the_critic_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    harmed = _fit([0.4, 0.5, 0.6], monkeypatch)
    assert harmed.optimizer["state"] == {}
    untouched = QCritic(small_backbone(["policy"])).state()
    torch.testing.assert_close(harmed.weights, untouched, rtol=0, atol=0)


def test_conversations_of_a_customer_are_no_further_evidence_of_a_critics_gain() -> None:
    """Each of six three times, as a customer's: the bound of the six, and not that of eighteen."""
    backbone = small_backbone(["critic"])
    context = small_context(backbone)
    module = QCritic(backbone, gamma=1.0)
    move(module.head.parameters())
    inputs = CriticInputs(module, context)
    talks = some_talks(6)
    copies = [replace(c, id=f"{c.id}/{n}", metadata={"customer": c.id}) for n in range(3) for c in talks]
    alone, customers = (measure(inputs, told, LoggedTargets(inputs)).gain for told in (talks, copies))
    assert customers == pytest.approx(alone, abs=1e-6)
    apart = measure(inputs, [replace(c, metadata={}) for c in copies], LoggedTargets(inputs)).gain
    assert apart[1] > alone[1] + 0.01


@pytest.mark.parametrize("held_out", [False, True])
def test_a_fit_without_a_turn_to_go_by_is_refused_before_anything_moves(held_out: bool) -> None:
    backbone = small_backbone(["policy"])
    context = small_context(backbone, seed=5)
    data = context.datamodule
    data.set_rollouts(some_talks(12))
    part = "validation_conversations" if held_out else "train_conversations"
    setattr(data, part, [replace(c, explored_turn=len(c.turns) + 1) for c in getattr(data, part)])
    inputs, config = CriticInputs(QCritic(backbone), context), EvaluationConfig()
    stepper = Stepper(context, inputs.critic, 1.0, None)
    with pytest.raises(UserError, match=r"nothing to go by .* drawn to be explored \(data\.explore_share\)"):
        fit_critic(inputs, stepper, config, fit_targets(inputs, config))
    assert stepper.learned().optimizer["state"] == {}


def _report(lower_bound: float) -> QReport:
    nan = float("nan")
    return QReport(0.5, 0.5, (0.0, lower_bound), nan, nan, nan, nan, (), 9)


def test_more_of_the_same_outcomes_are_not_asked_for_where_all_are_equal() -> None:
    talks = some_talks(6)
    same = [replace(c, outcome=1.0) for c in talks]
    reason = why_untrusted(_report(-0.1), same)
    assert "all 6 outcomes are 1, so none of them says" in reason
    assert "longer" not in reason
    mixed = [*same[:5], replace(talks[5], outcome=0.0)]
    assert "collect more conversations or fit it longer" in why_untrusted(_report(-0.1), mixed)
    assert why_untrusted(_report(0.1), mixed) == ""
