"""Algorithms that a configuration can name, and the estimators they take."""

from lightning_mtrl.algorithms.base import Algorithm
from lightning_mtrl.algorithms.estimators import GAE, GRPO, RLOO, AdvantageEstimator
from lightning_mtrl.algorithms.iterative_ppo import IterativePPO
from lightning_mtrl.algorithms.itpo import ITPO
from lightning_mtrl.algorithms.outcome_only import OutcomeOnly

__all__ = ["GAE", "GRPO", "ITPO", "RLOO", "AdvantageEstimator", "Algorithm", "IterativePPO", "OutcomeOnly"]
