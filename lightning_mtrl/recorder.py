"""Everything that a run leaves behind: folder, logs, summary, rollouts, checkpoints, the policy to deploy."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from lightning.fabric.loggers.logger import Logger

from lightning_mtrl.algorithms.base import Improvement, Signal
from lightning_mtrl.assembly import Learner, Parts, assemble, assemble_learner
from lightning_mtrl.config import RunConfig
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.evaluation.figures import learning_curve
from lightning_mtrl.evaluation.validate import MEASURED, SUCCESS, Validation
from lightning_mtrl.llm.usage import METER, Usage
from lightning_mtrl.models.saving import save_role
from lightning_mtrl.parsing import load_config
from lightning_mtrl.processes import Processes
from lightning_mtrl.restoring import alone, chosen, earlier_conversations, restore
from lightning_mtrl.rollouts.collector import Rollouts
from lightning_mtrl.rollouts.logs import write_conversations
from lightning_mtrl.runs.atomic import replacing_folder
from lightning_mtrl.runs.checkpoint import (
    CheckpointState,
    latest_checkpoint,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from lightning_mtrl.runs.folder import RunFolder
from lightning_mtrl.runs.loggers import RunLog, clock_at
from lightning_mtrl.runs.summary import Summary
from lightning_mtrl.runs.texts import mismatch_line, policy_line, sample_text


class Recorder:
    """Writes a run's folder and reads it back.

    Every process has one and calls it in the same way, but only the first process writes and prints.

    Args:
        config: the run's configuration.
        folder: the run's folder.
        processes: of the run.
    """

    def __init__(self, config: RunConfig, folder: RunFolder, processes: Processes) -> None:
        self.config, self.folder, self.processes = config, folder, processes
        newest, self._is_new = processes.first(lambda: (latest_checkpoint(folder), folder.is_new))
        found = processes.together(lambda: load_checkpoint(newest) if newest else None)
        self.clock = clock_at(found)
        #: the checkpoint that the run goes on from, without its weights and optimizers
        self.checkpointed = found and replace(found, tensors={}, optimizers={})
        self._unread = found  # with them, until `resume`
        self.summary = processes.first(lambda: Summary.open(folder.summary))
        self.log = RunLog(folder, config.loggers if processes.is_first else [], self.clock)
        self._used = METER.total()

    @property
    def loggers(self) -> list[Logger]:
        """For `Fabric(loggers=...)`."""
        return self.log.loggers

    def resume(self, parts: Parts) -> int:
        """Put the newest checkpoint's state into the parts, once; returns the iteration to go on with."""
        state, self._unread = self._unread, None
        if state is None:
            if not self._is_new:
                self.say("The run ended before its first checkpoint, so it starts again from pi_0.")
            self._note_optimum(parts)
            return 0
        restore(parts, state)
        self.say(f"Resumed after iteration {state.iteration}.")
        return state.iteration

    def checkpoint(self, done: int, parts: Learner, converged: bool) -> None:
        """Keep all that the next iteration depends on, and the policy as a peft folder.

        Args:
            done: iterations that are done.
            parts: of the run.
            converged: whether the algorithm has, so that a resumed run knows.
        """
        modules = parts.algorithm.modules()
        state = CheckpointState(
            iteration=done,
            tensors={name: module.state() for name, (module, _) in modules.items()},
            optimizers={name: optimizer.state_dict() for name, (_, optimizer) in modules.items()},
            loop={
                "step": self.clock.step,
                "rows": self.clock.rows,
                "summaries": self.clock.summaries,
                "converged": converged,
                "algorithm": parts.algorithm.state(),
            },
        )
        with parts.backbone.whole("policy"):
            self.processes.first(lambda: self._write_checkpoint(state, parts))

    def _write_checkpoint(self, state: CheckpointState, parts: Learner) -> None:
        self.log.flush()
        # Before the checkpoint: a run killed in between does this iteration again and writes the same policy.
        with replacing_folder(self.folder.policy_adapter) as target:
            save_role(parts.backbone, "policy", target)
        save_checkpoint(self.folder.checkpoint(state.iteration), state)
        prune_checkpoints(self.folder, self.config.loop.checkpoint_keep)

    def rollouts(self, iteration: int, rollouts: Rollouts) -> None:
        """Store an iteration's conversations, and log what they were like."""
        self.clock.iteration = iteration
        file = self.folder.rollouts(iteration, self.config.data.file_format)
        self.processes.first(lambda: write_conversations(file, rollouts.conversations))
        known = [c for c in rollouts.conversations if c.outcome is not None]
        self.log.metrics(
            {
                "rollouts/success_rate": sum(float(c.outcome or 0.0) > SUCCESS for c in known)
                / max(1, len(known)),
                "rollouts/outcome": sum(float(c.outcome or 0.0) for c in known) / max(1, len(known)),
                "rollouts/turns": sum(len(c.turns) for c in known) / max(1, len(known)),
                "rollouts/tokens": float(rollouts.tokens),
                "rollouts/truncated": float(rollouts.truncated),
                "rollouts/dropped": float(sum(rollouts.dropped.values())),
                "rollouts/personas": float(sum("persona" in c.metadata for c in rollouts.conversations)),
            }
        )
        lengths = [float(len(t.response_ids)) for c in rollouts.conversations for t in c.turns]
        self.log.histogram("rollouts/response_tokens", torch.tensor(lengths))

    def mismatch(self, iteration: int, measured: Mapping[str, float]) -> None:
        """Log and tell how far a server's log-probabilities were from the trainer's."""
        self.clock.iteration = iteration
        self._show_phase("rollouts", measured)
        self.say(mismatch_line(measured))

    def earlier(self, iteration: int, wanted: int) -> list[Conversation]:
        """A sample of the stored conversations of policies before `iteration`."""
        return self.processes.first(lambda: self._sampled(iteration, wanted)) if wanted else []

    def _sampled(self, iteration: int, wanted: int) -> list[Conversation]:
        found = list(earlier_conversations(self.config, self.folder, iteration))
        return random.Random(f"{self.config.seed}/{iteration}").sample(found, min(wanted, len(found)))

    def policy(
        self,
        number: int,
        validation: Validation | None,
        signal: Signal | None,
        improvement: Improvement | None,
        seconds: Mapping[str, float],
        parts: Learner,
    ) -> None:
        """Record policy `number`: its summary row, curves, figures and sample conversations.

        `validation` is None for a policy that nobody has talked with yet.
        """
        self.clock.iteration = number
        self._show_phase("critic", signal.metrics if signal else {})
        self._show_phase("policy", improvement.metrics if improvement else {})
        measured = validation.row() if validation is not None else dict.fromkeys(MEASURED)
        self._show_phase("validation", _numbers(measured))
        self._show_phase("time", seconds)
        self._show_phase("llm", self._llm_used().figures())
        for name, figure in (signal.figures if signal else {}).items():
            self.log.figure(f"critic/{name}", figure)
        if validation is not None:
            self.log.histogram("validation/returns", torch.tensor(validation.returns))
            self._show_samples(validation, parts)
        found = signal.metrics if signal else {}
        row = {
            "iteration": number,
            **measured,
            "kl": improvement.metrics.get("kl") if improvement else 0.0,
            "q_loss": found.get("q_loss"),
            "prm_loss": found.get("prm_loss"),
            "calibration_error": found.get("calibration_error"),
            "accepted": improvement.accepted if improvement else None,
            "gain": improvement.metrics.get("gain") if improvement else None,
            "seconds": dict(seconds),
        }
        self.summary.put(row)
        self.summary.seconds += sum(seconds.values())
        self.processes.first(self.summary.write)
        without = validation.without_outcome if validation is not None else 0
        self.say(policy_line(row, self.summary.optimum_success_rate, without))

    def _llm_used(self) -> Usage:
        """What users and judges played by language models have used since the last time, in all processes."""
        total = METER.total()
        own, self._used = total.plus(self._used, -1), total
        return reduce(Usage.plus, self.processes.each(lambda: own))

    def on_step(self) -> None:
        """Count an optimizer step."""
        self.clock.step += 1

    def say(self, text: str) -> None:
        """Tell the person who watches."""
        if self.processes.is_first:
            print(text, flush=True)

    def close(self, parts: Learner) -> None:
        """Draw what the run has shown, and end the logs."""
        self.processes.first(lambda: self._draw(parts))
        self.log.close()

    def _draw(self, parts: Learner) -> None:
        curve = learning_curve(self.summary.iterations, self.summary.optimum_success_rate)
        self.folder.figures.mkdir(exist_ok=True)
        for name, figure in {"learning_curve": curve, **parts.algorithm.figures()}.items():
            figure.savefig(self.folder.figures / f"{name}.png", dpi=120)
            self.log.figure(f"figures/{name}", figure)

    def _note_optimum(self, parts: Parts) -> None:
        find = getattr(parts.environment, "optimum", None)
        if find is None:
            return
        optimum = self.processes.first(lambda: find(parts.gamma))
        self.summary.optimum_success_rate = optimum.success_rate
        self.summary.optimum_return = optimum.mean_return
        self.say(
            f"Best possible success rate {optimum.success_rate:.3f}; "
            f"of the greedy agent {optimum.greedy_success_rate:.3f} (exact)."
        )

    def _show_phase(self, phase: str, metrics: Mapping[str, float]) -> None:
        self.log.metrics({f"{phase}/{name}": value for name, value in metrics.items()})

    def _show_samples(self, validation: Validation, parts: Learner) -> None:
        chosen = validation.samples[: self.config.validation.sample_conversations]
        if not chosen:
            return
        values, name = parts.algorithm.turn_values(chosen), parts.algorithm.turn_value_name
        for place, conversation in enumerate(chosen):
            text = sample_text(conversation, values[place] if values else None, name)
            self.log.text(f"conversations/{place}", text)


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if isinstance(value, int | float)}


