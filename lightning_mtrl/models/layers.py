"""Hidden states of a decoder at one of its layers, without the work of the layers above."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


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
