"""Layers of a model that compute the same with fewer operations and keep less for the backward pass.

An object is given another class, as torch's parametrisations do, so that names, weights and everything that
peft and transformers know of it stay. Whatever a layer does not cover it leaves to the class that it had.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from jaxtyping import Float
from peft.tuners import lora
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from lightning_mtrl.models.lora_linear import AdaptedMap, lora_gated, lora_linear
from lightning_mtrl.models.onednn import OneDNNLinear, onednn_is_faster

# Of Llama and its kin, by name because importing them all would be slow.
GATED = ("LlamaMLP", "MistralMLP", "Qwen2MLP")
NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm")


def use_lean_layers(model: nn.Module) -> None:
    """Let the layers of a model that are known here compute in the lean way."""
    for module in model.modules():
        if type(module) is lora.Linear:
            module.__class__ = LoRALinear
        elif type(module) is nn.Linear and onednn_is_faster(module.weight):
            module.__class__ = OneDNNLinear
        elif type(module).__name__ in GATED and _is_silu(module):
            module.__class__ = GatedMLP
        elif type(module).__name__ in NORMS:
            module.__class__ = RMSNorm


def _is_silu(module: nn.Module) -> bool:
    return type(cast(Any, module).act_fn).__name__ in ("SiLU", "SiLUActivation")


class LoRALinear(lora.Linear):
    """peft's layer, in one operation where one plain adapter is active."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """See `peft.tuners.lora.Linear`; x is [..., in], the result [..., out]."""
        adapted = None if args or kwargs else self.adapted(x)
        return super().forward(x, *args, **kwargs) if adapted is None else lora_linear(x, adapted)

    def adapted(self, x: Tensor) -> AdaptedMap | None:
        """The map that is active, if it is a frozen one and one plain adapter in the precision of x."""
        if self._disable_adapters or self.merged_adapters or torch.is_autocast_enabled(x.device.type):
            return None
        active = [role for role in self.active_adapters if role in self.lora_A]
        if len(active) != 1 or active[0] in self.lora_variant or self.lora_bias[active[0]]:
            return None
        (role,) = active
        base, dropout = cast(nn.Linear, self.get_base_layer()), self.lora_dropout[role]
        drops = dropout.training and not isinstance(dropout, nn.Identity)
        trained = any(parameter.requires_grad for parameter in base.parameters())
        down, up = cast(nn.Linear, self.lora_A[role]).weight, cast(nn.Linear, self.lora_B[role]).weight
        if drops or trained or self.fan_in_fan_out or not x.dtype == base.weight.dtype == down.dtype:
            return None
        return AdaptedMap(base.weight, base.bias, down, up, self.scaling[role])


class GatedMLP(nn.Module):
    """down(SiLU(gate(x)) * up(x)), in one operation where all three maps are adapted ones."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Float[Tensor, "*B H"]) -> Float[Tensor, "*B H"]:
        """See `lightning_mtrl.models.lora_linear.lora_gated`."""
        layers = (self.gate_proj, self.up_proj, self.down_proj)
        maps = [layer.adapted(x) if isinstance(layer, LoRALinear) else None for layer in layers]
        gate, up, down = maps
        if gate is None or up is None or down is None:
            opened: Tensor = cast(Any, _Gate.apply)(self.gate_proj(x), self.up_proj(x))
            return cast(Tensor, self.down_proj(opened))
        return lora_gated(x, gate, up, down)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a weight, which keeps its input alone."""

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: Float[Tensor, "*B H"]) -> Float[Tensor, "*B H"]:
        """In fp32 inside; in half precision the weight comes after rounding, as in transformers."""
        x = hidden_states
        if x.dtype == torch.float32 == self.weight.dtype:
            return rms_norm(x, self.weight, self.variance_epsilon)
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        found: Tensor = self.weight * wide.to(x.dtype)
        return found


def rms_norm(x: Float[Tensor, "*B H"], weight: Float[Tensor, " H"], epsilon: float) -> Float[Tensor, "*B H"]:
    """Each vector over its root mean square: x / sqrt(mean(x^2) + epsilon) * weight.

    Source: Zhang and Sennrich 2019 (arXiv:1910.07467), Eq. 4.
    """
    return cast(Tensor, cast(Any, _RMSNorm.apply)(x, weight, epsilon))


class _Gate(torch.autograd.Function):
    """SiLU(gate) * raised, from which nothing but the two is kept."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, raised: Tensor) -> Tensor:
        ctx.save_for_backward(gate, raised)
        return functional.silu(gate).mul_(raised)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, raised = ctx.saved_tensors
        to_gate: Tensor = torch.ops.aten.silu_backward(gradient * raised, gate)
        return to_gate, functional.silu(gate).mul_(gradient)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.size(-1)).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        normed: Tensor = x * scale
        return normed.mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        to_weight = (gradient * normed).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        to_normed = gradient * weight
        # The part along x, which normalising takes away, as a product of rows: no tensor of products is made.
        along = torch.linalg.vecdot(to_normed, normed).unsqueeze(-1).div_(x.size(-1))
        return to_normed.addcmul_(normed, along, value=-1).mul_(scale), to_weight, None