Loaded = TypeVar("Loaded", bound=Learner)


@dataclass
class Run(Generic[Loaded]):
    """A run read back from its folder.

    Attributes:
        config: its configuration.
        iteration: number of the policy in `parts`; 0 is pi_0.
        parts: model, collectors and algorithm with that policy's weights.
        summary: its summary.
    """

    config: RunConfig
    iteration: int
    parts: Loaded
    summary: Summary


def load_run(folder: RunFolder | Path | str, iteration: int | None = None) -> Run[Parts]:
    """Read a run back, with the newest policy or that of an iteration (0 is pi_0).

    Raises:
        UserError: if there is no such run, or no checkpoint of that iteration, or all of them are gone.
    """
    folder = folder if isinstance(folder, RunFolder) else RunFolder.open(folder)
    config = load_config(folder.config)
    number, state = chosen(folder, iteration)
    parts = assemble(alone(config))
    if state is not None:
        restore(parts, state)
    return Run(config, number, parts, Summary.open(folder.summary))


def load_learner(folder: RunFolder, iteration: int | None = None) -> Run[Learner]:
    """Read a run back as `load_run` does, but without its environment."""
    config = load_config(folder.config, environment=False)
    number, state = chosen(folder, iteration)
    learner = assemble_learner(alone(config))
    if state is not None:
        restore(learner, state)
    return Run(config, number, learner, Summary.open(folder.summary))
