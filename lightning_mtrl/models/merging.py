"""An adapter merged into its base for a while, as for sampling; the base gets its own weights back."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn


@contextmanager
def merged(layers: Sequence[LoraLayer], role: str) -> Iterator[None]:
    """Every layer computes base plus adapter with one matrix, where that computes the same.

    In half precision it would not: an adapter's numbers are smaller than the steps between two weights of the
    base, so most of the sum would be rounded away. There, and under autocast, the adapter stays apart.

    The base's own tensors are put back afterwards, not computed back, so that no trace is left in them. A
    4-bit base on the CPU is written out in full meanwhile, because unpacking it again for every token would
    take most of the time; on an accelerator it stays packed, and its adapter unmerged, to save memory.

    Args:
        layers: the adapted layers.
        role: the adapter.
    """
    with ExitStack() as undo:
        for layer in layers:
            if role in layer.lora_A:
                _merge(cast(Any, layer), role, undo)
        yield


def merges_exactly(weight: Tensor) -> bool:
    """Whether a small change of such weights survives being added to them, and the product after that."""
    return keeps_changes(weight.dtype) and not torch.is_autocast_enabled(weight.device.type)


def keeps_changes(dtype: torch.dtype) -> bool:
    """Whether a weight of that type plus a number of an adapter's is more than the weight itself."""
    return dtype in (torch.float32, torch.float64)


def _merge(layer: Any, role: str, undo: ExitStack) -> None:
    base: nn.Module = layer.get_base_layer()
    plain = type(base.weight) is nn.Parameter and base.weight.is_floating_point()
    if is_packed(base) and cast(Tensor, base.weight).device.type == "cpu":
        undo.callback(setattr, layer, "base_layer", base)
        layer.base_layer = base = _linear(in_full(base), cast(Any, base).bias)
    elif not plain:
        return
    weight = cast(Tensor, base.weight)
    if not merges_exactly(weight):
        return
    undo.callback(setattr, layer, "base_layer", layer.base_layer)
    # A copy of the layer and not of its tensor: an output head may share its weights with the embedding.
    summed = copy.copy(base)
    summed._parameters = dict(base._parameters)
    summed.weight = nn.Parameter(weight.data + layer.get_delta_weight(role), requires_grad=False)
    undo.callback(setattr, layer, "_disable_adapters", False)
    layer.base_layer, layer._disable_adapters = summed, True


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
