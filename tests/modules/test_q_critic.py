"""What the Q-critic reads, what it is fitted to, and what a fit moves."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import (
    END,
    USER,
    conversations_batch,
    move,
    plain_trainer,
    small_backbone,
    small_chat,
    some_talks,
    talk,
    watched,
)

from lightning_mtrl.batch import TurnFeatures
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.errors import UserError
from lightning_mtrl.modules.q_critic import QCritic
from lightning_mtrl.rollouts.datamodule import RolloutDataModule

TALKS = some_talks(6)
# The case H10: rewards 1, 0, 2, and three responses of very different lengths.
THREE = talk("three", [[4] * 4 + [END], [5] * 49 + [END], [6, END]], [1.0, 0.0, 2.0])
CHAIN = talk("chain", [[4, END], [5, END], [6, END]], [0.0, 0.0, 1.0])


def _critic(**settings: Any) -> QCritic:
    critic = QCritic(small_backbone(["critic", "policy"]), **settings)
    move(critic.head.parameters())
    return critic


def _fit(critic: QCritic, conversations: list[Conversation], steps: int, rate: float = 1e-2) -> None:
    batch = conversations_batch(conversations)
    critic.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    optimizer = torch.optim.AdamW(critic.own_parameters(), lr=rate, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        critic.training_step(batch).backward()
        optimizer.step()


@pytest.mark.parametrize("read", ["header", "end"])
@pytest.mark.parametrize("layer", [None, 1])
def test_all_turns_in_one_pass_equal_one_pass_for_each_prefix(read: Any, layer: int | None) -> None:
    critic = _critic(read=read, layer=layer, loss="mse")
    batch = conversations_batch([*TALKS, THREE])
    found = critic.values(batch)
    assert int(batch.turn_mask.sum()) == 15
    model = critic.backbone.causal("critic")
    for row, conversation in enumerate([*TALKS, THREE]):
        prefix = list(conversation.prompt_ids)
        for column, turn in enumerate(conversation.turns):
            read_at = [*prefix, *turn.response_ids, *([USER] if read == "header" else [])]
            with torch.no_grad():
                out = model(input_ids=torch.tensor([read_at]), output_hidden_states=True)
                hidden = out.hidden_states[-1 if layer is None else layer][0, -1]
                wanted = critic.head(critic.norm(hidden)).item()
            assert found[row, column].item() == pytest.approx(wanted, abs=1e-5)
            prefix += [*turn.response_ids, *turn.observation_ids]


def test_targets_are_discounted_by_turn_whatever_the_responses_lengths() -> None:
    critic = _critic(loss="mse", gamma=0.9)
    short = talk("short", [[4, END], [END], [6, END]], [1.0, 0.0, 2.0])
    batch = conversations_batch([THREE, short])
    targets = critic.targets(batch, torch.full((2, 3), 7.0))
    assert targets.tolist() == [pytest.approx([2.62, 1.8, 2.0])] * 2


@pytest.mark.parametrize(
    ("td_lambda", "wanted"), [(0.0, [1.36, 0.27, 2.0]), (0.5, [1.64575, 1.035, 2.0]), (1.0, [2.62, 1.8, 2.0])]
)
def test_less_than_monte_carlo_mixes_in_the_next_turns_value(td_lambda: float, wanted: list[float]) -> None:
    critic = _critic(loss="mse", gamma=0.9, td_lambda=td_lambda)
    targets = critic.targets(conversations_batch([THREE]), torch.tensor([[0.5, 0.4, 0.3]]))
    assert targets[0].tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("loss", ["bce", "mse", "hl_gauss"])
@pytest.mark.parametrize(("read", "layer"), [("header", None), ("end", None), ("header", 1)])
def test_a_critic_fits_known_returns(loss: str, read: Any, layer: int | None) -> None:
    critic = QCritic(small_backbone(), loss, gamma=0.5, read=read, layer=layer)
    good, bad = talk("good", [[4, END], [5, END]], [0.0, 1.0]), talk("bad", [[6, END], [7, END]], [0.0, 0.0])
    _fit(critic, [good, bad], steps=80)
    critic.eval()
    found = critic.values(conversations_batch([good, bad]))
    # HL-Gauss has bins of 1/51, and its cut moves the ends by 0.6 of a bin.
    assert found.flatten().tolist() == pytest.approx([0.5, 1.0, 0.0, 0.0], abs=0.04)


@pytest.mark.parametrize("loss", ["bce", "hl_gauss"])
@pytest.mark.parametrize(
    ("rewards", "found"), [([0.5, 1.0], "1.4 after its response 1"), ([0.5, -2.0], "-1.3")]
)
def test_returns_that_a_loss_is_not_for_are_refused(loss: str, rewards: list[float], found: str) -> None:
    critic = _critic(loss=loss, gamma=0.9)
    batch = conversations_batch([*TALKS, talk("odd", [[4, END], [5, END]], rewards)])
    whole = f"conversation 'odd' has return {found}.*loss '{loss}' needs .* 0 to 1.*use evaluation.loss mse"
    for step in (critic.training_step, critic.validation_step):
        with pytest.raises(UserError, match=whole):
            step(batch)
    assert math.isfinite(_critic(loss="mse", gamma=0.9).loss(batch).item())


def test_frozen_features_name_the_conversation_too() -> None:
    critic = _critic(trunk="frozen")
    batch = conversations_batch([*TALKS, talk("odd", [[4, END]], [3.0])])
    read = critic.read_base(batch)
    features = TurnFeatures(read, batch.turn_mask, batch.turn_rewards, batch.turn_weights, batch.ids)
    assert features.rows(slice(2, 4)).ids == features.rows(torch.tensor([2, 3])).ids == ("c-2", "c-3")
    with pytest.raises(UserError, match="conversation 'odd' has return 3 after its response 1"):
        critic.loss(features.rows(torch.tensor([0, 6])))


@pytest.mark.parametrize("loss", ["bce", "hl_gauss"])
def test_the_rounding_of_a_sum_and_turns_without_a_loss_are_no_reason_to_refuse(loss: str) -> None:
    critic = _critic(loss=loss, gamma=1.0)
    tenths = talk("tenths", [[4, END]] * 10, [0.1] * 10)
    before, after = talk("explored", [[4, END], [5, END]], [3.0, 1.0]).turns
    explored = replace(talk("explored", [[4, END]], [1.0]), turns=(before, replace(after, explored=True)))
    assert math.isfinite(critic.loss(conversations_batch([tenths, explored])).item())


def test_responses_in_the_same_state_are_told_apart() -> None:
    critic = QCritic(small_backbone())
    good, bad = talk("good", [[11, END]], [1.0]), talk("bad", [[8, END]], [0.0])
    _fit(critic, [good, bad], steps=60)
    found = critic.eval().values(conversations_batch([good, bad]))[:, 0]
    assert found.tolist() == pytest.approx([1.0, 0.0], abs=0.05)


@pytest.mark.parametrize("td_lambda", [0.0, 0.5])
def test_bootstrapped_targets_lead_to_the_same_values_in_a_chain(td_lambda: float) -> None:
    critic = QCritic(small_backbone(), "mse", gamma=0.9, td_lambda=td_lambda)
    _fit(critic, [CHAIN], steps=150)
    assert critic.eval().values(conversations_batch([CHAIN]))[0].tolist() == pytest.approx(
        [0.81, 0.9, 1.0], abs=0.03
    )


def test_turns_before_an_explored_one_carry_no_loss() -> None:
    plain = some_talks(3)[2]
    turns = (plain.turns[0], *(replace(turn, explored=True) for turn in plain.turns[1:]))
    critic = _critic(read="end")
    critic.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    losses = {}
    for name, conversation in (("explored", replace(plain, turns=turns)), ("plain", plain)):
        batch = conversations_batch([conversation])
        for reward in (0.0, 1.0):
            rewards = batch.turn_rewards.clone()
            rewards[0, 0] = reward
            losses[name, reward] = critic.training_step(replace(batch, turn_rewards=rewards)).item()
    assert losses["explored", 0.0] == losses["explored", 1.0]
    assert losses["plain", 0.0] != losses["plain", 1.0]


def _module(conversations: list[Conversation], **settings: Any) -> RolloutDataModule:
    return RolloutDataModule(conversations, tokenizer=small_chat(), batch_size=4, **settings)


@pytest.mark.parametrize(("loss", "td_lambda"), [("bce", 1.0), ("mse", 0.5), ("hl_gauss", 1.0)])
def test_it_trains_in_a_plain_trainer_and_moves_its_role_alone(loss: str, td_lambda: float) -> None:
    backbone = small_backbone(["policy"])
    critic = QCritic(backbone, loss, td_lambda=td_lambda, learning_rate=1e-2)
    heads = {name: p.detach().clone() for name, p in critic.named_parameters() if "backbone" not in name}
    trainer = plain_trainer(epochs=4)
    with watched(backbone) as moved:
        trainer.fit(critic, datamodule=_module(some_talks(12)))
    assert len(moved["critic"]) == len(backbone.parameters_of("critic")) > 10
    assert moved["policy"] == moved["base"] == []
    assert set(heads) == {"norm.weight", "norm.bias", "head.0.weight", "head.0.bias"}
    assert all(not torch.equal(critic.get_parameter(name), value) for name, value in heads.items())
    assert float(trainer.callback_metrics["critic/q_loss"]) >= 0


def test_a_plain_trainer_finds_what_decides_the_outcome() -> None:
    critic = QCritic(small_backbone(), gamma=1.0, learning_rate=1e-2)
    plain_trainer(epochs=12).fit(critic, datamodule=_module(some_talks(24)))
    held_out = [talk("x", [[11, 9, END]], [1.0]), talk("y", [[8, 9, END]], [0.0])]
    good, bad = critic.eval().values(conversations_batch(held_out))[:, 0].tolist()
    assert good > 0.8
    assert bad < 0.2


@pytest.mark.parametrize("batch_size", [1, 2])
def test_the_held_out_loss_is_the_mean_over_turns_however_they_are_batched(batch_size: int) -> None:
    critic = QCritic(small_backbone(), loss="mse", gamma=1.0)
    data = RolloutDataModule(some_talks(2), tokenizer=small_chat(), batch_size=batch_size)
    data.validation_conversations = [
        talk("won", [[4, END]], [1.0]),
        talk("lost", [[4, END]] * 7, [0.0] * 7),
    ]
    (report,) = plain_trainer(epochs=1).validate(critic, datamodule=data, verbose=False)
    # A fresh critic says 0 of every turn: one squared error of 1, and seven of 0.
    assert report["critic/q_loss"] == pytest.approx(1 / 8, abs=1e-6)


def test_a_fresh_critic_knows_nothing() -> None:
    critic = QCritic(small_backbone())
    (report,) = plain_trainer(epochs=1).validate(critic, datamodule=_module(TALKS), verbose=False)
    assert report["critic/q_loss"] == pytest.approx(math.log(2), abs=1e-5)


def test_state_brings_another_critic_to_the_same_values() -> None:
    first, second = _critic(), QCritic(small_backbone())
    batch = conversations_batch(TALKS)
    assert not torch.equal(first.values(batch), second.values(batch))
    second.load_state(first.state())
    assert torch.equal(first.values(batch), second.values(batch))
    heads = {name for name in first.state() if name.startswith("head.")}
    assert heads == {"head.norm.weight", "head.norm.bias", "head.head.0.weight", "head.head.0.bias"}
    kept = first.state()
    _fit(first, TALKS, steps=1)
    assert any(not torch.equal(kept[name], value) for name, value in first.state().items())


@pytest.mark.parametrize("trunk", ["adapter", "frozen"])
def test_a_state_that_lacks_the_head_or_has_another_one_is_refused(trunk: Any) -> None:
    def critic(head_units: int = 0, trunk: Any = trunk) -> QCritic:
        return QCritic(small_backbone(), trunk=trunk, head_units=head_units)

    state = critic().state()
    headless = {name: weights for name, weights in state.items() if not name.startswith("head.")}
    with pytest.raises(UserError, match=r"'QCritic'.*4 are missing \(the first is 'head\.head\.0\.bias'\)"):
        critic().load_state(headless)
    more = {**state, "head.head.9.bias": torch.zeros(1)}
    with pytest.raises(UserError, match=r"1 are not expected \(the first is 'head\.head\.9\.bias'\)"):
        critic().load_state(more)
    with pytest.raises(UserError, match=r"2 are missing .*2 have another shape"):
        critic(head_units=8).load_state(state)
    if trunk == "adapter":
        with pytest.raises(UserError, match="are not expected"):
            critic(trunk="frozen").load_state(state)


@pytest.mark.parametrize("head_units", [0, 8])
def test_a_frozen_trunk_reads_the_base_and_trains_the_head_alone(head_units: int) -> None:
    backbone = small_backbone(["policy"])
    critic = QCritic(backbone, trunk="frozen", head_units=head_units, learning_rate=1e-2)
    heads = [parameter.detach().clone() for parameter in critic.own_parameters()]
    assert len(heads) == (6 if head_units else 4)
    with watched(backbone) as moved:
        plain_trainer(epochs=4).fit(critic, datamodule=_module(some_talks(12)))
    assert backbone.roles == ["policy"]
    assert all(names == [] for names in moved.values())
    assert all(not torch.equal(a, b) for a, b in zip(heads, critic.own_parameters(), strict=True))
    assert all(name.startswith("head.") for name in critic.state())


def test_what_a_frozen_trunk_reads_can_be_computed_once() -> None:
    critic = _critic(trunk="frozen", head_units=8, td_lambda=0.5)
    critic.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    batch = conversations_batch(TALKS)
    read = critic.read_base(batch)
    features = TurnFeatures(read, batch.turn_mask, batch.turn_rewards, batch.turn_weights, batch.ids)
    assert len(features) == len(TALKS)
    with torch.no_grad():
        assert torch.equal(critic(features), critic(batch))
    inputs = critic.own_parameters()
    from_tokens = torch.autograd.grad(critic.training_step(batch), inputs)
    from_features = torch.autograd.grad(critic.training_step(features), inputs)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(from_tokens, from_features, strict=True))
    model = critic.backbone.causal("base")
    prefix = [*TALKS[0].prompt_ids, *TALKS[0].turns[0].response_ids, USER]
    with torch.no_grad():
        plain = model(input_ids=torch.tensor([prefix]), output_hidden_states=True).hidden_states[-1][0, -1]
    assert torch.allclose(features.features[0, 0], plain, atol=1e-5)


def test_a_frozen_trunk_tells_responses_apart() -> None:
    critic = QCritic(small_backbone(), trunk="frozen", head_units=16)
    good, bad = talk("good", [[11, END]], [1.0]), talk("bad", [[8, END]], [0.0])
    _fit(critic, [good, bad], steps=100)
    found = critic.eval().values(conversations_batch([good, bad]))[:, 0]
    assert found.tolist() == pytest.approx([1.0, 0.0], abs=0.05)
