"""How good a Q-critic is on conversations that it was not fitted on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from scipy.stats import rankdata
from torch import Tensor
from torchmetrics.functional.regression import pearson_corrcoef

from lightning_mtrl.evaluation.intervals import mean_interval


@dataclass(frozen=True)
class CalibrationBin:
    """One bin of a calibration curve: mean prediction, mean return, and the number of pairs in it."""

    predicted: float
    observed: float
    count: int


@dataclass(frozen=True)
class QReport:
    """A critic measured on held-out conversations.

    Attributes:
        loss: mean loss over turns.
        constant_loss: the same for the best constant, which knows nothing of state and response.
        gain: mean over conversations of (constant's loss - critic's loss), with its one-sided 95% lower
            bound, robust to what conversations of one customer or group share.
        auc: chance that a turn that led to a positive return has the larger Q; NaN if all are alike.
        same_state_accuracy: share of pairs of responses in the *same* state whose Q stands in the order of
            their returns, ties counting half; the only thing that improvement uses. NaN without pairs.
        correlation: of Q with the return.
        calibration_error: mean distance of prediction and return over the bins of the curve.
        curve: the calibration curve.
        turns: number of held-out pairs.
    """

    loss: float
    constant_loss: float
    gain: tuple[float, float]
    auc: float
    same_state_accuracy: float
    correlation: float
    calibration_error: float
    curve: tuple[CalibrationBin, ...]
    turns: int

    @property
    def beats_constant(self) -> bool:
        """True when the critic is better than a constant beyond chance."""
        return self.gain[1] > 0

    def metrics(self) -> dict[str, float]:
        """The numbers of the report by their logged names."""
        return {
            "q_loss": self.loss,
            "constant_loss": self.constant_loss,
            "gain": self.gain[0],
            "gain_low": self.gain[1],
            "auc": self.auc,
            "same_state_accuracy": self.same_state_accuracy,
            "correlation": self.correlation,
            "calibration_error": self.calibration_error,
        }


def calibration_curve(
    predicted: Float[Tensor, " N"], observed: Float[Tensor, " N"], bins: int = 10
) -> tuple[CalibrationBin, ...]:
    """Mean prediction against mean return, from the lowest predictions to the highest, in equal counts.

    Equal predictions stand in one bin, that of their mean rank: the order of the data decides nothing.
    """
    ranks = rankdata(predicted.tolist())
    places = torch.from_numpy(((ranks - 0.5) * bins / len(predicted)).astype(int))
    parts = [places == place for place in places.unique()]
    return tuple(
        CalibrationBin(predicted[part].mean().item(), observed[part].mean().item(), int(part.sum()))
        for part in parts
    )


def calibration_error(curve: Sequence[CalibrationBin]) -> float:
    """Mean distance of prediction and return over the bins, each weighing its count."""
    total = sum(b.count for b in curve)
    return sum(b.count * abs(b.predicted - b.observed) for b in curve) / max(1, total)


def ranking_auc(scores: Float[Tensor, " N"], positive: Bool[Tensor, " N"]) -> float:
    """Chance that a positive scores above a negative, ties one half; NaN when there is only one kind.

    Source: Mann and Whitney 1947, from ranks, so that the scale of the scores does not matter.
    """
    number = int(positive.sum())
    pairs = number * (len(positive) - number)
    if not pairs:
        return float("nan")
    ranks = rankdata(scores.tolist())[positive.cpu().numpy()]
    return float((ranks.sum() - number * (number + 1) / 2) / pairs)


def same_state_accuracy(
    predicted: Float[Tensor, " N"], returns: Float[Tensor, " N"], states: Sequence[object]
) -> float:
    """Share of pairs of responses in one state that Q puts in the order of their returns; ties count half."""
    members: dict[object, list[int]] = {}
    for index, state in enumerate(states):
        members.setdefault(state, []).append(index)
    right = pairs = 0.0
    for group in members.values():
        if len(group) < 2:
            continue
        q, g = predicted[group], returns[group]
        better = g[:, None] > g[None, :]
        pairs += float(better.sum())
        right += float((q[:, None] > q[None, :])[better].sum())
        right += 0.5 * float((q[:, None] == q[None, :])[better].sum())
    return right / pairs if pairs else float("nan")


def correlation(predicted: Float[Tensor, " N"], returns: Float[Tensor, " N"]) -> float:
    """Pearson's correlation; NaN when one side is constant."""
    if len(returns) < 2 or float(predicted.std()) == 0 or float(returns.std()) == 0:
        return float("nan")
    return float(pearson_corrcoef(predicted, returns))


def lower_bound(values: Float[Tensor, " N"], clusters: Sequence[str]) -> tuple[float, float]:
    """Mean and its one-sided 95% lower bound (Student's); minus infinity for fewer than two clusters.

    Args:
        values: at least one.
        clusters: what each belongs to; values of a cluster may depend on each other.
    """
    return float(values.mean()), mean_interval(values.tolist(), 0.9, clusters)[0]
