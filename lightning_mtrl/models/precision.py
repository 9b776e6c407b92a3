"""Float32 in the middle of mixed precision, where autocast rounds again what was made float32 before."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor


def no_autocast(like: Tensor) -> torch.autocast:
    """Every operation in the precision of its inputs, on the device of a tensor."""
    return torch.autocast(like.device.type, enabled=False)


def in_float32(head: Callable[[Tensor], Tensor], hidden: Float[Tensor, "*N H"]) -> Float[Tensor, "*N O"]:
    """Outputs of a head with float32 weights.

    Eight bits of a value are too few for returns and advantages: bfloat16 has no number between 0.996 and 1.

    Args:
        head: reads the hidden states.
        hidden: in the precision that the model computes in.
    """
    with no_autocast(hidden):
        return head(hidden.float())
