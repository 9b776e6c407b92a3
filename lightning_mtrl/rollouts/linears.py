"""Linear maps for sampling: weights laid out once for the few rows of a decoding step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from lightning_mtrl.models.onednn import onednn_is_faster

# Rows that a packed layout is made for. It serves any number; those of a step are what counts.
PACKED_ROWS = 32


class FusedLinear:
    """Several linear maps of one input, as one product.

    On a CPU the weights of a large map in fp32 are copied into oneDNN's own layout, which halves the time of
    a step with 8 to 64 rows; elsewhere the map is an ordinary one.

    Args:
        weights: [out, in] each, over the same inputs.
        bias: of all outputs, or None.
    """

    def __init__(self, weights: Sequence[Float[Tensor, "_ in"]], bias: Tensor | None = None) -> None:
        weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        self._bias = bias
        self._is_packed = onednn_is_faster(weight)
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS) if self._is_packed else weight
        )

    def __call__(self, inputs: Float[Tensor, "M in"]) -> Float[Tensor, "M out"]:
        return self._product(inputs, "none")

    def silu(self, inputs: Float[Tensor, "M in"]) -> Float[Tensor, "M out"]:
        """The product and its SiLU, as one."""
        return self._product(inputs, "swish") if self._is_packed else functional.silu(self(inputs))

    def times(self, inputs: Float[Tensor, "M in"], factor: Tensor) -> Float[Tensor, "M out"]:
        """The product, multiplied element by element."""
        return self._joined(inputs, factor, "mul") if self._is_packed else self(inputs) * factor

    def plus(self, inputs: Float[Tensor, "M in"], summand: Tensor) -> Float[Tensor, "M out"]:
        """The product and another tensor, added."""
        return self._joined(inputs, summand, "add") if self._is_packed else self(inputs) + summand

    def _product(self, inputs: Tensor, then: str) -> Tensor:
        if not self._is_packed:
            return functional.linear(inputs, self._weight, self._bias)
        found: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._weight, self._bias, then, [], "")
        return found

    def _joined(self, inputs: Tensor, other: Tensor, how: str) -> Tensor:
        joined = torch.ops.mkldnn._linear_pointwise.binary
        found: Tensor = joined(inputs, other, self._weight, self._bias, how)
        return found


def fused(linears: Sequence[nn.Module]) -> FusedLinear:
    """One map from linear layers that have weights in full (see `full_linear`)."""
    weights = [_tensor(linear.weight) for linear in linears]
    biases = [getattr(linear, "bias", None) for linear in linears]
    if all(bias is None for bias in biases):
        return FusedLinear(weights)
    filled = [w.new_zeros(w.size(0)) if b is None else b for w, b in zip(weights, biases, strict=True)]
    return FusedLinear(weights, torch.cat(filled))


def full_linear(layer: nn.Module) -> nn.Module | None:
    """The ordinary linear layer that a layer stands for just now; None when it computes something else.

    An adapted layer is an ordinary one while its adapter is merged, or while none is active.
    """
    from peft.tuners.lora import LoraLayer

    if isinstance(layer, LoraLayer):
        if not layer.disable_adapters and layer.active_adapters:
            return None
        layer = layer.get_base_layer()
    weight = getattr(layer, "weight", None)
    ordinary = isinstance(layer, nn.Linear) and type(weight) is nn.Parameter and weight.is_floating_point()
    return layer if ordinary else None


def _tensor(weight: object) -> Tensor:
    assert isinstance(weight, Tensor)
    return weight.detach()
