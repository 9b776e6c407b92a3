"""Stored log-probabilities are the trainer's, whatever was drawn how; where they are not, that is mended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import move, small_backbone, small_context, some_talks, talk

from lightning_mtrl.algorithms import ITPO
from lightning_mtrl.algorithms.agreement import BehaviourCheck, differences
from lightning_mtrl.algorithms.base import Improvement
from lightning_mtrl.algorithms.estimators import RLOO
from lightning_mtrl.algorithms.improvement_config import ImprovementConfig
from lightning_mtrl.algorithms.passes import of_similar_length
from lightning_mtrl.algorithms.policy_improvement import SingleTurnImprover
from lightning_mtrl.algorithms.stepping import Stepper
from lightning_mtrl.assembly import Parts, assemble, build_backbone
from lightning_mtrl.batch import collate
from lightning_mtrl.config import ClassSpec, DataConfig, ModelConfig, RunConfig
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.modules.policy import Policy
from lightning_mtrl.modules.q_critic import QCritic
from lightning_mtrl.rollouts.datamodule import State
from lightning_mtrl.rollouts.engine import SampledResponse, sample_groups
from lightning_mtrl.rollouts.groups import Glue, group_batch
from lightning_mtrl.rollouts.sampling import SamplingConfig

SAMPLINGS = [{"temperature": 0.7}, {"top_p": 0.9}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20}]


def _parts(settings: dict[str, Any] | None = None, **sampling: float) -> Parts:
    given: dict[str, Any] = {
        "conversations": 24, "group_size": 4, "max_turns": 8, "max_response_tokens": 12,
        "validation_share": 0.0,
    }  # fmt: skip
    algorithm = {
        "credit": {"class_path": "lightning_mtrl.credit.Outcome"},
        "settings": {"learning_rate": 1e-3, "minibatch_groups": 2, **(settings or {})},
    }
    config = RunConfig(
        model=ModelConfig(context_length=384, lora_rank=4),
        environment=ClassSpec("lightning_mtrl.environments.SuggestedResponse", {"size": "tiny"}),
        data=DataConfig(**given, **sampling),  # type: ignore[arg-type]  # numbers of both kinds
        algorithm=ClassSpec("lightning_mtrl.algorithms.ITPO", algorithm),
    )
    return assemble(config, show_progress=False)


def _collect(parts: Parts) -> list[Conversation]:
    with parts.backbone.sampling("policy") as model:
        return parts.collector.collect(model, conversations=24, seed=0, policy="iteration-0000").conversations


def _improved(settings: dict[str, Any], change: Callable[[Conversation], Conversation]) -> tuple[Any, ...]:
    """An iteration of ITPO whose stored log-probabilities were changed: figures, weights, what was said."""
    parts = _parts(settings)
    said: list[str] = []
    parts.context.say = said.append
    rollouts = [change(conversation) for conversation in _collect(parts)]
    parts.context.datamodule.set_rollouts(rollouts, seed=0)
    improvement: Improvement = parts.algorithm.improve(rollouts, parts.algorithm.evaluate(rollouts))
    weights = torch.cat([w.flatten() for w in parts.backbone.state_of("policy").values()])
    return improvement.metrics, weights, said


def _off(by: float) -> Callable[[Conversation], Conversation]:
    def changed(conversation: Conversation) -> Conversation:
        turns = (
            replace(turn, behaviour_logprobs=tuple(logprob + by for logprob in turn.behaviour_logprobs))
            for turn in conversation.turns
        )
        return replace(conversation, turns=tuple(turns))

    return changed


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_every_stored_logprob_is_the_trainers(sampling: dict[str, Any]) -> None:
    parts = _parts(**sampling)
    move(parts.backbone.parameters_of("policy"), by=0.02)
    batch = collate(_collect(parts), parts.context.chat.pad_id, parts.context.chat.header_ids)
    assert isinstance(parts.algorithm, ITPO)
    policy: Policy = parts.algorithm.policy_stepper.module.module
    policy.train()
    with torch.no_grad():
        measured = differences(batch, policy.logprobs(batch))
    assert batch.response_mask.sum() > 300
    assert batch.behaviour_logprobs.min() < -1.0
    assert measured["behaviour_difference_max"] <= 1e-4


@pytest.mark.real_lm
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_every_stored_logprob_of_a_real_model_is_the_trainers(
    smollm2_folder: Path, sampling: dict[str, Any]
) -> None:
    backbone, chat = build_backbone(ModelConfig(name=str(smollm2_folder)))
    move(backbone.parameters_of("policy"), by=0.01)
    asked = ("Name a colour.", "What is a printer good for, and who invented it?", "Count to ten.")
    prompts = [
        chat.tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
        for text in asked
    ]
    with backbone.sampling("policy") as model:
        responses = sample_groups(
            model, prompts, 2, sampling=SamplingConfig(max_response_tokens=24, **sampling),
            end_ids=chat.end_ids, pad_id=chat.pad_id, seed=1,
        )  # fmt: skip
    batch = group_batch(prompts, responses, Glue(chat.pad_id, chat.end_id, tuple(chat.header_ids)))
    policy = Policy(backbone)
    policy.train()
    with torch.no_grad():
        measured = differences(batch, policy.logprobs(batch))
    assert batch.response_mask.sum() > 60
    assert measured["behaviour_difference_max"] <= 1e-4


def test_stored_logprobs_that_agree_serve_as_old_ones() -> None:
    metrics, _, said = _improved({}, lambda conversation: conversation)
    assert metrics["behaviour_recomputed"] == 0.0
    assert 0 < metrics["behaviour_difference_mean"] <= metrics["behaviour_difference_max"] < 1e-4
    assert abs(metrics["behaviour_kl"]) < 1e-6
    assert not said


def test_itpo_learns_the_same_from_wrong_stored_logprobs_because_it_computes_them_anew() -> None:
    _, wanted, _ = _improved({}, lambda conversation: conversation)
    metrics, mended, said = _improved({}, _off(0.5))
    _, misled, _ = _improved({"max_logprob_difference": None}, _off(0.5))
    assert metrics["behaviour_recomputed"] == 1.0
    assert metrics["behaviour_difference_max"] == pytest.approx(0.5, abs=1e-3)
    # k3 of a constant log-ratio of one half: exp(-0.5) - 1 + 0.5.
    assert metrics["behaviour_kl"] == pytest.approx(0.106531, abs=1e-4)
    assert len(said) == 1
    assert "max_logprob_difference (0.05)" in said[0]
    # Adam's first steps have the size of the learning rate, 1e-3, whatever the gradient.
    assert torch.allclose(mended, wanted, atol=1e-4)
    assert not torch.allclose(misled, wanted, atol=1e-3)


def test_iterative_ppo_computes_them_anew_in_its_rounds_too() -> None:
    backbone = small_backbone(["policy", "reference", "critic"])
    context, said = small_context(backbone), list[str]()
    context.say = said.append
    stepper = Stepper(context, Policy(backbone), 1.0, None)
    improver = SingleTurnImprover(
        ImprovementConfig(samples=2), RLOO(), QCritic(backbone), stepper, None, context
    )
    states = [[5, 9, 2, 3], [5, 9, 9, 2, 3]]
    wrong = [[SampledResponse((7, 8, 2), (-9.0,) * 3, True), SampledResponse((4, 2), (-9.0,) * 2, True)]] * 2
    for _ in range(2):
        scored = improver.score([State(tuple(ids), "c", 1, "c") for ids in states], wrong)
        batch, metrics = improver.prepare(scored)
        assert metrics["behaviour_recomputed"] == 1.0
    assert len(said) == 1
    for row, (state, group) in enumerate(zip(states, wrong, strict=True)):
        kept = batch.behaviour_logprobs[row][batch.response_mask[row]]
        wanted = []
        for response in group:
            ids = torch.tensor([[*state, *response.ids]])
            with torch.no_grad():
                logprobs = backbone.causal("policy")(input_ids=ids).logits[0].log_softmax(-1)
            places = range(len(state) - 1, ids.size(1) - 1)
            wanted += [float(logprobs[place, ids[0, place + 1]]) for place in places]
        assert torch.allclose(kept, torch.tensor(wanted), atol=1e-5)


def test_only_a_sample_is_scored_where_all_is_well() -> None:
    backbone = small_backbone(["policy"])
    policy = Policy(backbone)
    check = BehaviourCheck(small_context(backbone), policy, 0.05, rows=3)
    talks = some_talks(8)
    batch = collate(talks, 0, (1,))
    with torch.no_grad():
        batch = replace(batch, behaviour_logprobs=policy.logprobs(batch))
    scored: list[int] = []

    def passes(part: Any) -> Any:
        scored.append(len(part))
        return of_similar_length(part)

    found, metrics = check.agreed(batch, passes)
    assert found is batch
    assert metrics["behaviour_recomputed"] == 0.0
    assert scored == [3]


def test_differences_of_a_hand_computed_case() -> None:
    batch = collate([talk("a", [[4, 2]], [1.0])], 0, (1,))
    logprobs = torch.where(batch.response_mask, -1.0, 7.0)
    logprobs[0, int(batch.response_mask[0].nonzero()[0])] = -1.1
    found = differences(batch, logprobs)
    assert found["behaviour_difference_max"] == pytest.approx(0.1, abs=1e-6)
    assert found["behaviour_difference_mean"] == pytest.approx(0.05, abs=1e-6)
    assert found["behaviour_kl"] == pytest.approx(0.00241871, abs=1e-7)
