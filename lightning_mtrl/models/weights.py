"""How many bytes the weights of a base model take, in full precision and in 4 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# NF4 with double quantization as bitsandbytes stores it (QLoRA, arXiv:2305.14314, section 3): one scale a
# block of weights, itself in 8 bits with a 32-bit scale a block of scales.
WEIGHTS_PER_SCALE, SCALES_PER_BLOCK = 64, 256
# The 16 values of NF4, the 256 values of scales, and the offset of the scales, in fp32.
BYTES_PER_LAYER = (16 + 256 + 1) * 4


def base_bytes(model: PreTrainedModel, four_bits: bool) -> int:
    """Bytes of a base model's weights and buffers; weights that are tied count once.

    Args:
        model: without adapters; its tensors may be on the device "meta".
        four_bits: its linear layers are kept in NF4; embeddings, norms and the output head are not.
    """
    packed = [module for module in _packed_layers(model) if four_bits]
    inside = {id(module.weight) for module in packed}
    others = (*model.parameters(), *model.buffers())
    plain = sum(tensor.numel() * tensor.element_size() for tensor in others if id(tensor) not in inside)
    stored = sum(nf4_bytes(module.weight.numel()) for module in packed)
    return plain + stored


def nf4_bytes(number: int) -> int:
    """Bytes of one layer with so many weights in NF4 with double quantization.

    >>> nf4_bytes(576 * 576)  # 165,888 packed, 5,184 scales in 8 bits, 21 in 32, and the layer's own
    172248
    """
    scales = -(-number // WEIGHTS_PER_SCALE)
    return -(-number // 2) + scales + -(-scales // SCALES_PER_BLOCK) * 4 + BYTES_PER_LAYER


def largest_layer_bytes(model: PreTrainedModel) -> int:
    """Bytes of the largest layer that 4 bits can hold, as it is written out to be multiplied."""
    return max((m.weight.numel() * m.weight.element_size() for m in _packed_layers(model)), default=0)


def _packed_layers(model: PreTrainedModel) -> list[nn.Linear]:
    from transformers.quantizers.base import get_keys_to_not_convert

    left_out = set(get_keys_to_not_convert(model))
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not any(_inside(name, key) for key in left_out)
    ]


def _inside(name: str, key: str) -> bool:
    return name == key or name.startswith(f"{key}.") or f".{key}." in name or name.endswith(f".{key}")
