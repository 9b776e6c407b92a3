"""What is computed between training steps has their precision, and rewards and Q are float32."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from small_models import BOT, END, USER, move, small_backbone, small_context, some_talks
from torch import nn

from lightning_mtrl.algorithms.critic_inputs import CriticInputs
from lightning_mtrl.algorithms.estimators import GAE
from lightning_mtrl.algorithms.fit_targets import LoggedTargets
from lightning_mtrl.algorithms.improvement_config import ImprovementConfig
from lightning_mtrl.algorithms.policy_evaluation import _loss, measure
from lightning_mtrl.algorithms.policy_improvement import SingleTurnImprover
from lightning_mtrl.algorithms.stepping import Stepper
from lightning_mtrl.batch import ImprovementBatch
from lightning_mtrl.modules.policy import Policy
from lightning_mtrl.modules.q_critic import QCritic
from lightning_mtrl.modules.value_head import ValueHead
from lightning_mtrl.rollouts.datamodule import State
from lightning_mtrl.rollouts.engine import SampledResponse

STATES = [State((USER, *[13] * size, END, BOT), f"c-{size}", 1, f"c-{size}") for size in (1, 2, 3)]
RESPONSES = [[SampledResponse((*ids, END), (-1.0,) * (len(ids) + 1), True) for ids in ((4, 5), (6,))]] * 3


def _improver(bias: float = 0.0, **settings: Any) -> SingleTurnImprover:
    backbone = small_backbone(["policy", "reference", "critic"])
    context = small_context(backbone, precision="bf16-mixed")
    context.say = lambda text: None
    critic, policy, value = QCritic(backbone), Policy(backbone), ValueHead(backbone, "value")
    move([*critic.head.parameters(), *value.own_parameters()], seed=7)
    last = critic.head[-1]
    assert isinstance(last, nn.Linear)
    last.bias.data.fill_(bias)
    moves, learns = (Stepper(context, module, 1.0, None) for module in (policy, value))
    config = ImprovementConfig(samples=2, kl_coef=0.0, **settings)
    return SingleTurnImprover(config, GAE(gae_lambda=1.0), critic, moves, learns, context)


def _round(improver: SingleTurnImprover) -> ImprovementBatch:
    return improver.prepare(improver.score(STATES, RESPONSES))[0]


@torch.no_grad()
def test_values_of_a_round_are_those_that_a_training_step_computes() -> None:
    improver = _improver()
    batch = _round(improver)
    assert improver.value is not None
    with improver.context.fabric.autocast():
        wanted = improver.value(batch)
    assert wanted.dtype == batch.values.dtype == torch.float32
    assert torch.allclose(batch.values, wanted, atol=1e-6)
    assert not torch.allclose(batch.values, improver.value(batch), atol=1e-4)


def test_the_logit_of_a_saturated_q_is_that_of_its_limit() -> None:
    improver = _improver(bias=30.0, reward="logit")
    scored = improver.score(STATES, RESPONSES)
    assert scored.q.dtype == torch.float32
    assert scored.q.min() > 1 - 1e-6
    batch = improver.prepare(scored)[0]
    mask = batch.response_mask
    # With a lambda of 1 every token's return is the reward at the end: log(0.9999 / 0.0001).
    assert torch.allclose(batch.returns[mask], torch.tensor(math.log(9999.0)), atol=1e-2)
    assert bool(batch.advantages[mask].isfinite().all())


@pytest.mark.parametrize("critic", [{}, {"trunk": "frozen", "head_units": 8}], ids=["adapter", "frozen"])
def test_the_loss_that_ends_a_fit_is_the_one_that_is_reported(critic: dict[str, Any]) -> None:
    backbone = small_backbone(["critic"])
    context = small_context(backbone, precision="bf16-mixed")
    context.datamodule.set_rollouts(some_talks(24))
    module = QCritic(backbone, gamma=1.0, **critic)
    move(module.head.parameters())
    inputs = CriticInputs(module, context)
    targets = LoggedTargets(inputs)
    held_out = context.datamodule.validation_conversations
    found = _loss(inputs, [targets.on(batch) for _, batch in inputs.batches(held_out)])
    assert found == pytest.approx(measure(inputs, held_out, targets).loss, abs=1e-6)
