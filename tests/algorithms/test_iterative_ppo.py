"""Iterative PPO on the embedded model: when it steps, when it doesn't, and what it takes back."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import BOT, END, USER, move, own_weights, small_backbone, small_context

from lightning_mtrl.algorithms.base import Improvement, Signal
from lightning_mtrl.algorithms.estimators import RLOO
from lightning_mtrl.algorithms.improvement_config import ImprovementConfig
from lightning_mtrl.algorithms.iterative_ppo import IterativePPO
from lightning_mtrl.algorithms.policy_improvement import SingleTurnImprover
from lightning_mtrl.algorithms.stepping import Stepper
from lightning_mtrl.assembly import Parts, assemble
from lightning_mtrl.config import ClassSpec, DataConfig, ModelConfig, RunConfig
from lightning_mtrl.errors import UserError
from lightning_mtrl.models.adapters import Backbone
from lightning_mtrl.modules.policy import Policy
from lightning_mtrl.modules.q_critic import QCritic
from lightning_mtrl.rollouts.datamodule import State

EVALUATION = {"trunk": "frozen", "head_units": 16, "epochs": 5, "learning_rate": 1e-3}
IMPROVEMENT = {"rounds": 1, "states": 8, "samples": 4, "certificate_states": 8, "learning_rate": 1e-3}


def _parts(estimator: str = "RLOO", algorithm: str = "IterativePPO", **improvement: Any) -> Parts:
    settings = {
        "evaluation": EVALUATION,
        "improvement": IMPROVEMENT | improvement,
        "estimator": {"class_path": f"lightning_mtrl.algorithms.{estimator}"},
    }
    config = RunConfig(
        model=ModelConfig(context_length=384),
        environment=ClassSpec("lightning_mtrl.environments.SuggestedResponse", {"size": "tiny"}),
        data=DataConfig(conversations=96, max_turns=8, max_response_tokens=16),
        algorithm=ClassSpec(
            f"lightning_mtrl.algorithms.{algorithm}", settings if algorithm == "IterativePPO" else {}
        ),
    )
    torch.manual_seed(0)
    return assemble(config, show_progress=False)


def _rollouts(parts: Parts, seed: int = 0) -> list[Any]:
    with parts.backbone.sampling("policy") as model:
        rollouts = parts.collector.collect(model, conversations=96, seed=seed, policy="iteration-0000")
    parts.context.datamodule.set_rollouts(rollouts.conversations, seed=seed)
    return rollouts.conversations


def _step(parts: Parts, trusted: bool = True) -> tuple[Signal, Improvement, bool]:
    """One iteration; the last value tells whether the policy's weights moved."""
    rollouts = _rollouts(parts)
    before = parts.backbone.state_of("policy")
    signal = replace(parts.algorithm.evaluate(rollouts), trusted=trusted, reason="a test says so")
    if isinstance(parts.algorithm, IterativePPO):
        # However little so few conversations taught it, Q tells responses apart.
        move(parts.algorithm.critic.head.parameters())
    improvement = parts.algorithm.improve(rollouts, signal)
    after = parts.backbone.state_of("policy")
    return signal, improvement, any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("estimator", ["GAE", "RLOO", "GRPO"])
def test_every_estimator_moves_the_policy_and_reports_the_gain(estimator: str) -> None:
    signal, improvement, moved = _step(_parts(estimator, accept="always"))
    assert moved
    assert improvement.accepted
    assert improvement.metrics["gain_low"] <= improvement.metrics["gain"] <= improvement.metrics["gain_high"]
    assert {"q_loss", "constant_loss", "auc", "calibration_error"} <= set(signal.metrics)
    assert "calibration" in signal.figures


def test_returns_outside_of_what_the_loss_is_for_are_refused_before_anything_moves() -> None:
    parts = _parts()
    rollouts = _rollouts(parts)
    last = parts.context.datamodule.train_conversations[-1]
    odd = replace(last, turns=(*last.turns[:-1], replace(last.turns[-1], reward=3.0)))
    found = [odd if c is last else c for c in rollouts]
    parts.context.datamodule.set_rollouts(found, seed=0)
    before = own_weights(parts.algorithm.critic)
    with pytest.raises(UserError, match=rf"{last.id}' has return .*'bce' needs .*evaluation\.loss mse"):
        parts.algorithm.evaluate(found)
    assert all(torch.equal(a, b) for a, b in zip(before, own_weights(parts.algorithm.critic), strict=True))


def test_a_critic_that_is_not_trusted_means_no_step_and_says_so() -> None:
    parts = _parts()
    said: list[str] = []
    parts.context.say = said.append
    _, improvement, moved = _step(parts, trusted=False)
    assert not moved
    assert not improvement.accepted
    assert any("No step is taken: a test says so" in text for text in said)
    assert any("before the step" in text and "of a constant" in text for text in said)


def test_a_step_without_a_certain_gain_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = _parts()
    monkeypatch.setattr(parts.algorithm.improver, "gain", lambda before, after: (0.01, -0.02, 0.04))
    said: list[str] = []
    parts.context.say = said.append
    _, improvement, moved = _step(parts)
    assert not moved
    assert not improvement.accepted
    assert improvement.metrics["gain_low"] == -0.02
    assert any("taken back" in text for text in said)


def _learned(parts: Parts) -> dict[str, Any]:
    """All that a step changes: weights, optimizers, and what else the algorithm keeps."""
    found = {name: (m.state(), o.state_dict()) for name, (m, o) in parts.algorithm.modules().items()}
    del found["critic"]  # fitted before the step, whatever becomes of that
    return copy.deepcopy({**found, "kl_coef": parts.algorithm.state()["kl_coef"]})


