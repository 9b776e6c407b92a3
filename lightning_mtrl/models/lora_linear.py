"""Adapted linear maps as few operations, for training and scoring.

peft computes `base(x) + lora_B(lora_A(x)) * scaling` one operation after the other, each of which writes a
tensor of the output's size, and so does its backward pass. Here the adapter is added within its product, the
base's product is oneDNN's where that is the faster one, and a gated block of three maps keeps only what
cannot be computed again in a moment.

Shape letters: M tokens, I inputs, O outputs, K rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from lightning_mtrl.models.onednn import by_rows, linear

Gradients = tuple[Tensor | None, ...]


class AdaptedMap(NamedTuple):
    """x -> x weight^T + bias + scaling (x down^T) up^T: a frozen map and an adapter.

    Source: Hu et al. 2021 (arXiv:2106.09685), Eq. 3.

    Attributes:
        weight: of the frozen map, [O, I].
        bias: of the frozen map, [O], or None.
        down: A of the paper, [K, I].
        up: B of the paper, [O, K].
        scaling: alpha over rank.
    """

    weight: Tensor
    bias: Tensor | None
    down: Tensor
    up: Tensor
    scaling: float

    def apply(self, x: Float[Tensor, "M I"]) -> tuple[Float[Tensor, "M O"], Float[Tensor, "M K"]]:
        """The output, and what the adapter has of the input between its two products."""
        low = x @ self.down.t()
        return linear(x, self.weight, self.bias).addmm_(low, self.up.t(), alpha=self.scaling), low

    def gradients(
        self, gradient: Float[Tensor, "M O"], x: Tensor, low: Tensor, to_x: bool = True
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Gradients to x (None unless wanted), down and up."""
        to_low = (gradient @ self.up).mul_(self.scaling)
        to_up = (gradient.t() @ low).mul_(self.scaling)
        found = linear(gradient, self.weight.t()).addmm_(to_low, self.down) if to_x else None
        return found, to_low.t() @ x, to_up


def lora_linear(x: Float[Tensor, "... I"], adapted: AdaptedMap) -> Float[Tensor, "... O"]:
    """An adapted map, with gradients to x and the adapter."""
    return by_rows(cast(Any, _LoRALinear.apply), x, *adapted)


def lora_gated(
    x: Float[Tensor, "... I"], gate: AdaptedMap, up: AdaptedMap, down: AdaptedMap
) -> Float[Tensor, "... I"]:
    """down(SiLU(gate(x)) * up(x)), with gradients to x and the three adapters.

    Of the four tensors of the hidden width that autograd would keep it keeps two.

    Source: Shazeer 2020 (arXiv:2002.05202), Eq. 6 (SwiGLU).
    """
    return by_rows(cast(Any, _LoRAGated.apply), x, *gate, *up, *down)


class _LoRALinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *parts: Any) -> Tensor:
        adapted = AdaptedMap(*parts)
        found, low = adapted.apply(x)
        _keep(ctx, [adapted], x, low)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        (adapted,), (x, low) = _kept(ctx)
        to_x, to_down, to_up = adapted.gradients(gradient, x, low, ctx.needs_input_grad[0])
        return to_x, *_of_parts(to_down, to_up)


class _LoRAGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *parts: Any) -> Tensor:
        gate, up, down = (AdaptedMap(*parts[start : start + 5]) for start in (0, 5, 10))
        gated, gate_low = gate.apply(x)
        raised, up_low = up.apply(x)
        found, down_low = down.apply(functional.silu(gated).mul_(raised))
        _keep(ctx, [gate, up, down], x, gated, raised, gate_low, up_low, down_low)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        (gate, up, down), (x, gated, raised, gate_low, up_low, down_low) = _kept(ctx)
        opened = functional.silu(gated)
        to_product, *of_down = down.gradients(gradient, opened * raised, down_low)
        assert to_product is not None
        to_raised = opened.mul_(to_product)
        to_gated = torch.ops.aten.silu_backward(to_product.mul_(raised), gated)
        to_x, *of_gate = gate.gradients(to_gated, x, gate_low)
        more, *of_up = up.gradients(to_raised, x, up_low)
        assert to_x is not None
        assert more is not None
        return to_x.add_(more), *_of_parts(*of_gate), *_of_parts(*of_up), *_of_parts(*of_down)


def _keep(ctx: Any, maps: list[AdaptedMap], *tensors: Tensor) -> None:
    weights = [part for adapted in maps for part in (adapted.weight, adapted.down, adapted.up)]
    ctx.save_for_backward(*tensors, *weights)
    ctx.scalings = [adapted.scaling for adapted in maps]


def _kept(ctx: Any) -> tuple[list[AdaptedMap], tuple[Tensor, ...]]:
    # Read once: under gradient checkpointing each reading is a computation, and a second one is refused.
    saved, number = ctx.saved_tensors, 3 * len(ctx.scalings)
    tensors, weights = saved[:-number], saved[-number:]
    maps = [
        AdaptedMap(weights[3 * place], None, weights[3 * place + 1], weights[3 * place + 2], scaling)
        for place, scaling in enumerate(ctx.scalings)
    ]
    return maps, tensors


def _of_parts(to_down: Tensor, to_up: Tensor) -> Gradients:
    """In the order of an `AdaptedMap`."""
    return None, None, to_down, to_up, None
