"""Roles written to the disk in the forms that other programs load: a peft adapter, or a whole model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from lightning_mtrl.models.adapters import Backbone
from lightning_mtrl.models.merging import in_full

_BASE = ".base_layer"


def save_role(backbone: Backbone, role: str, folder: Path) -> None:
    """Write a role as it is trained: its adapter as a peft folder, or with full fine-tuning its model.

    Args:
        backbone: the model.
        role: such as "policy".
        folder: exists and is empty.
    """
    if backbone.full:
        save_merged(backbone, role, folder)
        return
    assert isinstance(backbone.base, PeftModel)
    backbone.base.save_pretrained(str(folder), selected_adapters=[role])
    # peft puts every adapter but "default" into a folder of its own; other programs look one level higher.
    inner = folder / role
    (folder / "README.md").unlink(missing_ok=True)  # a form that nobody filled in
    for file in inner.iterdir():
        file.rename(folder / file.name)
    inner.rmdir()


def save_merged(backbone: Backbone, role: str, folder: Path) -> float:
    """Write a role as a model of its own, which needs neither peft nor the base.

    The adapter is added to the weights, and the sum rounded to their own type. A 4-bit base is written out in
    full: its weights are those that the 4 bits stand for, so the merged model computes what the run computed.

    Args:
        backbone: the model.
        role: such as "policy".
        folder: exists and is empty.

    Returns:
        The error of that rounding over the adapter's change of the weights (Frobenius norms): about 1e-4 or
        less in fp32; in half precision it can come near 1, which says that nothing of the adapter is left.
    """
    model = backbone.causal(role)
    # A fresh model has neither adapters nor traces of how the base was stored.
    fresh = AutoModelForCausalLM.from_config(_plain_config(model), dtype=_dtype(model))
    sources, rounding = _tensors_by_plain_name(model), _Rounding()
    fresh.load_state_dict(
        {name: _merged(model, *sources[name], role, rounding) for name in fresh.state_dict()}
    )
    if model.generation_config is not None:
        fresh.generation_config = model.generation_config
    fresh.save_pretrained(folder)
    return rounding.share()


class _Rounding:
    """Squared norms over all layers: of adapters, and of what rounding did to the sums with them."""

    def __init__(self) -> None:
        self.error, self.change = 0.0, 0.0

    def add(self, exact: Tensor, rounded: Tensor, change: Tensor) -> None:
        self.error += float((rounded - exact).square().sum())
        self.change += float(change.square().sum())

    def share(self) -> float:
        return math.sqrt(self.error / self.change) if self.change else 0.0


def _tensors_by_plain_name(model: PreTrainedModel) -> dict[str, tuple[str, Tensor]]:
    """Every tensor with its name in this model, by its name in a model without adapters."""
    found: list[tuple[str, Tensor]] = list(model.named_parameters(remove_duplicate=False))
    found += model.named_buffers(remove_duplicate=False)
    return {name.replace(_BASE, ""): (name, value) for name, value in found}


@torch.no_grad()
def _merged(model: PreTrainedModel, name: str, value: Tensor, role: str, rounding: _Rounding) -> Tensor:
    if hasattr(value, "quant_state"):
        value = in_full(model.get_submodule(name.removesuffix(".weight"))).to(_dtype(model))
    if not name.endswith(f"{_BASE}.weight"):
        return value
    layer = model.get_submodule(name.removesuffix(f"{_BASE}.weight"))
    if not isinstance(layer, LoraLayer) or role not in layer.lora_A:
        return value
    delta: Tensor = layer.get_delta_weight(role)  # type: ignore[operator]  # every kind of LoRA layer has it
    # On the CPU, where the result goes: some devices (Apple's) have no double precision.
    delta = delta.cpu().double()
    exact = value.cpu().double() + delta
    rounded = exact.to(value.dtype)
    rounding.add(exact, rounded.double(), delta)
    return rounded


def _plain_config(model: PreTrainedModel) -> Any:
    config = type(model.config).from_dict(model.config.to_dict())
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if isinstance(model.get_output_embeddings(), LoraLayer):
        # It was the embedding's weights as well, which do not change with it.
        config.tie_word_embeddings = False
    return config


def _dtype(model: PreTrainedModel) -> torch.dtype:
    # The embedding is never stored in 4 bits.
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.dtype
