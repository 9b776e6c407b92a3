"""Hidden states of a decoder at one of its layers, without the work of the layers above."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd


def hidden_states(decoder: Any, layer: int | None, **inputs: Any) -> Tensor:
    """What a decoder computes for some tokens, [B, T, H].

    Args:
        decoder: a language model without its output head.
        layer: None for the last layer (normalised), else the output of that layer, 1 being the first.
        **inputs: of the decoder's forward.

    Raises:
        ValueError: if the decoder has no such layer.
    """
    if layer is None:
        last: Tensor = decoder(**inputs).last_hidden_state
        return last
    number = decoder.config.num_hidden_layers
    if not 1 <= layer <= number:
        raise ValueError(f"layer must be from 1 to {number}, got {layer}")
    if layer < number and isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        with _cut_after(decoder, layer):
            cut: Tensor = decoder(**inputs).last_hidden_state
        return cut
    found: Tensor = decoder(**inputs, output_hidden_states=True).hidden_states[layer]
    return found


def square_mask(mask: Bool[Tensor, "B T T"], attention: str, dtype: torch.dtype) -> Tensor:
    """Which position looks at which, as an implementation of attention takes it, [B, 1, T, T].

    Args:
        mask: true where a row's position looks at a column's.
        attention: name of the implementation; "sdpa" takes truth values, others take what is added.
        dtype: of the model's weights.
    """
    mask = mask[:, None]
    if attention == "sdpa":
        return mask
    dtype = dtype if dtype.is_floating_point else torch.float32
    added = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return added.masked_fill(~mask, torch.finfo(dtype).min)


def remove_dropout(model: nn.Module) -> None:
    """Set every probability of dropping something, units or layers, to 0.

    Many are numbers that a forward reads in training mode, also those of some `nn.Dropout`, so that the mode
    of modules alone is not enough; and training mode has to stay, since gradient checkpointing goes by it.
    """
    for module in model.modules():
        for name, value in vars(module).items():
            chance = name == "p" and isinstance(module, _DropoutNd)
            if isinstance(value, float) and (chance or "drop" in name):
                setattr(module, name, 0.0)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards each part of the model is back in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _cut_after(decoder: Any, layer: int) -> Iterator[None]:
    """The decoder ends after some layers for a while, and nothing is normalised behind them."""
    layers, norm = decoder.layers, getattr(decoder, "norm", None)
    decoder.layers = layers[:layer]
    if norm is not None:
        decoder.norm = nn.Identity()
    try:
        yield
    finally:
        decoder.layers = layers
        if norm is not None:
            decoder.norm = norm
