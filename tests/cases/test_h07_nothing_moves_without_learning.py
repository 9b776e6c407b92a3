"""H07: with a learning rate of 0 ratios are 1 and KL is 0 in every step, and the policy keeps its bytes."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from lightning.fabric.loggers.logger import Logger
from small_models import move, small_backbone, small_chat, small_context
from torch import Tensor

from lightning_mtrl.algorithms.base import Context
from lightning_mtrl.algorithms.estimators import GAE, RLOO, AdvantageEstimator
from lightning_mtrl.algorithms.improvement_config import ImprovementConfig
from lightning_mtrl.algorithms.policy_improvement import SingleTurnImprover
from lightning_mtrl.algorithms.stepping import Stepper
from lightning_mtrl.environments.protocol import Observation, Transition
from lightning_mtrl.models.adapters import Backbone
from lightning_mtrl.modules.policy import KLTerm, Policy
from lightning_mtrl.modules.q_critic import QCritic
from lightning_mtrl.modules.value_head import ValueHead
from lightning_mtrl.rollouts.collector import Collector
from lightning_mtrl.rollouts.datamodule import State

CONVERSATIONS, EPOCHS, MINIBATCH = 16, 2, 8
KL = "policy/kl_k3_reverse"


class Recording(Logger):
    """Keeps every logged number, in order."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = defaultdict(list)

    @property
    def name(self) -> str:
        return "recording"

    @property
    def version(self) -> str:
        return ""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        for name, value in metrics.items():
            self.values[name].append(float(value))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass


class TwoTurns:
    def reset(self, seed: int) -> Observation:
        self.turn, self.seed = 0, seed
        return Observation("hello" if seed % 2 else "x")

    def step(self, response: str | None) -> Transition:
        self.turn += 1
        return Transition("yx"[self.seed % 2], reward=float(self.turn == 2), terminated=self.turn == 2)


def _states(backbone: Backbone, context: Context) -> list[State]:
    """The states of conversations that the policy has led itself."""
    collector = Collector(
        TwoTurns(), small_chat(), sampling=context.sampling, rows=16, context_length=context.context_length,
        max_turns=2, show_progress=False,
    )  # fmt: skip
    with backbone.sampling("policy") as model:
        rollouts = collector.collect(model, conversations=CONVERSATIONS, seed=0, policy="pi")
    assert len(rollouts.conversations) == CONVERSATIONS
    return context.datamodule.states(rollouts.conversations)


def _improved(
    learning_rate: float, estimator: AdvantageEstimator, **settings: Any
) -> tuple[dict[str, list[float]], dict[str, float], list[Tensor], list[Tensor]]:
    """Two epochs of the policy step: what was logged, the round's numbers, the policy before and after."""
    log = Recording()
    backbone = small_backbone(["policy", "critic"], dropout=0.5)
    backbone.add_role("reference", like="policy", trainable=False)
    critic = QCritic(backbone)
    move(critic.head.parameters())
    context = small_context(backbone, loggers=[log], context_length=64)
    config = ImprovementConfig(
        rounds=1, states=2 * CONVERSATIONS, samples=4, epochs=EPOCHS, minibatch_states=MINIBATCH, **settings
    )
    policy = Policy(backbone, kl=KLTerm(config.kl_coef), learning_rate=learning_rate)
    steppers = [Stepper(context, policy, config.max_norm, 3)]
    if estimator.needs_values:
        value = ValueHead(backbone, config.value_role, learning_rate=1e-2)
        steppers.append(Stepper(context, value, config.max_norm, None))
    states = _states(backbone, context)
    assert len(states) == 2 * CONVERSATIONS
    before = [weight.clone() for weight in policy.state().values()]
    improver = SingleTurnImprover(
        config, estimator, critic, steppers[0], steppers[1] if steppers[1:] else None, context
    )
    measured = improver.run(states)
    return log.values, measured, before, list(policy.state().values())


@pytest.mark.parametrize(
    ("estimator", "settings"),
    [
        (RLOO(), {}),
        (RLOO(), {"kl_in": "reward", "reward": "logit"}),
        # The value head learns between the policy's steps, with dropout of its own.
        (GAE(), {"value_role": "value"}),
        (GAE(), {"value_role": "policy"}),
    ],
    ids=["rloo", "kl in reward", "own value adapter", "shared value adapter"],
)
def test_ratios_stay_one_and_kl_zero_in_both_epochs(
    estimator: AdvantageEstimator, settings: dict[str, Any]
) -> None:
    logged, measured, before, after = _improved(0.0, estimator, **settings)
    # One number for each of the four steps of an epoch, done in three micro-batches.
    assert {len(logged[f"policy/{name}"]) for name in ("ratio", "ratio_deviation", "clip_fraction")} == {8}
    assert logged["policy/ratio"] == pytest.approx([1.0] * 8, abs=1e-5)
    assert max(logged["policy/ratio_deviation"]) < 1e-4
    assert logged["policy/clip_fraction"] == [0.0] * 8
    assert logged[KL] == pytest.approx([0.0] * 8, abs=1e-6)
    assert measured["kl"] == pytest.approx(0.0, abs=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_with_a_learning_rate_the_first_minibatch_is_the_same_and_later_ones_are_not() -> None:
    logged, measured, before, after = _improved(1e-2, RLOO())
    still, still_measured, _, _ = _improved(0.0, RLOO())
    for name in ("policy/ratio", "policy/ratio_deviation", "policy/clip_fraction", KL, "policy/loss"):
        assert logged[name][:1] == still[name][:1]
    assert measured["kl"] == still_measured["kl"]
    assert min(logged["policy/ratio_deviation"][1:]) > 1e-2
    assert min(logged[KL][1:]) > 1e-6
    assert max(logged["policy/clip_fraction"][1:]) > 0
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_adapters_of_the_case_would_show_dropout() -> None:
    backbone = small_backbone(["policy"], dropout=0.5)
    names = [name for name, w in backbone.named_parameters_of("policy").items() if w.abs().max() > 0]
    assert any("lora_B" in name for name in names)
    assert any(isinstance(m, torch.nn.Dropout) and m.p == 0.5 for m in backbone.modules())
