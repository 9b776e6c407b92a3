"""The implicit PRM: where it starts, what it scores, what it learns from, and what it finds."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from lightning import Trainer
from small_models import (
    END,
    conversations_batch,
    move,
    plain_trainer,
    small_backbone,
    small_chat,
    some_talks,
    talk,
    watched,
)
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mtrl import ImplicitPRM, RolloutDataModule, objectives
from lightning_mtrl.batch import ConversationBatch, ReferencedBatch
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.errors import UserError
from lightning_mtrl.models import chunked_head, logprobs

TALKS = some_talks(8)
GOOD, BAD = 11, 8


def referenced(batch: ConversationBatch, logprobs: torch.Tensor) -> ReferencedBatch:
    shared = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return ReferencedBatch(**shared, reference_logprobs=logprobs)


def quiet(prm: ImplicitPRM) -> ImplicitPRM:
    prm.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return prm


def test_it_starts_as_the_policy_and_not_as_the_base_so_all_rewards_are_zero() -> None:
    backbone = small_backbone(["policy"])
    prm = ImplicitPRM(backbone)
    batch = conversations_batch(TALKS)
    assert not prm.rewards(batch).any()
    assert not prm.train().rewards(batch).any()
    with torch.no_grad():
        scored = prm.reference_logprobs(batch)
        from_base = ImplicitPRM(small_backbone(["policy"], moved=False)).reference_logprobs(batch)
    assert not torch.equal(scored, from_base)
    assert not any(p.requires_grad for p in backbone.parameters_of("initial"))
    # A policy that has moved on takes neither of the two with it.
    move(backbone.parameters_of("policy"), seed=9)
    assert not prm.rewards(batch).any()


def test_dropout_does_not_disturb_the_ratio() -> None:
    prm = ImplicitPRM(small_backbone(["policy"], dropout=0.5))
    assert not prm.train().rewards(conversations_batch(TALKS)).any()
    assert prm.training


def test_without_a_policy_to_start_from_it_is_refused() -> None:
    with pytest.raises(ValueError, match="no role 'policy'"):
        ImplicitPRM(small_backbone(["critic"]))
    with pytest.raises(ValueError, match="beta is 0"):
        ImplicitPRM(small_backbone(["policy"]), beta=0.0)
    with pytest.raises(ValueError, match="unknown PRM loss 'mse'"):
        ImplicitPRM(small_backbone(["policy"]), loss="mse")


def test_many_conversations_at_once_are_scored_as_each_alone() -> None:
    prm = ImplicitPRM(small_backbone(["policy"]), beta=0.7)
    move(prm.own_parameters())
    together = prm.rewards(conversations_batch(TALKS))
    assert together.abs().max() > 0.01
    for row, conversation in enumerate(TALKS):
        alone = prm.rewards(conversations_batch([conversation]))
        assert torch.allclose(together[row, : alone.size(1)], alone[0], atol=1e-5)
        assert not together[row, alone.size(1) :].any()


def test_scores_are_beta_times_the_log_ratio_of_two_language_models() -> None:
    backbone = small_backbone(["policy"])
    prm = ImplicitPRM(backbone, beta=0.3)
    move(prm.own_parameters())
    batch = conversations_batch(TALKS)
    total = torch.zeros(len(TALKS))
    with torch.no_grad():
        for role, sign in (("prm", 1), ("initial", -1)):
            logits = backbone.causal(role)(batch.input_ids, attention_mask=batch.attention_mask).logits
            found = logits.log_softmax(-1)[:, :-1].gather(2, batch.input_ids[:, 1:, None]).squeeze(2)
            total += sign * (found * batch.response_mask[:, 1:]).sum(1)
        assert torch.allclose(prm.scores(batch), 0.3 * total, atol=1e-4)


def test_only_positions_that_predict_a_sampled_token_meet_the_output_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backbone = small_backbone(["policy"])
    prm = ImplicitPRM(backbone)
    batch = conversations_batch(TALKS)
    rows: list[int] = []

    def counted(hidden: Tensor, *rest: Any) -> Any:
        rows.append(len(hidden))
        return chunked_head.head_logprobs(hidden, *rest)

    monkeypatch.setattr(logprobs, "head_logprobs", counted)
    prm.rewards(batch)
    assert rows == [int(batch.response_mask.sum())] * 2


def test_what_pi_0_has_scored_already_is_not_scored_again() -> None:
    prm = ImplicitPRM(small_backbone(["policy"]))
    move(prm.own_parameters())
    batch = conversations_batch(TALKS)
    wanted = prm.rewards(batch)
    known = referenced(batch, prm.reference_logprobs(batch))
    move(prm.backbone.parameters_of("initial"))
    assert torch.equal(prm.rewards(known), wanted)
    assert torch.equal(prm.rewards(known.rows(slice(2, 5)))[:, :9], wanted[2:5, :9])


@pytest.mark.parametrize("size", [1, 3, 8])
def test_the_cross_entropy_does_not_depend_on_how_a_step_is_cut(size: int) -> None:
    prm = quiet(ImplicitPRM(small_backbone(["policy"]), beta=0.5))
    move(prm.own_parameters())
    batch = conversations_batch(TALKS)
    parts = [batch.rows(slice(start, start + size)) for start in range(0, len(batch), size)]
    loss = sum(prm.training_step(part) for part in parts)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    got = [p.grad.clone() for p in prm.own_parameters() if p.grad is not None]
    prm.zero_grad()
    scores = prm.scores(batch)
    wanted = torch.nn.functional.binary_cross_entropy_with_logits(scores, batch.outcome)
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), abs=1e-6)
    for ours, theirs in zip(got, [p.grad for p in prm.own_parameters()], strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("outcome", [1.5, -0.1, float("nan")])
def test_outcomes_that_are_no_probability_are_refused_by_the_cross_entropy_alone(outcome: float) -> None:
    batch = conversations_batch(TALKS)
    batch = replace(batch, outcome=torch.cat([batch.outcome[:3], torch.tensor([outcome]), batch.outcome[4:]]))
    with pytest.raises(UserError, match=r"'c-3' has outcome .* from 0 to 1"):
        quiet(ImplicitPRM(small_backbone(["policy"]))).training_step(batch)
    assert quiet(ImplicitPRM(small_backbone(["policy"]), loss="pairwise")).training_step(batch).isfinite()


@pytest.mark.parametrize("loss", ["ce", "pairwise"])
def test_it_trains_in_a_plain_trainer_and_moves_its_role_alone(loss: str) -> None:
    backbone = small_backbone(["policy", "critic"])
    prm = ImplicitPRM(backbone, beta=0.5, loss=loss, learning_rate=1e-2)
    data = RolloutDataModule(TALKS, tokenizer=small_chat(), batch_size=8, validation_share=0.2)
    trainer: Trainer = plain_trainer(epochs=8)
    with watched(backbone) as moved:
        trainer.fit(prm, datamodule=data)
    assert len(moved["prm"]) == len(backbone.parameters_of("prm")) > 10
    assert moved["policy"] == moved["initial"] == moved["critic"] == moved["base"] == []
    assert float(trainer.callback_metrics["prm/loss"]) < 0.6
    assert {"prm/loss", "prm/validation_loss"} <= set(trainer.callback_metrics)
    assert set(prm.latest_scores) == {c.id for c in data.train_conversations}


def pivotal_talks(number: int, shuffled: bool) -> tuple[list[Conversation], list[int]]:
    """Four turns of neutral words; in one of them, drawn at random, a word decides the outcome."""
    rng = random.Random(3)
    outcomes = [i % 2 for i in range(number)]
    told = rng.sample(outcomes, number) if shuffled else outcomes
    pivots = [rng.randrange(4) for _ in range(number)]
    found = []
    for i, pivot in enumerate(pivots):
        turns = [[rng.choice([4, 5, 6]), rng.choice([4, 5, 6]), END] for _ in range(4)]
        turns[pivot][1] = GOOD if outcomes[i] else BAD
        found.append(talk(f"p-{i}", turns, [0.0, 0.0, 0.0, float(told[i])]))
    return found, pivots


@pytest.mark.parametrize("shuffled", [False, True])
def test_the_turn_that_decided_the_outcome_gets_the_largest_weight(shuffled: bool) -> None:
    """With outcomes that were shuffled it is found no more often than one turn of four."""
    talks, pivots = pivotal_talks(96, shuffled)
    prm = quiet(ImplicitPRM(small_backbone(["policy"], moved=False), beta=1.0, learning_rate=2e-2))
    optimizer = prm.configure_optimizers()
    batch = conversations_batch(talks)
    for step in range(60):
        chosen = torch.randperm(96, generator=torch.Generator().manual_seed(step))[:32]
        part = batch.rows(chosen)
        loss = prm.training_step(replace(part, conversation_weights=torch.full((32,), 1 / 32)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    sums = objectives.turn_sums(prm.rewards(batch), batch.turn_index)
    weights = objectives.norm_itpo_weights(sums, batch.turn_mask, 0.4)
    success = batch.outcome == 1 if shuffled else torch.arange(96) % 2 == 1
    found = (weights.argmax(1) == torch.tensor(pivots))[success].float().mean().item()
    # Chance is 0.25; of 48 conversations more than 0.45 happens once in 1000.
    assert (found < 0.45) if shuffled else (found > 0.9)


def test_a_short_last_batch_weighs_as_many_conversations_as_it_has() -> None:
    prm = ImplicitPRM(small_backbone(["policy"]), beta=0.5)
    move(prm.backbone.parameters_of(prm.role))
    batches = [conversations_batch(TALKS[:7]), conversations_batch(TALKS[7:])]
    (found,) = plain_trainer(1).validate(prm, DataLoader(batches, batch_size=None), verbose=False)
    with torch.no_grad():
        scores = torch.cat([prm.scores(batch) for batch in batches])
    outcomes = torch.cat([batch.outcome for batch in batches])
    expected = torch.nn.functional.binary_cross_entropy_with_logits(scores, outcomes)
    assert found["prm/validation_loss"] == pytest.approx(expected.item(), abs=1e-6)
