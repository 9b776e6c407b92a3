"""What the policy scores, what its loss is, and what a step of it moves."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import (
    END,
    conversations_batch,
    improvement_batch,
    move,
    plain_trainer,
    small_backbone,
    some_talks,
    talk,
    watched,
)
from torch.distributions import Categorical
from torch.utils.data import DataLoader

from lightning_mtrl.batch import ImprovementBatch
from lightning_mtrl.errors import UserError
from lightning_mtrl.modules.policy import KLTerm, Policy
from lightning_mtrl.modules.q_critic import QCritic
from lightning_mtrl.modules.surrogate import MEAN_OVER, ClipTerm
from lightning_mtrl.objectives import token_weights

TALKS = some_talks(6)


def test_all_turns_of_a_conversation_in_one_pass_equal_one_pass_for_each_prefix() -> None:
    policy = Policy(small_backbone(["policy", "critic"]))
    batch = conversations_batch(TALKS)
    with torch.no_grad():
        logprobs, entropy = policy(batch)
    model = policy.backbone.causal("policy")
    for row, conversation in enumerate(TALKS):
        prefix = list(conversation.prompt_ids)
        for turn in conversation.turns:
            for token in turn.response_ids:
                with torch.no_grad():
                    plain = Categorical(logits=model(input_ids=torch.tensor([prefix])).logits[0, -1])
                column = len(prefix)
                wanted = plain.log_prob(torch.tensor(token)).item()
                assert logprobs[row, column].item() == pytest.approx(wanted, abs=1e-5)
                assert entropy[row, column].item() == pytest.approx(plain.entropy().item(), abs=1e-5)
                prefix.append(token)
            prefix += turn.observation_ids
    assert not logprobs[~batch.response_mask].any()
    assert not entropy[~batch.response_mask].any()


def _loss(ratio: float, advantage: float, **settings: float) -> float:
    """The loss when every token has this ratio to the behaviour policy, and the reference is the policy."""
    kl = KLTerm(settings.pop("kl_coef", 0.0), "k3")
    policy = Policy(small_backbone(["policy"]), kl=kl, **settings)
    policy.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    batch = improvement_batch(TALKS)
    with torch.no_grad():
        logprobs, _ = policy(batch)
        shift = batch.response_mask * math.log(ratio)
        scored = improvement_batch(
            TALKS,
            behaviour_logprobs=logprobs - shift,
            reference_logprobs=logprobs + shift,
            advantages=advantage * batch.response_mask,
        )
        return policy.training_step(scored).item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [(1.0, 2.0, -2.0), (1.5, 1.0, -1.2), (1.5, -1.0, 1.5), (0.5, 1.0, -0.5), (0.5, -1.0, 0.8)],
)
def test_the_surrogate_is_clipped_where_it_would_promise_too_much(
    ratio: float, advantage: float, loss: float
) -> None:
    assert _loss(ratio, advantage) == pytest.approx(loss, abs=1e-5)


RATIOS = ["token", "turn_product", "turn_geometric", "sequence"]


def _policy(**clip: Any) -> Policy:
    policy = Policy(small_backbone(["policy"]), ClipTerm(**clip))
    policy.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return policy


def _gradient(policy: Policy, batch: ImprovementBatch) -> torch.Tensor:
    policy.zero_grad()
    policy.training_step(batch).backward()
    return torch.cat([p.grad.flatten() for p in policy.own_parameters() if p.grad is not None])


@pytest.mark.parametrize("token_gradient", [False, True])
@pytest.mark.parametrize("ratio", RATIOS)
def test_at_the_behaviour_policy_every_ratio_has_the_mean_advantage_and_its_gradient(
    ratio: str, token_gradient: bool
) -> None:
    """Value minus mean A; gradient of -A log pi, over the tokens of a unit or over their mean."""
    policy = _policy(ratio=ratio, token_gradient=token_gradient)
    whole = conversations_batch(TALKS)
    advantages = torch.where(whole.response_mask, whole.outcome[:, None] - 0.3, 0.0)
    weights = token_weights(whole.response_mask, MEAN_OVER[ratio], whole.turn_index)
    with torch.no_grad():
        logprobs = policy(whole)[0]
    batch = improvement_batch(
        TALKS,
        advantages=advantages,
        behaviour_logprobs=logprobs,
        loss_weights=weights,
        turn_index=whole.turn_index,
    )
    assert policy.training_step(batch).item() == pytest.approx(-(weights * advantages).sum().item(), abs=1e-5)
    got = _gradient(policy, batch)
    unit = whole.turn_index if ratio == "turn_product" and not token_gradient else None
    lengths = torch.ones_like(weights)
    if unit is not None:
        # All tokens of a response move its product, so each counts as often as there are terms.
        counts = (unit[:, :, None] == unit[:, None, :]).sum(2)
        lengths = torch.where(whole.response_mask, counts, 1).float()
    policy.zero_grad()
    plain = -(weights * lengths * advantages * policy(whole)[0]).sum()
    plain.backward()
    wanted = torch.cat([p.grad.flatten() for p in policy.own_parameters() if p.grad is not None])
    assert torch.allclose(got, wanted, atol=1e-5)


def test_one_token_responses_have_one_ratio_whatever_the_unit() -> None:
    short = [talk("a", [[END]], [1.0]), talk("b", [[11]], [0.0])]
    shift = torch.zeros(conversations_batch(short).input_ids.shape)
    losses = []
    for ratio in RATIOS:
        policy = _policy(ratio=ratio)
        with torch.no_grad():
            logprobs = policy(conversations_batch(short))[0]
        shift[:, 4] = torch.tensor([0.5, -0.1])
        batch = improvement_batch(short, behaviour_logprobs=logprobs - shift)
        losses.append(policy.training_step(batch).item())
    # Ratios e^0.5 (clipped at 1.2) and e^-0.1, advantage 1.
    assert losses == pytest.approx([-(1.2 + math.exp(-0.1)) / 2] * 4, abs=1e-5)


def test_ranges_below_and_above_one_and_the_dual_clip_are_followed() -> None:
    for advantage, shift, settings, wanted in (
        (1.0, 0.5, {"low": 0.2, "high": 0.28}, -1.28),
        (-1.0, -0.5, {"low": 0.1, "high": 0.28}, 0.9),
        (-1.0, 3.0, {"dual": 3.0}, 3.0),
        (-1.0, 3.0, {}, math.exp(3.0)),
    ):
        policy = _policy(**settings)
        with torch.no_grad():
            logprobs = policy(conversations_batch(TALKS))[0]
        mask = conversations_batch(TALKS).response_mask
        batch = improvement_batch(
            TALKS, behaviour_logprobs=logprobs - shift * mask, advantages=advantage * mask
        )
        assert policy.training_step(batch).item() == pytest.approx(wanted, rel=1e-4)


def test_the_clip_fraction_is_told_by_unit() -> None:
    """Tokens at 1.1 are inside the range, and the product over a response of 2 or 3 is not always."""
    policy = Policy(small_backbone(["policy"]), ClipTerm(0.2, ratio="turn_product"))
    seen: dict[str, float] = {}
    policy.log = lambda name, value, **kwargs: seen.update({name: float(value)})  # type: ignore[method-assign]
    talks = [talk("two", [[11, END]], [1.0]), talk("one", [[END], [8, 5, END]], [0.0, 0.0])]
    whole = conversations_batch(talks)
    with torch.no_grad():
        logprobs = policy(whole)[0]
    shift = math.log(1.1) * whole.response_mask
    weights = token_weights(whole.response_mask, "response", whole.turn_index)
    batch = improvement_batch(
        talks, behaviour_logprobs=logprobs - shift, loss_weights=weights, turn_index=whole.turn_index
    )
    policy.training_step(batch)
    # 1.21 and 1.331 of three responses.
    assert seen["policy/clip_fraction"] == pytest.approx(2 / 3)
    assert seen["policy/clip_fraction_turn"] == pytest.approx(2 / 3)
    assert seen["policy/clip_fraction_token"] == 0.0
    seen.clear()
    policy.training_step(replace(batch, turn_index=None))
    assert "policy/clip_fraction_turn" not in seen


def test_tokens_that_the_dual_clip_leaves_without_gradient_are_counted() -> None:
    """Ratios of 1, 3.5 and 5 on four tokens: with a negative advantage, two are beyond a limit of 3."""
    policy = Policy(small_backbone(["policy"]), ClipTerm(0.2, dual=3.0))
    seen: dict[str, float] = {}
    policy.log = lambda name, value, **kwargs: seen.update({name: float(value)})  # type: ignore[method-assign]
    talks = [talk("two", [[11, END]], [1.0]), talk("one", [[END], [END]], [0.0, 0.0])]
    mask = improvement_batch(talks).response_mask
    with torch.no_grad():
        logprobs = policy(improvement_batch(talks))[0]
    shift = torch.zeros(mask.shape).masked_scatter(mask, torch.tensor([1.0, 3.5, 5.0, 1.0]).log())

    def fractions(advantage: float, module: Policy) -> tuple[float, float]:
        fields = {"behaviour_logprobs": logprobs - shift, "advantages": advantage * mask}
        module.training_step(improvement_batch(talks, **fields)).backward()
        return seen["policy/clip_fraction"], seen["policy/dual_clip_fraction"]

    assert fractions(-1.0, policy) == (0.0, 0.5)
    assert fractions(1.0, policy) == (0.5, 0.0)
    without = Policy(policy.backbone, 0.2)
    without.log = policy.log  # type: ignore[method-assign]
    assert fractions(-1.0, without) == (0.0, 0.0)


def test_the_kl_penalty_and_the_entropy_bonus_have_their_weights() -> None:
    # k3 of reference / policy = 2: 2 - log 2 - 1 = 0.306853
    assert _loss(2.0, 0.0, kl_coef=0.1) == pytest.approx(0.0306853, abs=1e-6)
    policy = Policy(small_backbone(["policy"]))
    batch = improvement_batch(TALKS)
    with torch.no_grad():
        mean = policy(batch)[1][batch.response_mask].mean().item()
    assert _loss(1.0, 0.0, entropy_coef=0.5) == pytest.approx(-0.5 * mean, abs=1e-5)


def test_a_token_without_weight_has_no_part_in_the_loss() -> None:
    policy = Policy(small_backbone(["policy"]))
    policy.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    batch = improvement_batch(TALKS)
    spoilt = batch.advantages.masked_fill(~batch.response_mask, float("nan"))
    ghost = improvement_batch(TALKS, advantages=spoilt, reference_logprobs=spoilt)
    loss = policy.training_step(ghost)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in policy.own_parameters())


def test_training_mode_keeps_dropout_off_while_a_critic_has_it() -> None:
    backbone = small_backbone(["policy", "critic"], dropout=0.5)
    policy, critic = Policy(backbone), QCritic(backbone)
    move(critic.head.parameters())
    batch = conversations_batch(TALKS)
    with torch.no_grad():
        wanted = policy.eval()(batch)[0]
        critic.train()
        assert not torch.equal(critic(batch), critic(batch))
        policy.train()
        assert policy.training
        assert torch.equal(policy(batch)[0], wanted)
        critic.eval()
        assert torch.equal(critic(batch), critic(batch))


def test_a_plain_trainer_compares_the_same_network_too() -> None:
    backbone = small_backbone(["policy", "critic"], dropout=0.5)
    policy = Policy(backbone, learning_rate=0.0)
    with torch.no_grad():
        logprobs = policy.eval()(conversations_batch(TALKS))[0]
    QCritic(backbone).train()
    trainer = plain_trainer(epochs=1)
    trainer.fit(policy, DataLoader([improvement_batch(TALKS, behaviour_logprobs=logprobs)], batch_size=None))
    assert float(trainer.callback_metrics["policy/ratio_deviation"]) < 1e-5


def test_it_trains_in_a_plain_trainer_and_moves_its_role_alone() -> None:
    backbone = small_backbone(["policy", "critic", "reference"], moved=False)
    policy = Policy(backbone, learning_rate=1e-2)
    with watched(backbone) as moved:
        data = DataLoader([improvement_batch(TALKS[:3]), improvement_batch(TALKS[3:])], batch_size=None)
        plain_trainer(epochs=4).fit(policy, data)
    assert len(moved["policy"]) == len(backbone.parameters_of("policy")) > 10
    assert moved["critic"] == moved["reference"] == moved["base"] == []


def test_tokens_with_a_better_advantage_become_likelier() -> None:
    good, bad = talk("good", [[11, END]], [1.0]), talk("bad", [[8, END]], [0.0])
    policy = Policy(small_backbone(["policy"], moved=False), learning_rate=1e-2)
    batch = improvement_batch([good, bad])
    with torch.no_grad():
        before = policy(batch)[0]
    signed = batch.response_mask * torch.tensor([[1.0], [-1.0]])
    steps = [improvement_batch([good, bad], advantages=signed, behaviour_logprobs=before)] * 10
    plain_trainer(epochs=1).fit(policy, DataLoader(steps, batch_size=None))
    with torch.no_grad():
        change = (policy(batch)[0] - before).sum(1)
    assert change[0] > 0 > change[1]


def test_state_brings_another_policy_to_the_same_scores_and_another_bases_is_refused() -> None:
    first, second = Policy(small_backbone(["policy"])), Policy(small_backbone(["policy"], moved=False))
    batch = conversations_batch(TALKS)
    with torch.no_grad():
        assert not torch.equal(first(batch)[0], second(batch)[0])
        second.load_state(first.state())
        assert torch.equal(first(batch)[0], second(batch)[0])
    assert set(first.state()) == set(first.backbone.named_parameters_of("policy"))
    broken = first.state()
    broken.popitem()
    with pytest.raises(UserError, match="another base"):
        second.load_state(broken)


def test_a_negative_learning_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="learning_rate"):
        Policy(small_backbone(), learning_rate=-1.0)
