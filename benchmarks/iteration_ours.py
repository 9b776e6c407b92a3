"""An engine of `iteration.py`: what a run does in an iteration, with RLOO on outcomes."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

import measuring
from engine_options import KL_COEF, LEARNING_RATE, talk_options
from lightning_mtrl.config import ClassSpec, DataConfig, ModelConfig, RunConfig
from lightning_mtrl.loop import PolicyIterationLoop
from lightning_mtrl.runs.folder import RunFolder


def configuration(a: argparse.Namespace) -> RunConfig:
    outcome = {"class_path": "lightning_mtrl.credit.Outcome"}
    groups = a.conversations // 4
    settings = {
        "kl_coef": KL_COEF, "learning_rate": LEARNING_RATE, "minibatch_groups": groups, "micro_batch_size": 4,
        "epochs": 1, "process_weight": 1.0, "outcome_weight": 0.0,
    }  # fmt: skip
    return RunConfig(
        model=ModelConfig(name=a.model, dtype=a.dtype, context_length=2048),
        environment=ClassSpec("talk.Talk", {"turns": a.turns}),
        data=DataConfig(
            conversations=a.conversations, group_size=4, max_turns=a.turns, rows=a.conversations,
            max_response_tokens=a.response_tokens, validation_share=0.0,
        ),
        algorithm=ClassSpec("lightning_mtrl.algorithms.ITPO", {"credit": outcome, "settings": settings}),
        loggers=[],
    )  # fmt: skip


def main() -> None:
    a = talk_options(__doc__).parse_args()
    folder = RunFolder.create("benchmark", Path(tempfile.mkdtemp()) / "run")
    loop = PolicyIterationLoop(configuration(a), folder)
    measuring.report(engine="lightning_mtrl", threads=torch.get_num_threads())
    for number in measuring.turns():
        measuring.give_back()
        start = time.perf_counter()
        loop.parts.context.iteration, loop.seconds = number, {}
        rollouts = loop.collect(number)
        with loop.phase("evaluate", number):
            signal = loop.algorithm.evaluate(rollouts)
        with loop.phase("improve", number):
            loop.algorithm.improve(rollouts, signal)
        seconds = time.perf_counter() - start
        sampled = sum(len(turn.response_ids) for talk in rollouts for turn in talk.turns)
        measuring.report(
            seconds=seconds, tokens_per_second=sampled / seconds, peak_mib=measuring.peak_mib(),
            rollout=loop.seconds["collect"], update=loop.seconds["improve"], tokens=sampled,
        )  # fmt: skip


if __name__ == "__main__":
    main()