def test_a_step_taken_back_leaves_no_momentum_and_no_kl_coef(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = _parts("GAE", rounds=2, kl_target=0.1)
    certificates = iter([(0.1, 0.05, 0.2), (0.01, -0.02, 0.04)])
    monkeypatch.setattr(parts.algorithm.improver, "gain", lambda before, after: next(certificates))
    assert _step(parts)[1].accepted
    kept = _learned(parts)
    moments = kept["policy"][1]["state"].values()
    assert all(state["step"] > 0 and state["exp_avg"].abs().sum() > 0 for state in moments)
    _, improvement, moved = _step(parts)
    assert not moved
    assert improvement.metrics["kl_coef"] != kept["kl_coef"]
    torch.testing.assert_close(_learned(parts), kept, rtol=0, atol=0)


def test_the_kl_coefficient_is_adapted_after_every_round_but_the_first() -> None:
    """Before the first round's steps the policy is pi_i; its KL of 0 says nothing of the coefficient."""
    _, still, _ = _step(_parts(rounds=3, learning_rate=0.0, kl_coef=0.5, kl_target=0.1, accept="always"))
    assert still.metrics["kl_coef"] == pytest.approx(0.5 * 0.98**2)
    _, fast, _ = _step(_parts(rounds=2, learning_rate=0.02, kl_coef=0.5, kl_target=1e-3, accept="always"))
    assert fast.metrics["kl_coef"] == pytest.approx(0.5 * 1.02)
    with pytest.raises(UserError, match=r"improvement\.rounds is 1, .*kl_coef is adapted after the first"):
        ImprovementConfig(rounds=1, kl_target=0.1)


def test_the_kl_ceiling_stops_an_iterations_improvement() -> None:
    parts = _parts(rounds=6, learning_rate=0.02, kl_ceiling=0.2, accept="always")
    _, improvement, _ = _step(parts)
    assert improvement.metrics["rounds"] < 6
    assert improvement.metrics["kl"] > 0.2


@pytest.mark.parametrize("learning_rate", [0.0, 0.02])
def test_the_kl_is_that_of_the_policy_after_its_last_update(learning_rate: float) -> None:
    """The only round's own KL is 0: the reference is a copy of pi_i, and no step was taken yet."""
    _, improvement, moved = _step(_parts(rounds=1, learning_rate=learning_rate, accept="always"))
    assert moved == (learning_rate > 0)
    if moved:
        assert improvement.metrics["kl"] > 0.05
    else:  # The sampler merges the adapter, so equality is up to rounding.
        assert abs(improvement.metrics["kl"]) < 1e-3


def test_the_kl_is_the_mean_log_ratio_of_whole_responses() -> None:
    backbone = small_backbone(["policy", "reference", "critic"])
    context, critic, policy = small_context(backbone), QCritic(backbone), Policy(backbone)
    improver = SingleTurnImprover(
        ImprovementConfig(samples=3), RLOO(), critic, Stepper(context, policy, 1.0, None), None, context
    )
    states = [State((USER, 13, END, BOT), "a", 1, "a"), State((USER, 12, 12, END, BOT), "b", 1, "b")]
    scored = improver.sample(states, seed=3)
    ratios = []
    for row in range(2):
        for start, end in zip(scored.batch.turn_start[row], scored.batch.turn_end[row], strict=True):
            response = scored.batch.input_ids[row, start : end + 1].tolist()
            ratios.append(_logprob(backbone, "policy", states[row].ids, response))
            ratios[-1] -= _logprob(backbone, "reference", states[row].ids, response)
    assert len(ratios) == 6
    assert max(map(abs, ratios)) > 0.1
    assert improver.kl(scored) == pytest.approx(sum(ratios) / 6, abs=1e-4)


@torch.no_grad()
def _logprob(backbone: Backbone, role: str, prompt: tuple[int, ...], response: list[int]) -> float:
    """One response alone behind its prompt, scored by the model itself."""
    with backbone.sampling(role) as model:
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    return float(logits.log_softmax(-1)[range(len(response)), response].sum())


def test_one_response_a_state_has_no_spread() -> None:
    _, improvement, _ = _step(_parts("GAE", samples=1, accept="always"))
    assert improvement.metrics["q_spread"] == 0.0
    assert all(math.isfinite(value) for value in improvement.metrics.values())


def test_q_has_converged_after_two_small_changes_in_a_row() -> None:
    parts = _parts()
    algorithm = parts.algorithm
    signal = Signal({})
    for changes, converged in (([], False), ([0.001], False), ([0.2, 0.001], False), ([0.001, 0.001], True)):
        algorithm.load_state({"probe": [], "probe_q": [], "changes": changes, "kl_coef": 0.02})
        assert algorithm.converged(signal) == converged


def test_the_outcome_alone_is_a_baseline_on_the_same_parts() -> None:
    parts = _parts(algorithm="OutcomeOnly")
    signal, improvement, moved = _step(parts)
    assert moved
    assert improvement.accepted
    assert 0.0 < signal.metrics["outcome"] < 1.0
    assert parts.algorithm.turn_values([]) is None


@pytest.mark.parametrize("clip", [None, 3.0])
def test_the_value_head_has_the_clip_range_of_the_configuration(clip: float | None) -> None:
    assert _parts("GAE").algorithm.value_stepper.module.module.clip_range == 0.2
    assert _parts("GAE", value_clip_range=clip).algorithm.value_stepper.module.module.clip_range == clip
    with pytest.raises(UserError, match=r"improvement\.value_clip_range is 0\.0"):
        ImprovementConfig(value_clip_range=0.0)
