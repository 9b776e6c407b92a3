"""Matrix products by oneDNN, where they are the faster ones."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
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
    """X weight^T + bias, without gradients; the weight may be a transposed view, which costs nothing."""
    if not onednn_is_faster(weight):
        return functional.linear(x, weight, bias)
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found
