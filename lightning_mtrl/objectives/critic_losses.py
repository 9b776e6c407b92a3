"""Losses of value functions, one number for each prediction; the caller weights and sums them."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_mtrl.objectives.masked import zero_outside


def bce_loss(logits: Float[Tensor, "*S"], targets: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """Binary cross-entropy in nats between sigmoid(logits) and targets in [0, 1].

    Its minimiser is the conditional mean of the targets, also where they lie between 0 and 1.
    """
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")


def mse_loss(predictions: Float[Tensor, "*S"], targets: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """Squared error, in squared units of the targets."""
    return (predictions - targets) ** 2


def hl_gauss_targets(
    targets: Float[Tensor, "*S"], low: float, high: float, bins: int, sigma_in_bins: float = 0.75
) -> Float[Tensor, "*S O"]:
    """Distribution over bins that stands for each target: a Gaussian, cut off at the ends of the range.

    The cut moves the mean of a target at an end inwards, by about 0.6 of a bin.

    Args:
        targets: numbers in [low, high]; others count as the nearer end.
        low: lower edge of the first bin.
        high: upper edge of the last bin.
        bins: number of equal bins.
        sigma_in_bins: standard deviation of the Gaussian in widths of a bin.

    Raises:
        ValueError: for an empty range or fewer than two bins.

    Source: Farebrother et al. 2024 (arXiv:2403.03950).
    """
    if not low < high or bins < 2:
        raise ValueError(f"need low < high and at least 2 bins, got [{low}, {high}] and {bins}")
    edges = torch.linspace(low, high, bins + 1, dtype=targets.dtype, device=targets.device)
    sigma = sigma_in_bins * (high - low) / bins
    cumulative: Tensor = torch.special.ndtr((edges - targets.clamp(low, high)[..., None]) / sigma)
    return cumulative.diff(dim=-1) / (cumulative[..., -1:] - cumulative[..., :1])


def hl_gauss_values(logits: Float[Tensor, "*S O"], low: float, high: float) -> Float[Tensor, "*S"]:
    """Mean of the predicted distribution over equal bins of [low, high], each bin at its centre."""
    bins = logits.size(-1)
    half = (high - low) / bins / 2
    centres = torch.linspace(low + half, high - half, bins, dtype=logits.dtype, device=logits.device)
    return (logits.softmax(-1) * centres).sum(-1)


def value_loss(
    values: Float[Tensor, "*S"],
    old_values: Float[Tensor, "*S"],
    returns: Float[Tensor, "*S"],
    clip_range: float | None = 0.2,
    mask: Bool[Tensor, "*S"] | None = None,
) -> Float[Tensor, "*S"]:
    """Half the squared error of each value, or of the value clipped around the old one if that is larger.

    Args:
        values: predictions; they carry the gradient.
        old_values: predictions when the responses were scored; constant.
        returns: targets; constant.
        clip_range: how far a value may move from the old one before it is clipped, in units of reward;
            None for no clipping.
        mask: True on the values that count; what stands elsewhere has no effect and the result is 0
            there. By default all count.

    Source: the clipped value loss of the PPO implementation of OpenAI Baselines.
    """
    if mask is not None:
        values, old_values, returns = (zero_outside(x, mask) for x in (values, old_values, returns))
    losses = (values - returns) ** 2
    if clip_range is not None:
        losses = torch.maximum(losses, (_clipped(values, old_values, clip_range) - returns) ** 2)
    return losses / 2


def value_clipped(
    values: Float[Tensor, "*S"],
    old_values: Float[Tensor, "*S"],
    returns: Float[Tensor, "*S"],
    clip_range: float,
) -> Bool[Tensor, "*S"]:
    """Where the clipped error is the larger one, so that the value gets no gradient or a smaller one."""
    return (_clipped(values, old_values, clip_range) - returns) ** 2 > (values - returns) ** 2


def _clipped(values: Tensor, old_values: Tensor, clip_range: float) -> Tensor:
    return old_values + (values - old_values).clamp(-clip_range, clip_range)
