"""How well scores of conversations agree with their outcomes, in order rather than in size."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxtyping import Float, Int
from scipy.stats import kendalltau, spearmanr
from torch import Tensor

from lightning_mtrl import objectives
from lightning_mtrl.evaluation.calibration import ranking_auc

SUCCESS = 0.5  # an outcome above it is a success


def ranking_report(
    scores: Float[Tensor, " B"], outcomes: Float[Tensor, " B"], group: Int[Tensor, " B"]
) -> dict[str, float]:
    """AUC, Kendall's tau and accuracy inside groups, by their logged names; NaN where not defined."""
    return {
        "auc": ranking_auc(scores, outcomes > SUCCESS),
        "kendall_tau": kendall_tau(scores.tolist(), outcomes.tolist()),
        "pair_accuracy": objectives.pairwise_accuracy(scores, outcomes.to(scores.dtype), group).item(),
    }


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Kendall's tau-b, which allows for ties; NaN when one side is constant."""
    if _constant(first) or _constant(second):
        return math.nan
    return float(kendalltau(first, second).statistic)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's correlation of ranks; NaN when one side is constant."""
    if _constant(first) or _constant(second):
        return math.nan
    return float(spearmanr(first, second).statistic)


def _constant(values: Sequence[float]) -> bool:
    return len(set(values)) < 2
