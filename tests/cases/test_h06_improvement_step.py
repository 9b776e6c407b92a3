"""H06, second part: the same four conversations through a real improvement step, however it is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import move, small_backbone, small_context, talk
from torch import Tensor

from lightning_mtrl.algorithms.estimators import GAE
from lightning_mtrl.algorithms.improvement_config import ImprovementConfig
from lightning_mtrl.algorithms.policy_improvement import SingleTurnImprover
from lightning_mtrl.algorithms.stepping import Stepper
from lightning_mtrl.batch import TokenBatch
from lightning_mtrl.modules.policy import KLTerm, Policy
from lightning_mtrl.modules.q_critic import QCritic
from lightning_mtrl.modules.value_head import ValueHead
from lightning_mtrl.rollouts.datamodule import State
from lightning_mtrl.rollouts.engine import SampledResponse

# The rows of the case: one, nine, two and four trainable tokens.
A, B, C, D = range(4)
TALKS = [
    talk("A", [[1]], [1.0]),
    talk("B", [[4, 5, 6, 7, 8, 9, 10, 11, 1]], [0.0]),
    talk("C", [[12, 1]], [1.0]),
    talk("D", [[13, 4, 8, 1]], [0.0]),
]
# Each split as an order of the rows and the size of a micro-batch: the last is the rest.
SPLITS = {
    "{ABCD}": ([A, B, C, D], 4),
    "{AB}{CD}": ([A, B, C, D], 2),
    "{AC}{BD}": ([A, C, B, D], 2),
    "{BCD}{A}": ([B, C, D, A], 3),
    "{A}{B}{C}{D}": ([A, B, C, D], 1),
}


def _after_a_step(order: list[int], size: int, mean_over: Any, learning_rate: float) -> dict[str, Tensor]:
    """All weights of policy and value head after one step on rows that are scored in one way."""
    backbone = small_backbone(["policy", "critic"])
    backbone.add_role("reference", like="policy", trainable=False)
    critic = QCritic(backbone)
    policy = Policy(backbone, kl=KLTerm(0.1), entropy_coef=0.01, learning_rate=learning_rate)
    value = ValueHead(backbone, "value", learning_rate=learning_rate)
    move([*critic.head.parameters(), *value.own_parameters()], seed=7)
    context = small_context(backbone)
    steppers = [Stepper(context, module, 1.0, size) for module in (policy, value)]
    config = ImprovementConfig(mean_over=mean_over)
    improver = SingleTurnImprover(config, GAE(), critic, steppers[0], steppers[1], context)
    responses = [
        [SampledResponse(t.response_ids, t.behaviour_logprobs, True) for t in talk.turns] for talk in TALKS
    ]
    batch: TokenBatch
    states = [State(talk.prompt_ids, talk.id, 1, talk.id) for talk in TALKS]
    batch, _ = improver.prepare(improver.score(states, responses))
    assert batch.response_mask.sum(1).tolist() == [1, 9, 2, 4]
    for stepper in steppers:
        stepper.step(batch.rows(torch.tensor(order)))
    return {
        **{f"policy {n}": w for n, w in policy.state().items()},
        **{f"value {n}": w for n, w in value.state().items()},
    }


@pytest.mark.parametrize("mean_over", ["token", "response"])
def test_the_step_is_the_same_for_every_split(mean_over: Any) -> None:
    start = _after_a_step(*SPLITS["{ABCD}"], mean_over, learning_rate=0.0)
    # AdamW's first step is the sign of the gradient, so a wrong weight of a row shows at full size.
    whole = _after_a_step(*SPLITS["{ABCD}"], mean_over, learning_rate=1e-4)
    assert all(not torch.equal(start[name], whole[name]) for name in whole)
    for name, (order, size) in SPLITS.items():
        cut = _after_a_step(order, size, mean_over, learning_rate=1e-4)
        worst = max((cut[key] - whole[key]).abs().max().item() for key in whole)
        assert worst < 1e-6, f"{name}: parameters differ by {worst}"


def test_the_two_means_are_two_losses() -> None:
    token, response = (_after_a_step(*SPLITS["{ABCD}"], mean, 1e-4) for mean in ("token", "response"))
    assert max((token[name] - response[name]).abs().max().item() for name in token) > 1e-5
