"""An algorithm that says it has converged after two iterations, and goes on learning if it is let."""

from __future__ import annotations

from lightning_mtrl.algorithms import OutcomeOnly
from lightning_mtrl.algorithms.base import Signal


class Converging(OutcomeOnly):
    def converged(self, signal: Signal) -> bool:
        return self.context.iteration >= 1
