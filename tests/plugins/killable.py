"""Iterative PPO that ends its own process with SIGKILL at a place named by an environment variable.

LIGHTNING_MTRL_KILL is PLACE:ITERATION, with a place of `PLACES`.
"""

from __future__ import annotations

import os
import signal as signals
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_mtrl import recorder
from lightning_mtrl.algorithms import IterativePPO
from lightning_mtrl.algorithms.base import Improvement, Signal
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.runs import checkpoint

VARIABLE = "LIGHTNING_MTRL_KILL"
PLACES = (
    "inside evaluate",
    "between phases",
    "inside improve",
    "before the policy is saved",
    "inside checkpoint",
    "after checkpoint",
)
STEPS = 3


class KillableIterativePPO(IterativePPO):
    """It takes a step whatever its critic is worth, so that every phase of a small run has work to do."""

    def evaluate(self, rollouts: list[Conversation]) -> Signal:
        if self._here("inside evaluate"):
            self._kill_after_some_steps()
        return replace(super().evaluate(rollouts), trusted=True)

    def improve(self, rollouts: list[Conversation], signal: Signal) -> Improvement:
        if self._here("between phases"):
            kill()
        if self._here("inside improve"):
            self._kill_after_some_steps()
        return super().improve(rollouts, signal)

    def state(self) -> dict[str, Any]:
        """The recorder asks for it when it begins to write a checkpoint."""
        if self._here("inside checkpoint"):
            checkpoint.torch.save = half_save
        if self._here("after checkpoint"):
            recorder.prune_checkpoints = kill
        if self._here("before the policy is saved"):
            recorder.save_role = kill  # type: ignore[assignment]
        return super().state()

    def _here(self, place: str) -> bool:
        assert place in PLACES
        return os.environ.get(VARIABLE) == f"{place}:{self.context.iteration}"

    def _kill_after_some_steps(self) -> None:
        count, taken = self.context.on_step, []

        def on_step() -> None:
            count()
            taken.append(1)
            if len(taken) == STEPS:
                kill()

        self.context.on_step = on_step


def kill(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signals.SIGKILL)


def half_save(value: Any, path: Path) -> None:
    path.write_bytes(b"PK\x03\x04 the first bytes of an archive")
    kill()
