"""What the policy scores, what its loss is, and what a step of it moves."""

from __future__ import annotations

import math

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

from lightning_mtrl.errors import UserError
from lightning_mtrl.modules.policy import KLTerm, Policy
from lightning_mtrl.modules.q_critic import QCritic

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
