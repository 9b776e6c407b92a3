"""ITPO on the embedded model: every credit with every estimator, its numbers, its limits, and resuming."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from whole_runs import end_with_the_test

from lightning_mtrl import cli
from lightning_mtrl.algorithms import ITPO
from lightning_mtrl.algorithms.base import Improvement, Signal
from lightning_mtrl.algorithms.passes import of_similar_length
from lightning_mtrl.assembly import Parts, assemble
from lightning_mtrl.batch import collate
from lightning_mtrl.config import ClassSpec, DataConfig, ModelConfig, RunConfig
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.errors import UserError
from lightning_mtrl.runs.checkpoint import load_checkpoint

CREDIT, ESTIMATORS = "lightning_mtrl.credit", "lightning_mtrl.algorithms.conversation_estimators"
PRM = {"beta": 0.5, "learning_rate": 1e-3, "minibatch_groups": 2}


def spec(name: str, home: str = CREDIT, **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"{home}.{name}", "init_args": arguments}


def parts_of(
    credit: dict[str, Any] | None = None,
    estimator: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    prm: dict[str, Any] | None = None,
    **settings: Any,
) -> Parts:
    given = {"conversations": 24, "group_size": 4, "max_turns": 8, "max_response_tokens": 12}
    config = RunConfig(
        model=ModelConfig(context_length=384, lora_rank=4),
        environment=ClassSpec("lightning_mtrl.environments.SuggestedResponse", {"size": "tiny"}),
        data=DataConfig(**{**given, "validation_share": 0.0, **(data or {})}),
        algorithm=ClassSpec(
            "lightning_mtrl.algorithms.ITPO",
            {
                "credit": credit or spec("NormITPO"),
                "estimator": estimator or spec("RLOO", ESTIMATORS),
                "prm": {**PRM, **(prm or {})},
                "settings": {"learning_rate": 1e-3, "minibatch_groups": 2, **settings},
            },
        ),
    )
    return assemble(config, show_progress=False)


def collect(parts: Parts, seed: int = 0) -> list[Conversation]:
    with parts.backbone.sampling("policy") as model:
        rollouts = parts.collector.collect(
            model, conversations=parts.config.data.conversations, seed=seed, policy="iteration-0000"
        )
    return rollouts.conversations


def step(parts: Parts, conversations: list[Conversation] | None = None) -> tuple[Signal, Improvement]:
    found = conversations or collect(parts)
    parts.context.datamodule.set_rollouts(found, seed=0)
    signal = parts.algorithm.evaluate(found)
    return signal, parts.algorithm.improve(found, signal)


def weights(parts: Parts, role: str = "policy") -> torch.Tensor:
    return torch.cat([w.flatten() for w in parts.backbone.state_of(role).values()])


CREDITS = [
    spec("Outcome"),
    spec("TrajectoryShare"),
    spec("Uniform"),
    spec("Dirichlet"),
    spec("PRIME", prescale="batch_max"),
    spec("ITPO"),
    spec("NormITPO", aggregate="mean_scaled", prescale="batch_max"),
    spec("LLMJudge", judge={"class_path": "scripted_judge.EarlyTurns"}),
]
ESTIMATED = [
    spec("RLOO", ESTIMATORS, form="released"),
    spec("GRPO", ESTIMATORS, by_turn=True),
    spec("GAE", ESTIMATORS),
    spec("REINFORCE", ESTIMATORS),
]


@pytest.mark.parametrize(
    ("credit", "estimator"),
    [*((c, None) for c in CREDITS), *((spec("NormITPO"), e) for e in ESTIMATED)],
    ids=lambda s: s and s["class_path"].rpartition(".")[2],
)
def test_every_credit_and_every_estimator_moves_the_policy(
    credit: dict[str, Any], estimator: dict[str, Any] | None
) -> None:
    parts = parts_of(credit, estimator)
    before, initial = weights(parts), weights(parts, "initial")
    signal, improvement = step(parts)
    assert not torch.equal(weights(parts), before)
    assert torch.equal(weights(parts, "initial"), initial)
    assert torch.equal(initial, before)
    assert improvement.accepted
    assert {"outcome", "zero_variance_groups"} <= set(signal.metrics)
    agreement = {f"behaviour_{name}" for name in ("difference_max", "difference_mean", "kl", "recomputed")}
    measured = {"kl", "response_tokens", "turns", "advantage_std", "left_out"}
    assert measured | agreement == set(improvement.metrics)
    assert (improvement.metrics["left_out"] > 0) == (signal.metrics.get("judge_failures", 0) > 0)
    assert all(math.isfinite(value) for value in improvement.metrics.values())
    assert abs(improvement.metrics["kl"]) < 1e-3  # the first rollouts are those of pi_0


def test_the_first_step_compares_the_policy_with_itself() -> None:
    """Behaviour log-probs of the sampler are the old log-probs, in whole conversations too."""
    parts = parts_of(minibatch_groups=6)
    logged: dict[str, float] = {}
    policy = parts.algorithm.policy_stepper.module.module
    policy.log = lambda name, value, **kwargs: logged.setdefault(name, float(value))
    step(parts)
    assert logged["policy/ratio_deviation"] < 1e-3
    assert logged["policy/clip_fraction_token"] == logged["policy/clip_fraction_turn"] == 0.0


def test_an_update_does_not_depend_on_how_steps_are_cut() -> None:
    states = []
    for size in (None, 3):
        parts = parts_of(prm={"micro_batch_size": size}, micro_batch_size=size)
        step(parts)
        states.append(torch.cat([weights(parts), weights(parts, "prm")]))
    assert torch.allclose(states[0], states[1], atol=2e-4)


def test_outcomes_that_clamping_makes_alike_are_told_once_and_count_as_alike() -> None:
    parts = parts_of(spec("Outcome"), outcome_weight=1.0)
    said: list[str] = []
    parts.context.say = said.append
    grades = [replace(c, outcome=(2.0, 7.0, 9.0, 3.0)[n % 4]) for n, c in enumerate(collect(parts))]
    for _ in range(2):
        parts.context.datamodule.set_rollouts(grades)
        signal = parts.algorithm.evaluate(grades)
        assert signal.metrics["zero_variance_groups"] == 1.0
        assert signal.metrics["outcome"] == pytest.approx(5.25)
    assert sum("24 of 24 outcomes lie outside [-1, 1]" in text for text in said) == 1
    assert sum("all 24 outcomes are 1, so none" in text for text in said) == 2
    parts = parts_of(spec("Outcome"), outcome_weight=1.0, clamp=False)
    parts.context.say = said.append
    del said[:]
    parts.context.datamodule.set_rollouts(grades)
    assert parts.algorithm.evaluate(grades).metrics["zero_variance_groups"] == 0.0
    assert not said


def test_equal_outcomes_in_every_group_move_the_policy_by_kl_and_entropy_alone() -> None:
    parts = parts_of(spec("Outcome"), token_penalty=0.0, kl_coef=0.0, entropy_coef=0.0)
    same = [replace(c, outcome=1.0) for c in collect(parts)]
    before = weights(parts)
    signal, improvement = step(parts, same)
    assert signal.metrics["zero_variance_groups"] == 1.0
    assert improvement.metrics["advantage_std"] == 0.0
    assert torch.equal(weights(parts), before)


def test_conversations_that_are_alone_in_their_group_are_left_out_where_others_are_needed() -> None:
    parts = parts_of()
    found = [replace(c, group=99) if place == 0 else c for place, c in enumerate(collect(parts))]
    _, improvement = step(parts, found)
    assert improvement.metrics["left_out"] == 1
    parts = parts_of(estimator=spec("REINFORCE", ESTIMATORS))
    _, improvement = step(parts, found)
    assert improvement.metrics["left_out"] == 0


def test_conversations_without_an_outcome_are_no_part_of_the_update() -> None:
    """Five of 24 are gone, so groups have different sizes and a batch divides by none of them."""
    parts = parts_of()
    found = collect(parts)
    gone = [replace(c, outcome=None, terminated=False, truncated=True) for c in found[:5]]
    signal, improvement = step(parts, [*gone, *found[5:]])
    assert signal.metrics["outcome"] == pytest.approx(sum(c.outcome or 0.0 for c in found[5:]) / 19)
    assert improvement.metrics["turns"] == pytest.approx(sum(len(c.turns) for c in found[5:]) / 19)


def test_shares_of_an_outcome_beyond_one_are_shares_of_one() -> None:
    parts = parts_of(spec("Uniform"))
    found = [replace(c, outcome=(3.0, -2.0, 0.5)[place % 3]) for place, c in enumerate(collect(parts))]
    signal, _ = step(parts, found)
    credited = parts.algorithm.credited
    shared = credited.credit.rewards.sum(1).tolist()
    wanted = {3.0: 1.0, -2.0: -1.0, 0.5: 0.5}
    assert shared == pytest.approx([wanted[c.outcome or 0.0] for c in credited.fresh.conversations])
    assert signal.metrics["outcome"] == pytest.approx(0.5)


@pytest.mark.parametrize("clip", [None, 3.0])
def test_the_value_head_has_the_clip_range_of_the_configuration(clip: float | None) -> None:
    estimator = spec("GAE", ESTIMATORS)
    assert parts_of(estimator=estimator).algorithm.value_stepper.module.module.clip_range == 0.2
    changed = parts_of(estimator=estimator, value_clip_range=clip)
    assert changed.algorithm.value_stepper.module.module.clip_range == clip
    with pytest.raises(UserError, match=r"settings\.value_clip_range is 0\.0"):
        parts_of(value_clip_range=0.0)


def test_a_held_out_share_is_kept_from_the_prm_and_trains_the_policy() -> None:
    parts = parts_of(data={"validation_share": 0.3})
    signal, improvement = step(parts)
    data = parts.context.datamodule
    prm = parts.algorithm.credit.module
    assert set(prm.latest_scores) == {c.id for c in data.train_conversations}
    assert len(data.validation_conversations) > 2
    assert len(parts.algorithm.credited.fresh.conversations) == 24
    assert math.isfinite(signal.metrics["prm_loss"])
    assert improvement.metrics["left_out"] == 0


def test_turn_values_are_the_rewards_that_people_see_beside_the_turns() -> None:
    parts = parts_of()
    found = collect(parts)
    unknown = replace(found[0], outcome=None, terminated=False, truncated=True)
    values = parts.algorithm.turn_values([unknown, *found[1:4]])
    assert values is not None
    assert all(math.isnan(value) for value in values[0])
    for rewards, conversation in zip(values[1:], found[1:4], strict=True):
        assert len(rewards) == len(conversation.turns)
        assert sum(rewards) == pytest.approx(conversation.outcome)


def test_groups_of_one_are_refused_before_anything_is_sampled() -> None:
    for name in ("RLOO", "GRPO"):
        with pytest.raises(UserError, match=rf"data\.group_size is 1, .* at least 2 with {name}"):
            parts_of(estimator=spec(name, ESTIMATORS), data={"group_size": 1})
    parts_of(estimator=spec("REINFORCE", ESTIMATORS), data={"group_size": 1})


def test_responses_drawn_for_coverage_are_refused() -> None:
    parts = parts_of(data={"explore_share": 1.0})
    with pytest.raises(UserError, match=r"data\.explore_share"):
        step(parts)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"token_penalty": -1.0}, r"settings\.token_penalty is -1\.0"),
        ({"clip_range": 1.0}, r"settings\.clip_range is 1\.0"),
        ({"dual_clip": 0.5}, r"settings\.dual_clip is 0\.5"),
        ({"epochs": 0}, r"settings\.epochs is 0"),
        ({"process_weight": 0.0}, r"process_weight"),
        ({"ratio": "turn"}, r"settings"),
        ({"kl_coef": float("nan")}, r"settings\.kl_coef is nan"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_a_model_loads(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        parts_of(**settings)


def test_passes_hold_conversations_of_similar_length_and_miss_none() -> None:
    parts = parts_of()
    chat = parts.context.chat
    batch = collate(collect(parts), chat.pad_id, chat.header_ids)
    lengths = batch.attention_mask.sum(1)
    passes = list(of_similar_length(batch, 5))
    assert sorted(torch.cat(passes).tolist()) == list(range(24))
    assert len(passes) > 4
    for rows in passes:
        assert len(rows) <= 5
        assert lengths[rows].min() >= 0.75 * lengths[rows].max()


CONFIG = """
seed: 5
fabric: {accelerator: cpu, threads: 1}
model: {name: tiny, lora_rank: 4, lora_dropout: 0.1, context_length: 384}
environment: {class_path: lightning_mtrl.environments.SuggestedResponse, init_args: {size: tiny}}
data: {conversations: 12, group_size: 4, max_turns: 8, max_response_tokens: 10, validation_share: 0.0}
algorithm:
  class_path: lightning_mtrl.algorithms.ITPO
  init_args:
    credit:
      class_path: lightning_mtrl.credit.NormITPO
    prm: {beta: 0.5, learning_rate: 1.0e-3, minibatch_groups: 2}
    estimator: {class_path: lightning_mtrl.algorithms.conversation_estimators.GAE}
    settings: {learning_rate: 1.0e-3, minibatch_groups: 2}
