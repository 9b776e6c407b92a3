"""One optimizer step: the same for every cut into micro-batches, and never a number that is not finite."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import (
    conversations_batch,
    improvement_batch,
    move,
    own_weights,
    small_backbone,
    small_context,
    some_talks,
)
from torch import Tensor

from lightning_mtrl.algorithms.stepping import Stepper, begin
from lightning_mtrl.batch import ImprovementBatch, TokenBatch
from lightning_mtrl.errors import UserError
from lightning_mtrl.modules.base import RoleModule
from lightning_mtrl.modules.implicit_prm import ImplicitPRM
from lightning_mtrl.modules.policy import KLTerm, Policy
from lightning_mtrl.modules.q_critic import QCritic
from lightning_mtrl.modules.value_head import ValueHead
from lightning_mtrl.objectives import token_weights

TALKS = some_talks(8)
MODULES = {
    "critic": lambda b: QCritic(b, "bce", td_lambda=0.5),
    "frozen critic": lambda b: QCritic(b, "bce", td_lambda=0.5, trunk="frozen", head_units=8),
    "policy": lambda b: Policy(b, kl=KLTerm(0.1, "k3"), entropy_coef=0.01),
    "value": lambda b: ValueHead(b, "value"),
    "prm": lambda b: ImplicitPRM(b, beta=0.5),
}


def _module(kind: str) -> RoleModule:
    module: RoleModule = MODULES[kind](small_backbone(["policy"]))
    move(module.own_parameters(), seed=9)
    return module


def _improvement(mean_over: Any = "token") -> ImprovementBatch:
    """Random advantages, log-probs of another policy, and one of the two means of a loss."""
    batch = improvement_batch(TALKS)
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(4, *batch.response_mask.shape, generator=generator)
    turns = conversations_batch(TALKS).turn_index
    return replace(
        batch,
        advantages=draws[0],
        returns=draws[1],
        behaviour_logprobs=draws[2].abs().neg(),
        reference_logprobs=draws[3].abs().neg(),
        loss_weights=token_weights(batch.response_mask, mean_over, turns),
    )


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> list[list[Tensor]]:
    """The gradients of every step before they are clipped."""
    found: list[list[Tensor]] = []
    clip = torch.nn.utils.clip_grad_norm_

    def recording(parameters: list[Tensor], max_norm: float) -> Tensor:
        found.append([p.grad.clone() for p in parameters if p.grad is not None])
        return clip(parameters, max_norm)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", recording)
    return found


def _with_reader() -> tuple[Policy, ValueHead]:
    policy = _module("policy")
    assert isinstance(policy, Policy)
    value = ValueHead(policy.backbone, "policy", learning_rate=1e-2, clip_range=None)
    move(value.own_parameters(), seed=3)
    return policy, value


@pytest.mark.parametrize("size", [None, 3, 1])
def test_a_head_that_reads_the_policy_learns_in_its_passes_what_it_would_in_its_own(size: int | None) -> None:
    batch = _improvement()
    policy, value = _with_reader()
    for module in (value, policy):
        Stepper(small_context(policy.backbone), module, 1.0, size).step(batch)
    wanted = own_weights(policy), own_weights(value)

    policy, value = _with_reader()
    first, second = (Stepper(small_context(policy.backbone), m, 1.0, size) for m in (policy, value))
    passes: list[str] = []
    hidden = policy.backbone.hidden

    def counted(role: str, *inputs: Any) -> Tensor:
        passes.append(role)
        return hidden(role, *inputs)

    policy.backbone.hidden = counted  # type: ignore[method-assign]
    logged: dict[str, float] = {}
    policy.log = lambda name, value, **_: logged.setdefault(name, float(value))  # type: ignore[method-assign]
    together = first.joined_by(second)
    begin(together)
    for stepper in together:
        stepper.step(batch)
    assert passes == ["policy"] * -(-len(batch) // (size or len(batch)))
    assert {"policy/loss", "value/loss"} <= logged.keys()
    for found, alone in zip((own_weights(policy), own_weights(value)), wanted, strict=True):
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-5)


def test_a_step_that_is_skipped_moves_neither_the_policy_nor_its_reader() -> None:
    policy, value = _with_reader()
    before = own_weights(policy), own_weights(value)
    context = small_context(policy.backbone, say=lambda _: None)
    first, second = (Stepper(context, module, 1.0, None) for module in (policy, value))
    (stepper,) = first.joined_by(second)
    batch = _improvement()
    stepper.step(replace(batch, returns=torch.full_like(batch.returns, math.inf)))
    assert stepper.skipped == 1
    for found, kept in zip((own_weights(policy), own_weights(value)), before, strict=True):
        torch.testing.assert_close(found, kept, rtol=0, atol=0)


def test_a_value_head_with_a_role_of_its_own_keeps_its_own_passes() -> None:
    policy = _module("policy")
    value = ValueHead(policy.backbone, "value")
    first, second = (Stepper(small_context(policy.backbone), m, 1.0, None) for m in (policy, value))
    assert first.joined_by(second) == [first, second]
    assert first.joined_by(None) == [first]


@pytest.mark.parametrize(
    ("kind", "batch"),
    [
        ("critic", conversations_batch(TALKS)),
        ("frozen critic", conversations_batch(TALKS)),
        ("policy", _improvement("token")),
        ("policy", _improvement("response")),
        ("value", _improvement("token")),
        ("value", _improvement("response")),
    ],
    ids=[
        "critic",
        "frozen critic",
        "policy, tokens",
        "policy, responses",
        "value, tokens",
        "value, responses",
    ],
)
def test_gradients_do_not_depend_on_the_micro_batch_size(
    kind: str, batch: TokenBatch, gradients: list[list[Tensor]]
) -> None:
    losses = []
    for size in (None, 8, 3, 2, 1):
        module = _module(kind)
        losses.append(Stepper(small_context(module.backbone), module, 1.0, size).step(batch))
    whole, *others = gradients
    assert len(others) == 4
    assert sum(g.abs().sum().item() for g in whole) > 1e-2
    assert len(whole) == len(_module(kind).own_parameters())
    for cut in others:
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(whole, cut, strict=True))
    assert losses == pytest.approx([losses[0]] * 5, abs=1e-5)


IN_EVERY_STEP = {
    "critic": {"critic/training_q_loss"},
    "policy": {
        *("policy/loss", "policy/ratio", "policy/ratio_deviation", "policy/kl_k3_reverse", "policy/entropy"),
        *("policy/clip_fraction", "policy/clip_fraction_token", "policy/clip_fraction_turn"),
        "policy/dual_clip_fraction",
    },
    "value": {"value/loss"},
    "prm": {"prm/loss"},
}


def _logged(kind: str, batch: TokenBatch, parts: list[list[int]]) -> dict[str, list[float]]:
    """What one step logs under Fabric, by name."""
    module = _module(kind)
    stepper = Stepper(small_context(module.backbone), module, 1.0, None)
    found: dict[str, list[float]] = {}
    module.log = lambda name, value, **_: found.setdefault(name, []).append(float(value))  # type: ignore[method-assign]
    assert math.isfinite(stepper.step(batch, lambda *_: map(torch.tensor, parts)))
    return found


@pytest.mark.parametrize(
    ("kind", "mean_over"),
    [*((kind, "token") for kind in IN_EVERY_STEP), ("policy", "response"), ("policy", "conversation")],
)
def test_a_step_in_parts_logs_once_what_the_step_in_one_piece_logs(kind: str, mean_over: Any) -> None:
    batch: TokenBatch = conversations_batch(TALKS)
    if kind in ("policy", "value"):
        batch = replace(_improvement(mean_over), turn_index=conversations_batch(TALKS).turn_index)
    whole = _logged(kind, batch, [[*range(8)]])
    assert whole.keys() == IN_EVERY_STEP[kind]
    # Parts of unequal weight, one of a single conversation.
    for cut in ([[0, 1, 2], [3], [4, 5, 6, 7]], [[7, 0], [3, 5, 6, 1, 2], [4]]):
        parts = _logged(kind, batch, cut)
        assert parts.keys() == whole.keys()
        for name, value in parts.items():
            assert value == [pytest.approx(whole[name][0], rel=1e-5, abs=1e-5)], name


def test_a_part_that_is_not_finite_shows_in_the_steps_numbers() -> None:
    batch = _broken("advantages")
    module = _module("policy")
    stepper = Stepper(small_context(module.backbone), module, 1.0, 2)
    found: dict[str, list[float]] = {}
    module.log = lambda name, value, **_: found.setdefault(name, []).append(float(value))  # type: ignore[method-assign]
    assert math.isnan(stepper.step(batch))
    assert [math.isnan(value) for value in found["policy/loss"]] == [True]
    assert [math.isfinite(value) for value in found["policy/entropy"]] == [True]


def test_the_order_of_rows_changes_nothing(gradients: list[list[Tensor]]) -> None:
    for order in (slice(None), torch.tensor([5, 2, 7, 0, 1, 6, 3, 4])):
        module = _module("policy")
        Stepper(small_context(module.backbone), module, 1.0, 3).step(_improvement().rows(order))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*gradients, strict=True))


def test_gradients_are_scaled_down_to_the_largest_norm() -> None:
    module = _module("policy")
    stepper = Stepper(small_context(module.backbone), module, 1e-3, None)
    seen: list[float] = []
    stepper.optimizer.optimizer.register_step_pre_hook(
        lambda *_: seen.append(sum(float(p.grad.square().sum()) for p in module.own_parameters()) ** 0.5)
    )
    stepper.step(_improvement())
    assert seen == [pytest.approx(1e-3, rel=1e-3)]


def test_a_step_of_one_role_leaves_no_gradient_on_others() -> None:
    module = _module("critic")
    Stepper(small_context(module.backbone), module, 1.0, None).step(conversations_batch(TALKS))
    assert all(p.grad is None for p in module.backbone.parameters())


def _broken(where: str) -> ImprovementBatch:
    batch = _improvement()
    row, column = batch.response_mask.nonzero()[3].tolist()
    values = getattr(batch, where).clone()
    values[row, column] = {"reference_logprobs": -math.inf}.get(where, math.nan)
    return replace(batch, **{where: values})


def _trained(**fields: Any) -> tuple[Stepper, list[str]]:
    """A stepper that has taken one good step, and what it says."""
    said: list[str] = []
    module = _module("policy")
    stepper = Stepper(small_context(module.backbone, say=said.append, **fields), module, 1.0, 2)
    assert math.isfinite(stepper.step(_improvement()))
    return stepper, said


@pytest.mark.parametrize("where", ["advantages", "behaviour_logprobs", "reference_logprobs", "loss_weights"])
def test_a_loss_that_is_not_finite_is_skipped_counted_and_shown(where: str) -> None:
    stepper, said = _trained()
    module = stepper.module.module
    before, steps = own_weights(module), stepper.optimizer.state_dict()["state"][0]["step"].item()
    assert math.isnan(stepper.step(_broken(where)))
    assert all(torch.equal(a, b) for a, b in zip(before, own_weights(module), strict=True))
    assert stepper.optimizer.state_dict()["state"][0]["step"].item() == steps == 1
    assert (stepper.skipped, stepper.skipped_in_row) == (1, 1)
    assert len(said) == 1
    assert "'policy'" in said[0]
    # Nothing of it is left for the next step.
    assert math.isfinite(stepper.step(_improvement()))
    assert (stepper.skipped, stepper.skipped_in_row) == (1, 0)
    assert all(torch.isfinite(p).all() for p in module.own_parameters())


def test_a_gradient_that_is_not_finite_is_skipped_though_the_loss_is() -> None:
    stepper, _ = _trained()
    module = stepper.module.module
    before = own_weights(module)
    handle = module.own_parameters()[0].register_hook(lambda gradient: gradient * math.inf)
    assert math.isnan(stepper.step(_improvement()))
    handle.remove()
    assert all(torch.equal(a, b) for a, b in zip(before, own_weights(module), strict=True))
    assert stepper.skipped == 1


def test_what_stands_outside_the_responses_breaks_no_step() -> None:
    stepper, said = _trained()
    batch = _improvement()
    spoilt = {
        name: getattr(batch, name).masked_fill(~batch.response_mask, math.nan)
        for name in ("advantages", "behaviour_logprobs", "reference_logprobs")
    }
    assert math.isfinite(stepper.step(replace(batch, **spoilt)))
    assert said == []


def test_the_run_ends_after_too_many_skipped_steps_in_a_row() -> None:
    stepper, _ = _trained(max_skipped_steps=3)
    before = own_weights(stepper.module.module)
    for _ in range(2):
        stepper.step(_broken("advantages"))
    with pytest.raises(UserError, match=r"'policy' was not finite in 3 steps in a row .*max_skipped_steps"):
        stepper.step(_broken("advantages"))
    assert all(torch.equal(a, b) for a, b in zip(before, own_weights(stepper.module.module), strict=True))


def test_good_steps_between_skipped_ones_keep_the_run_alive() -> None:
    stepper, _ = _trained(max_skipped_steps=2)
    for _ in range(3):
        stepper.step(_broken("advantages"))
        stepper.step(_improvement())
    assert stepper.skipped == 3


def test_every_step_is_counted_for_the_logs() -> None:
    steps: list[int] = []
    stepper, _ = _trained(on_step=lambda: steps.append(1))
    stepper.step(_broken("advantages"))
    assert len(steps) == 2


@pytest.mark.parametrize("kind", ["critic", "policy", "value"])
@pytest.mark.parametrize("earlier_steps", [0, 2])
def test_going_back_is_as_if_nothing_had_come_after(kind: str, earlier_steps: int) -> None:
    """To the last bit, moments and step counts too; and more than once."""
    batch = conversations_batch(TALKS) if kind == "critic" else _improvement()
    module = _module(kind)
    stepper = Stepper(small_context(module.backbone), module, 1.0, None)

    def moved() -> list[Tensor]:
        stepper.step(batch)
        return [weights.clone() for weights in own_weights(module)]

    for _ in range(earlier_steps):
        moved()
    learned, before = stepper.learned(), [weights.clone() for weights in own_weights(module)]
    wanted = [moved(), moved()]
    assert not any(torch.equal(a, b) for a, b in zip(wanted[0], before, strict=True))
    for _ in range(2):
        moved()
        stepper.go_back(learned)
        assert all(torch.equal(a, b) for a, b in zip(own_weights(module), before, strict=True))
        for after in wanted:
            assert all(torch.equal(a, b) for a, b in zip(moved(), after, strict=True))
