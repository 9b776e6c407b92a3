"""What a Q-critic's head predicts, and how it is scored: three ways to regress a return."""

from __future__ import annotations

from typing import Protocol

from jaxtyping import Float
from torch import Tensor

from lightning_mtrl import objectives


class QLoss(Protocol):
    """A head's outputs per (state, response), their loss, and the value they mean.

    Attributes:
        outputs: numbers that the head gives for each pair.
        returns: smallest and largest return that the loss is for; None where any will do.
    """

    outputs: int
    returns: tuple[float, float] | None

    def loss(self, raw: Float[Tensor, "N O"], targets: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """Loss of each pair."""
        ...

    def values(self, raw: Float[Tensor, "... O"]) -> Float[Tensor, ...]:
        """Predicted return."""
        ...

    def constant(self, targets: Float[Tensor, " N"]) -> Float[Tensor, " O"]:
        """The raw output that fits all targets best when it may not depend on anything."""
        ...


class BinaryCrossEntropy:
    """For returns in [0, 1]; its minimiser is the conditional mean, for soft targets too."""

    outputs = 1
    returns: tuple[float, float] | None = (0.0, 1.0)

    def loss(self, raw: Float[Tensor, "N 1"], targets: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """Cross-entropy in nats of each pair.

        A reward and a predicted return may exceed 1 together, where it has no minimum; true values do not.
        """
        return objectives.bce_loss(raw[..., 0], targets.clamp(0.0, 1.0))

    def values(self, raw: Float[Tensor, "... 1"]) -> Float[Tensor, ...]:
        """Predicted return in [0, 1]."""
        return raw[..., 0].sigmoid()

    def constant(self, targets: Float[Tensor, " N"]) -> Float[Tensor, " 1"]:
        """Logit of the mean."""
        return targets.mean().clamp(1e-6, 1 - 1e-6).logit()[None]


class MeanSquaredError:
    """For returns of any size."""

    outputs = 1
    returns: tuple[float, float] | None = None

    def loss(self, raw: Float[Tensor, "N 1"], targets: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """Squared error of each pair."""
        return objectives.mse_loss(raw[..., 0], targets)

    def values(self, raw: Float[Tensor, "... 1"]) -> Float[Tensor, ...]:
        """Predicted return."""
        return raw[..., 0]

    def constant(self, targets: Float[Tensor, " N"]) -> Float[Tensor, " 1"]:
        """The mean."""
        return targets.mean()[None]


class HLGauss:
    """Classification over bins of the return, with targets smoothed by a Gaussian.

    Source: Farebrother et al. 2024 (arXiv:2403.03950).

    Args:
        low: smallest return.
        high: largest return.
        bins: number of equal bins between them.
    """

    def __init__(self, low: float = 0.0, high: float = 1.0, bins: int = 51) -> None:
        self.outputs = bins
        self.returns: tuple[float, float] | None = (low, high)
        self.low, self.high = low, high

    def loss(self, raw: Float[Tensor, "N O"], targets: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """Cross-entropy in nats between the smoothed target and the prediction."""
        wanted = objectives.hl_gauss_targets(targets, self.low, self.high, self.outputs)
        return -(wanted * raw.log_softmax(-1)).sum(-1)

    def values(self, raw: Float[Tensor, "... O"]) -> Float[Tensor, ...]:
        """Mean of the predicted distribution."""
        return objectives.hl_gauss_values(raw, self.low, self.high)

    def constant(self, targets: Float[Tensor, " N"]) -> Float[Tensor, " O"]:
        """Logits of the mean target distribution."""
        wanted = objectives.hl_gauss_targets(targets, self.low, self.high, self.outputs)
        return wanted.mean(0).clamp(min=1e-9).log()


Q_LOSSES: dict[str, type[BinaryCrossEntropy] | type[MeanSquaredError] | type[HLGauss]] = {
    "bce": BinaryCrossEntropy,
    "mse": MeanSquaredError,
    "hl_gauss": HLGauss,
}


def q_loss(name: str) -> QLoss:
    """The loss of that name, with its default settings.

    Raises:
        ValueError: for an unknown name.
    """
    if name not in Q_LOSSES:
        raise ValueError(f"unknown Q loss {name!r}; there are {sorted(Q_LOSSES)}")
    return Q_LOSSES[name]()