loop: {iterations: 2}
validation: {conversations: 4, sample_conversations: 1}
"""


def test_a_run_that_was_stopped_and_resumed_has_the_bytes_of_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_with_the_test(monkeypatch)
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert cli.main(["fit", f"--config={config}", f"--run_dir={whole}"]) == 0
    improve = ITPO.improve

    def stopped(self: ITPO, rollouts: list[Conversation], signal: Signal) -> Improvement:
        if self.context.iteration == 1:
            raise KeyboardInterrupt
        return improve(self, rollouts, signal)

    with monkeypatch.context() as patched:
        patched.setattr(ITPO, "improve", stopped)
        assert cli.main(["fit", f"--config={config}", f"--run_dir={broken}"]) != 0
    assert not (broken / "checkpoints" / "iteration-0002").exists()
    assert cli.main(["fit", "--resume", str(broken)]) == 0
    name = "checkpoints/iteration-0002"
    states = [load_checkpoint(run / name) for run in (whole, broken)]
    assert set(states[0].tensors) == {"policy", "prm", "value"}
    assert states[0].loop == states[1].loop
    probe = states[0].loop["algorithm"]["credit"]
    assert len(probe["conversations"]) == 12
    assert len(probe["rewards"]) == len(probe["taus"]) == 2
    drawn = {path.name for path in (broken / "figures").iterdir()}
    names = ("learning_curve", "kendall_tau", "ranking_agreement", "score_slope", "reward_dynamics")
    assert drawn == {f"{name}.png" for name in names}
    with (broken / "metrics.csv").open(newline="") as stream:
        rows = [(row["step"], row["name"]) for row in csv.DictReader(stream)]
    for logged in ("policy/loss", "policy/clip_fraction_turn", "prm/loss", "value/loss"):
        steps = [step for step, name in rows if name == logged]
        assert len(steps) == len(set(steps)) == 4, logged  # two iterations of two steps, in more passes
    shown = EventAccumulator(str(broken), size_guidance={"scalars": 0}).Reload()
    in_tensorboard = [(str(e.step), name) for name in shown.Tags()["scalars"] for e in shown.Scalars(name)]
    assert sorted(in_tensorboard) == sorted(rows)
    texts = shown.Tensors("conversations/0/text_summary")
    assert [b" (reward " in e.tensor_proto.string_val[0] for e in texts] == [True] * 3
    for file in ("policy", "prm", "value"):
        tensors = f"{name}/tensors-{file}.safetensors"
        assert (whole / tensors).read_bytes() == (broken / tensors).read_bytes()


@pytest.mark.parametrize(
    ("outcomes", "estimator", "told"),
    [
        ([1.0] * 8, "GAE", "all 8 outcomes are 1, so"),
        ([0.0] * 4 + [1.0] * 4, "RLOO", "in no group do outcomes differ"),
        ([0.0] * 4 + [1.0] * 4, "GAE", None),
        ([0.0, 1.0] * 4, "RLOO", None),
    ],
)
def test_a_step_without_a_signal_from_outcomes_is_told(
    outcomes: list[float], estimator: str, told: str | None
) -> None:
    parts = parts_of(spec("Outcome"), spec(estimator, ESTIMATORS), {"conversations": 8})
    ended = [replace(c, terminated=True, truncated=False) for c in collect(parts)]
    talks = [replace(c, outcome=o) for c, o in zip(ended, outcomes, strict=True)]
    said: list[str] = []
    parts.context.say = said.append
    parts.context.datamodule.set_rollouts(talks, seed=0)
    parts.algorithm.evaluate(talks)
    warned = [text for text in said if text.startswith("WARNING: this step has no signal from outcomes: ")]
    assert len(warned) == (told is not None)
    assert told is None or told in warned[0]
