"""Matrix products by oneDNN, where they are the faster ones."""

from __future__ import annotations

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

# Below this many weights the call costs more than it saves.
WORTH_ITS_CALL = 2**18


def onednn_is_faster(weight: Tensor) -> bool:
    """Whether a product with a weight, [out, in], is one for oneDNN: on a CPU, in fp32, and large.

    There it takes two thirds of the time of the BLAS that torch calls, measured on two cores with 300 to 1200
    rows and weights from 576 x 576 to 3072 x 576; with 8 to 64 rows it is faster in a layout of its own.
    """
    wanted = (
        weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= WORTH_ITS_CALL
    )
    return wanted and torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


def linear(
    x: Float[Tensor, "M in"], weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None = None
) -> Float[Tensor, "M out"]:
    """The product x weight^T + bias, without gradients; the weight may be a transposed view at no cost."""
    if not onednn_is_faster(weight):
        return functional.linear(x, weight, bias)
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found


def by_rows(apply: Any, x: Float[Tensor, "... in"], *rest: Any) -> Float[Tensor, "... out"]:
    """Apply a function of rows, [M, in] to [M, out], to a tensor of any shape."""
    found: Tensor = apply(x.reshape(-1, x.size(-1)), *rest)
    return found.view(*x.shape[:-1], -1)


class OneDNNLinear(nn.Linear):
    """A linear layer whose products are oneDNN's, also those of its backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        """See `torch.nn.Linear`; x is [..., in], the result [..., out]."""
        alike = x.dtype == self.weight.dtype and x.device == self.weight.device
        if not alike or not onednn_is_faster(self.weight) or torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        return by_rows(cast(Any, _Linear.apply), x, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        to_x = linear(gradient, weight.t()) if wanted[0] else None
        # oneDNN is no faster at this one, over the tokens.
        to_weight = gradient.t() @ x if wanted[1] else None
        return to_x, to_weight, gradient.sum(0) if wanted[2] else None
