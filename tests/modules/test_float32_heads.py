"""Heads, losses and Q are float32 where the model computes in bfloat16."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_models import (
    END,
    conversations_batch,
    improvement_batch,
    move,
    small_backbone,
    some_talks,
    talk,
)
from torch import Tensor, nn

from lightning_mtrl.batch import TurnFeatures
from lightning_mtrl.modules.base import at_predecessor
from lightning_mtrl.modules.q_critic import QCritic
from lightning_mtrl.modules.value_head import ValueHead

TALKS = some_talks(6)
BATCH = conversations_batch(TALKS)


def _mixed() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def _exactly(head: nn.Module, hidden: Tensor) -> Tensor:
    """What a head says of hidden states, in double precision."""
    found: Tensor = copy.deepcopy(head).double()(hidden.double())
    return found


@torch.no_grad()
@pytest.mark.parametrize("settings", [{}, {"trunk": "frozen", "head_units": 8}], ids=["adapter", "frozen"])
@pytest.mark.parametrize("loss", ["bce", "mse", "hl_gauss"])
def test_a_critics_head_is_exact_on_what_the_model_computes_in_bfloat16(
    loss: str, settings: dict[str, Any]
) -> None:
    critic = QCritic(small_backbone(["critic"]), loss, **settings).eval()
    move([*critic.norm.parameters(), *critic.head.parameters()])
    head = nn.Sequential(critic.norm, *critic.head)
    with _mixed():
        raw, values, hidden = critic(BATCH), critic.values(BATCH), critic.hidden(BATCH)
    plain = critic(BATCH)
    wanted = _exactly(head, hidden[torch.arange(len(BATCH))[:, None], BATCH.turn_read])
    assert raw.dtype == values.dtype == torch.float32
    assert torch.allclose(raw.double(), wanted, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(raw, plain, atol=1e-4), "the model itself did not compute in bfloat16"


@torch.no_grad()
def test_a_head_on_features_says_the_same_in_mixed_precision() -> None:
    critic = QCritic(small_backbone(), trunk="frozen", head_units=8).eval()
    move(critic.head.parameters())
    read = critic.read_base(BATCH)
    features = TurnFeatures(read, BATCH.turn_mask, BATCH.turn_rewards, BATCH.turn_weights, BATCH.ids)
    wanted = critic.values(features)
    with _mixed():
        assert torch.equal(critic.values(features), wanted)


@torch.no_grad()
@pytest.mark.parametrize("role", ["value", "policy"])
def test_a_value_head_is_exact_on_what_the_model_computes_in_bfloat16(role: str) -> None:
    value = ValueHead(small_backbone(["policy"]), role).eval()
    move(value.own_parameters())
    with _mixed():
        found, hidden = value(BATCH), value.hidden(BATCH)
    plain = value(BATCH)
    wanted = _exactly(value.head, at_predecessor(hidden, BATCH)).squeeze(-1)
    assert found.dtype == torch.float32
    assert torch.allclose(found[BATCH.response_mask].double(), wanted, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, plain, atol=1e-4), "the model itself did not compute in bfloat16"


def test_a_return_that_bfloat16_cannot_hold_is_what_a_critic_is_fitted_to() -> None:
    # A fresh head says 0, so its squared error is that of the return alone; bfloat16 has 0.30078, not 0.3.
    critic = QCritic(small_backbone(), "mse", gamma=1.0)
    batch = conversations_batch([talk("a", [[4, END]], [0.3])])
    with _mixed():
        loss = critic.loss(batch)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(0.09, abs=1e-7)


def test_q_of_a_sure_critic_is_not_rounded_to_one() -> None:
    critic = QCritic(small_backbone(["critic"]), "bce").eval()
    last = critic.head[-1]
    assert isinstance(last, nn.Linear)
    nn.init.constant_(last.bias, 7.0)
    with _mixed():
        found = critic.values(BATCH)
    # 1 / (1 + exp(-7)); bfloat16 has no number between 0.99609375 and 1.
    assert torch.allclose(found, torch.tensor(0.9990889), atol=1e-6)


def test_the_gradient_of_a_value_head_is_that_of_float32() -> None:
    value = ValueHead(small_backbone(["policy"]), "policy", clip_range=None)
    value.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    move(value.own_parameters())
    batch = improvement_batch(TALKS)
    with _mixed():
        loss = value.training_step(batch)
        hidden = at_predecessor(value.hidden(batch), batch).double()
    loss.backward()
    mask = batch.response_mask
    # d/dw of sum_t w_t (w h_t + b - 1)^2 / 2
    error = _exactly(value.head, hidden).squeeze(-1) - batch.returns[mask].double()
    wanted = ((batch.loss_weights[mask].double() * error)[:, None] * hidden).sum(0)
    assert value.head.weight.grad is not None
    assert torch.allclose(value.head.weight.grad[0].double(), wanted, atol=1e-6)
