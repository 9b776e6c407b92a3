"""What the value head predicts, from whose hidden states, and what a fit moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import (
    conversations_batch,
    improvement_batch,
    move,
    plain_trainer,
    small_backbone,
    some_talks,
    watched,
)
from torch.utils.data import DataLoader

from lightning_mtrl.modules.value_head import ValueHead

TALKS = some_talks(6)


def _value(role: str = "value", **settings: Any) -> ValueHead:
    value = ValueHead(small_backbone(["policy"]), role, **settings)
    move(value.own_parameters())
    return value


@pytest.mark.parametrize("role", ["value", "policy"])
def test_all_turns_in_one_pass_equal_one_pass_for_each_prefix(role: str) -> None:
    value = _value(role)
    batch = conversations_batch(TALKS)
    with torch.no_grad():
        found = value(batch)
    model = value.backbone.causal(role)
    for row, conversation in enumerate(TALKS):
        prefix = list(conversation.prompt_ids)
        for turn in conversation.turns:
            for token in turn.response_ids:
                with torch.no_grad():
                    out = model(input_ids=torch.tensor([prefix]), output_hidden_states=True)
                    wanted = value.head(out.hidden_states[-1][0, -1]).item()
                assert found[row, len(prefix)].item() == pytest.approx(wanted, abs=1e-5)
                prefix.append(token)
            prefix += turn.observation_ids
    assert not found[~batch.response_mask].any()


def test_the_value_of_a_place_does_not_see_the_token_that_is_sampled_there() -> None:
    value = _value()
    batch = conversations_batch(TALKS[:1])
    place = int(batch.response_mask[0].nonzero()[0])
    other = batch.input_ids.clone()
    other[0, place] = 9
    with torch.no_grad():
        before, after = value(batch)[0], value(replace(batch, input_ids=other))[0]
    assert torch.equal(before[: place + 1], after[: place + 1])
    assert not torch.equal(before[place + 1 :], after[place + 1 :])


def _returns() -> torch.Tensor:
    batch = conversations_batch(TALKS)
    last = batch.outcome[:, None] * batch.response_mask
    return last.float()


def test_it_fits_known_returns() -> None:
    value = ValueHead(small_backbone(["policy"]), learning_rate=1e-2, clip_range=None)
    batch = improvement_batch(TALKS[3:4])
    batch = replace(batch, returns=0.7 * batch.returns)
    plain_trainer(epochs=1).fit(value, DataLoader([batch] * 60, batch_size=None))
    with torch.no_grad():
        found = value(batch)[batch.response_mask]
    assert found.tolist() == pytest.approx([0.7] * len(found), abs=0.05)


def test_it_trains_in_a_plain_trainer_and_moves_its_role_alone() -> None:
    backbone = small_backbone(["policy", "critic"])
    value = ValueHead(backbone, learning_rate=1e-2)
    head = value.head.weight.detach().clone()
    with watched(backbone) as moved:
        data = DataLoader([improvement_batch(TALKS, returns=_returns())] * 6, batch_size=None)
        plain_trainer(epochs=1).fit(value, data)
    assert len(moved["value"]) == len(backbone.parameters_of("value")) > 10
    assert moved["policy"] == moved["critic"] == moved["base"] == []
    assert not torch.equal(value.head.weight, head)


def test_a_head_on_the_policys_hidden_states_leaves_the_policy_alone() -> None:
    backbone = small_backbone(["policy", "critic"])
    value = ValueHead(backbone, "policy", learning_rate=1e-2)
    head = value.head.weight.detach().clone()
    with watched(backbone) as moved:
        data = DataLoader([improvement_batch(TALKS, returns=_returns())] * 6, batch_size=None)
        plain_trainer(epochs=1).fit(value, data)
    assert all(names == [] for names in moved.values())
    assert not torch.equal(value.head.weight, head)
    assert all(p.grad is None for p in backbone.parameters())
    assert {id(p) for p in value.own_parameters()} == {id(p) for p in value.head.parameters()}


def test_a_clipped_value_far_from_the_old_one_gets_no_gradient() -> None:
    value = _value(clip_range=0.2)
    value.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    batch = improvement_batch(TALKS)
    with torch.no_grad():
        now = value(batch)
    # It has moved by 1 towards its target already; half the clipped error is (0.8 + 1)^2 / 2.
    moved = replace(batch, values=now - 1.0, returns=now + 1.0)
    loss = value.training_step(moved)
    loss.backward()
    assert loss.item() == pytest.approx(1.62, abs=1e-4)
    assert all(not p.grad.any() for p in value.own_parameters())


@pytest.mark.parametrize("role", ["value", "policy"])
def test_state_brings_another_head_to_the_same_values(role: str) -> None:
    first, second = _value(role), ValueHead(small_backbone(["policy"]), role)
    batch = conversations_batch(TALKS)
    with torch.no_grad():
        first.backbone.load_state_of("policy", second.backbone.state_of("policy"))
        if role == "policy":
            move(first.head.parameters(), seed=5)
        wanted = first(batch)
        assert not torch.equal(second(batch), wanted)
        second.load_state(first.state())
        assert torch.equal(second(batch), wanted)


def test_the_state_of_a_borrowing_head_holds_the_head_alone() -> None:
    assert set(_value("policy").state()) == {"head.head.weight", "head.head.bias"}
    assert len(_value("value").state()) > 10
