"""Iterative PPO that takes a step whatever its critic is worth, so that all of a small run has work."""

from __future__ import annotations

from dataclasses import replace

from lightning_mtrl.algorithms import IterativePPO
from lightning_mtrl.algorithms.base import Signal
from lightning_mtrl.conversation import Conversation


class TrustingIterativePPO(IterativePPO):
    def evaluate(self, rollouts: list[Conversation]) -> Signal:
        return replace(super().evaluate(rollouts), trusted=True)
