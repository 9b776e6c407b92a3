"""The policy-iteration loop: collect, evaluate, improve, stop. It never asks which algorithm runs."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any

from lightning.fabric import seed_everything

from lightning_mtrl.algorithms.base import Context, Improvement, Signal
from lightning_mtrl.algorithms.rescoring import with_own_logprobs
from lightning_mtrl.assembly import Parts, assemble
from lightning_mtrl.config import RunConfig
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.evaluation.validate import Validation, validate
from lightning_mtrl.launching import launch
from lightning_mtrl.parsing import build_algorithm
from lightning_mtrl.ranges import expect
from lightning_mtrl.recorder import Recorder
from lightning_mtrl.restoring import why_over
from lightning_mtrl.rollouts.results import Rollouts, TooManyFailures
from lightning_mtrl.runs.folder import RunFolder


class PolicyIterationLoop:
    """Repeats policy evaluation and policy improvement, and keeps everything a run leaves behind.

    Every phase starts from its own seed, so an iteration that is done again after a crash is done in the
    same way.

    Args:
        config: the run's configuration.
        folder: where the run lives; a run with a checkpoint is continued.
    """

    def __init__(self, config: RunConfig, folder: RunFolder) -> None:
        _expect_own_behaviour(config)
        self.config = config
        self.recorder = Recorder(config, folder, launch(config.fabric))
        served = folder.served(config.data.server.adapter_folder)
        self.parts: Parts = assemble(config, self.recorder.loggers, served=served)
        self.parts.context.say = self.recorder.say
        self.parts.context.on_step = self.recorder.on_step
        self.algorithm = self.parts.algorithm
        self.seconds: dict[str, float] = {}

    def run(self) -> None:
        """Run to the last iteration, or until the algorithm has converged."""
        with closing(self.parts):
            self._run()

    def _run(self) -> None:
        start = self.recorder.resume(self.parts)
        if start == 0:
            self.report(0, None, None)
        over = why_over(self.config.loop, self.recorder.checkpointed)
        if over:
            self.recorder.say(over)
        for iteration in range(start, start if over else self.config.loop.iterations):
            self.parts.context.iteration = iteration
            rollouts = self.collect(iteration)
            with self.phase("evaluate", iteration):
                signal = self.algorithm.evaluate(rollouts)
            with self.phase("improve", iteration):
                improvement = self.algorithm.improve(rollouts, signal)
            self.report(iteration + 1, signal, improvement)
            converged = self.algorithm.converged(signal)
            self.recorder.checkpoint(iteration + 1, self.parts, converged)
            if self.config.loop.stop_when_converged and converged:
                self.recorder.say(f"Converged after {iteration + 1} iterations.")
                break
        self.recorder.close(self.parts)

    def collect(self, iteration: int) -> list[Conversation]:
        """Conversations of the current policy, and a share of earlier policies' for the critic."""
        parts, data = self.parts, self.config.data
        with self.phase("collect", iteration):
            rollouts = self._sampled(iteration)
            if data.server.base_url is not None:
                rollouts, measured = with_own_logprobs(rollouts, parts.context)
                self.recorder.mismatch(iteration, measured)
        self.recorder.rollouts(iteration, rollouts)
        fresh = rollouts.conversations
        wanted = round(len(fresh) * data.earlier_share / (1 - data.earlier_share))
        earlier = self.recorder.earlier(iteration, wanted)
        parts.context.datamodule.set_rollouts(
            fresh, earlier=earlier, seed=self.parts.context.seed, failed=rollouts.dropped
        )
        return parts.context.datamodule.conversations

    def _sampled(self, iteration: int) -> Rollouts:
        parts = self.parts
        with parts.collector.speaker(parts.backbone) as model:
            try:
                return parts.collector.collect(
                    model,
                    conversations=self.config.data.conversations,
                    seed=derived_seed(self.config.seed, iteration, "environment"),
                    policy=policy_name(iteration),
                )
            except TooManyFailures as stopped:
                self.recorder.rollouts(iteration, stopped.rollouts)
                raise

    def report(self, number: int, signal: Signal | None, improvement: Improvement | None) -> Validation:
        """Measure policy `number` and record it, with what made it."""
        parts, wanted = self.parts, self.config.validation
        with self.phase("validate", number):
            validation = validate(
                parts.validator,
                parts.backbone,
                conversations=wanted.conversations,
                seed=wanted.seed,
                gamma=parts.gamma,
                policy=policy_name(number),
            )
        self.recorder.policy(number, validation, signal, improvement, self.seconds, parts)
        self.seconds = {}
        return validation

    def phase(self, name: str, iteration: int) -> AbstractContextManager[None]:
        """Seed a phase by its name and iteration, and time it."""
        return phase_of(self.config.seed, name, iteration, self.parts.context, self.seconds)


@contextmanager
def phase_of(
    seed: int, name: str, iteration: int, context: Context, seconds: dict[str, float]
) -> Iterator[None]:
    """Seed a phase of a run by its name and iteration, and add its time to `seconds`."""
    context.seed = derived_seed(seed, iteration, name)
    seed_everything(context.seed, verbose=False)
    start = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


def policy_name(number: int) -> str:
    """Name of policy pi_number in records."""
    return f"iteration-{number:04d}"


def derived_seed(*parts: Any) -> int:
    """A seed in [0, 2^31) that depends on all parts, the same on every machine."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def _expect_own_behaviour(config: RunConfig) -> None:
    """Refuse to collect for coverage where only the policy's own conversations can be learned from."""
    algorithm, data = build_algorithm(config), config.data
    kind = f"0 with {type(algorithm).__name__}, which learns from the policy's own conversations only"
    for name in ("explore_share", "persona_share"):
        share = getattr(data, name)
        expect(not (algorithm.learns_from_own and share), f"data.{name}", share, kind, 0)
