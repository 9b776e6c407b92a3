"""Sums, means and weights over some places of a tensor.

A place outside a mask is replaced, never multiplied by zero: zero times NaN is NaN, in the value and in
the gradient. What stands there has no influence on anything.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

MeanOver = Literal["token", "response", "conversation"]


def zero_outside(values: Float[Tensor, "*S"], mask: Bool[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """The same values inside the mask, 0 outside; no gradient reaches what stood outside."""
    return torch.where(mask, values, torch.zeros_like(values))


def masked_sum(
    values: Float[Tensor, "*S"], mask: Bool[Tensor, "*S"], dim: int | None = None
) -> Float[Tensor, "*R"]:
    """Sum inside the mask, over everything or along `dim`; 0 where the mask is empty."""
    return zero_outside(values, mask).sum() if dim is None else zero_outside(values, mask).sum(dim)


def masked_mean(
    values: Float[Tensor, "*S"], mask: Bool[Tensor, "*S"], dim: int | None = None
) -> Float[Tensor, "*R"]:
    """Mean inside the mask, over everything or along `dim`; 0 (with gradient 0) where the mask is empty."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def masked_var(
    values: Float[Tensor, "*S"], mask: Bool[Tensor, "*S"], unbiased: bool = True
) -> Float[Tensor, ""]:
    """Variance inside the mask; 0 for fewer than two elements.

    Args:
        values: of any shape.
        mask: True on the elements that count.
        unbiased: divide by the number of elements less one, and not by their number.
    """
    kept = zero_outside(values, mask)
    squares = masked_sum((kept - masked_mean(kept, mask)) ** 2, mask)
    return squares / (mask.sum() - int(unbiased)).clamp(min=1)


def masked_whiten(
    values: Float[Tensor, "*S"], mask: Bool[Tensor, "*S"], center: bool = True, epsilon: float = 1e-8
) -> Float[Tensor, "*S"]:
    """Scale to unit variance inside the mask; 0 outside.

    The variance is the unbiased one. Fewer than two elements have none to scale by; one element becomes
    0 when centred and keeps its value otherwise.

    Args:
        values: of any shape.
        mask: True on the elements that count.
        center: the result has mean 0; otherwise it has the mean that the values had.
        epsilon: added to the variance, in squared units of `values`.
    """
    kept = zero_outside(values, mask)
    mean = masked_mean(kept, mask)
    scaled = (kept - mean) * (masked_var(kept, mask) + epsilon).rsqrt()
    return zero_outside(scaled if center else scaled + mean, mask)


def turn_index_of(response_mask: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Number the responses of each row: k on the k-th run of True (k = 1, 2, ...), 0 elsewhere."""
    before = torch.nn.functional.pad(response_mask, (1, 0))[:, :-1]
    return (response_mask & ~before).cumsum(1) * response_mask


def token_weights(
    response_mask: Bool[Tensor, "B T"],
    mean_over: MeanOver = "token",
    turn_index: Int[Tensor, "B T"] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "B T"]:
    """Weight of each token in the loss of one optimizer step; they sum to 1 (0 if no token counts).

    A loss is `(weights * loss_per_token).sum()`. Compute the weights once, over all rows of the step: then
    any cut of the rows into micro-batches, accumulation steps or ranks gives the same sum.

    Args:
        response_mask: True on the sampled tokens of all rows of the step.
        mean_over: "token": all tokens weigh the same, so long responses weigh more; "response": all
            responses weigh the same, and so do the tokens inside each; "conversation": all rows with a
            token weigh the same, and so do the tokens inside each.
        turn_index: k on the tokens of the k-th response, for "response"; by default each run of True is
            one response.
        dtype: of the result.

    Raises:
        ValueError: for another `mean_over`.
    """
    share = response_mask.to(dtype)
    if mean_over == "response":
        index = turn_index_of(response_mask) if turn_index is None else turn_index
        share = share / _tokens_of_response(response_mask, index)
    elif mean_over == "conversation":
        share = share / response_mask.sum(1, keepdim=True).clamp(min=1)
    elif mean_over != "token":
        raise ValueError(f"mean_over is {mean_over!r}; it can be 'token', 'response' or 'conversation'")
    # Without a token all shares are 0, and so must the weights be.
    total = share.sum()
    return share / torch.where(total > 0, total, torch.ones_like(total))


def _tokens_of_response(
    response_mask: Bool[Tensor, "B T"], turn_index: Int[Tensor, "B T"]
) -> Int[Tensor, "B T"]:
    """Number of tokens of the response that each token belongs to; 1 outside responses."""
    index = torch.where(response_mask, turn_index, 0)
    width = int(index.max()) + 1 if index.numel() else 1
    counts = torch.zeros(index.size(0), width, dtype=torch.int64, device=index.device)
    counts = counts.scatter_add(1, index, response_mask.long())
    return torch.where(response_mask, counts.gather(1, index), 1)
