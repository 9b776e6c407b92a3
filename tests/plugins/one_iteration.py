"""One iteration of a shipped configuration on few conversations, with a step whatever they teach."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from lightning_mtrl.assembly import assemble
from lightning_mtrl.parsing import load_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SMALL = ["--data.conversations=32", "--fabric.accelerator=cpu"]
# An adapter each for critic, value head and policy, and rewards that need the ends of Q.
PPO = [
    f"--config={CONFIGS / 'quickstart.yaml'}",
    "--algorithm.evaluation.trunk=adapter",
    "--algorithm.evaluation.epochs=1",
    "--algorithm.estimator=GAE",
    "--algorithm.improvement.value_role=value",
    "--algorithm.improvement.reward=logit",
    "--algorithm.improvement.rounds=1",
    "--algorithm.improvement.states=4",
    "--algorithm.improvement.certificate_states=4",
    "--algorithm.improvement.accept=always",
]
ITPO = [f"--config={CONFIGS / 'itpo.yaml'}", "--algorithm.estimator=GAE"]


def one_iteration(options: Sequence[str]) -> tuple[dict[str, float], list[str]]:
    """What evaluation and improvement measured, and what the algorithm said.

    The policy's weights are finite afterwards, and others than before.
    """
    torch.manual_seed(0)
    config = load_config(overrides=[*options, *SMALL])
    parts = assemble(config, show_progress=False)
    said: list[str] = []
    parts.context.say = said.append
    before = parts.backbone.state_of("policy")
    with parts.backbone.sampling("policy") as model:
        rollouts = parts.collector.collect(
            model, conversations=config.data.conversations, seed=0, policy="iteration-0000"
        )
    parts.context.datamodule.set_rollouts(rollouts.conversations, seed=0)
    signal = parts.algorithm.evaluate(rollouts.conversations)
    improvement = parts.algorithm.improve(rollouts.conversations, replace(signal, trusted=True))
    after = parts.backbone.state_of("policy")
    assert all(bool(weights.isfinite().all()) for weights in after.values())
    assert any(not torch.equal(before[name], after[name]) for name in after)
    measured = {**signal.metrics, **improvement.metrics}
    return {name: value for name, value in measured.items() if not math.isnan(value)}, said
