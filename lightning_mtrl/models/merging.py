"""An adapter merged into its base for a while, as for sampling; the base gets its own weights back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn


@contextmanager
def merged(layers: Sequence[LoraLayer], role: str) -> Iterator[None]:
    """Every layer computes base plus adapter with one matrix.

    The base's own tensors are put back afterwards, not computed back, so that no trace is left in them. A
    4-bit base on the CPU is written out in full meanwhile, because unpacking it again for every token would
    take most of the time; on an accelerator it stays packed, and its adapter unmerged, to save memory.

    Args:
        layers: the adapted layers.
        role: the adapter.
    """
    undo: list[tuple[LoraLayer, Any]] = []
    for layer in (each for each in layers if role in each.lora_A):
        base = layer.get_base_layer()
        delta = cast(Any, layer).get_delta_weight
        if type(base.weight) is nn.Parameter and base.weight.is_floating_point():
            undo.append((layer, base.weight.data))
            base.weight.data = base.weight.data + delta(role).to(base.weight.dtype)
        elif is_packed(base) and base.weight.device.type == "cpu":
            undo.append((layer, base))
            full = in_full(base)
            cast(Any, layer).base_layer = _linear(full + delta(role).to(full.dtype), cast(Any, base).bias)
        else:
            continue
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, kept in undo:
            if isinstance(kept, nn.Module):
                cast(Any, layer).base_layer = kept
            else:
                layer.get_base_layer().weight.data = kept
            layer._disable_adapters = False


def is_packed(linear: nn.Module) -> bool:
    """True for a layer whose weights are stored in 4 bits."""
    return hasattr(linear.weight, "quant_state")


def in_full(linear: nn.Module) -> Tensor:
    """The weights that a 4-bit layer stands for."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn.modules import Params4bit

    # On CPUs with bfloat16 instructions bitsandbytes may reorder the weights when they are first used without
    # gradients, and only collecting the state puts them back; before that they would be read wrongly.
    linear.state_dict()
    weight = linear.weight
    assert isinstance(weight, Params4bit)
    full: Tensor = dequantize_4bit(weight.data, weight.quant_state)
    return full


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(weight.size(1), weight.size(0), bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.register_parameter("bias", None if bias is None else nn.Parameter(bias.data, requires_grad=False))
    return linear
