"""A decoder's forward for sampling alone: the layers of Llama and its kin, with nothing around them.

It computes what transformers' own forward computes, from the same weights, in fewer and larger operations:
one product for queries, keys and values, activations and sums within the products, grouped-query attention
without repeated keys, linear layers that see no padding. `lightning_mtrl.rollouts.packing` compares the two
before it is used.

Shape letters: R rows, Q new tokens of a row (at most), M new tokens of all rows, S slots, H heads, K heads of
keys, D width of a head, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from lightning_mtrl.models.onednn import WORTH_ITS_CALL
from lightning_mtrl.rollouts.cache import PackedCache, PackedLayer
from lightning_mtrl.rollouts.linears import FusedLinear, full_linear, fused

# Their layers are the same: RMS norm, rotary positions, gated SiLU.
LEAN_MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")


def laid_out_bytes(model: nn.Module) -> int:
    """Bytes of the copies of its weights that sampling with a model in fp32 on a CPU makes; 0 for others."""
    if type(model).__name__ not in LEAN_MODELS:
        return 0
    sizes = [layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear)]
    return sum(4 * size for size in sizes if size >= WORTH_ITS_CALL)


class Norm:
    """Root-mean-square normalisation (arXiv:1910.07467) with the weights of a module."""

    def __init__(self, module: Any) -> None:
        self._weight: Tensor = module.weight.detach()
        self._epsilon = float(module.variance_epsilon)

    def __call__(self, hidden: Float[Tensor, "M H"]) -> Float[Tensor, "M H"]:
        return functional.rms_norm(hidden, (hidden.size(-1),), self._weight, self._epsilon)


@dataclass(frozen=True)
class _Layer:
    norm: Norm
    query_key_value: FusedLinear
    output: FusedLinear
    mlp_norm: Norm
    gate: FusedLinear
    up: FusedLinear
    down: FusedLinear


@dataclass(frozen=True)
class _Aim:
    """Where the tokens of a forward stand.

    Attributes:
        cos, sin: of their positions.
        places: of their heads in the cache.
        padded: their row and column among the padded queries; None where each row has one token.
        mask: of the padded queries.
    """

    cos: Float[Tensor, "M 1 D"]
    sin: Float[Tensor, "M 1 D"]
    places: Int[Tensor, " N"]
    padded: tuple[Int[Tensor, " M"], Int[Tensor, " M"]] | None
    mask: Float[Tensor, "R 1 GQ S"]


class LeanDecoder:
    """Logits of the last new token of each row.

    It holds the weights as they are when it is made.

    Args:
        model: a model for which `supports` is true.
        context_length: highest number of positions.
    """

    def __init__(self, model: Any, context_length: int) -> None:
        config, decoder = model.config, model.model
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._embedding: Tensor = decoder.embed_tokens.weight.detach()
        self._norm, self._head = Norm(decoder.norm), fused([_full(model.lm_head)])
        self._layers = [_read(layer) for layer in decoder.layers]
        positions = torch.arange(context_length, device=self._embedding.device)[None]
        cos, sin = decoder.rotary_emb(self._embedding[:1], positions)
        self._cos, self._sin = cos[0, :, None], sin[0, :, None]

    @staticmethod
    def supports(model: nn.Module) -> bool:
        """Whether the model has the layers that are written out here, with weights in full."""
        if type(model).__name__ not in LEAN_MODELS:
            return False
        causal: Any = model
        config = causal.config
        if config.hidden_act != "silu" or getattr(config, "rope_parameters", None) is None:
            return False
        linears = [causal.lm_head, *(linear for layer in causal.model.layers for linear in _linears(layer))]
        return all(full_linear(linear) is not None for linear in linears)

    def __call__(
        self,
        tokens: Int[Tensor, "R Q"],
        positions: Int[Tensor, "R Q"],
        real: Bool[Tensor, "R Q"] | None,
        mask: Float[Tensor, "R Q S"],
        cache: PackedCache,
    ) -> Float[Tensor, "R V"]:
        """See `lightning_mtrl.rollouts.forwards.Forward`."""
        aim, ids = self._aim(tokens, positions, real, mask, cache)
        hidden = self._embedding[ids]
        for layer, kept in zip(self._layers, cache.packed, strict=True):
            attended = self._attend(layer.norm(hidden), layer, kept, aim)
            hidden = layer.output.plus(attended, hidden)
            normed = layer.mlp_norm(hidden)
            hidden = layer.down.plus(layer.up.times(normed, layer.gate.silu(normed)), hidden)
        if aim.padded is not None:
            hidden = hidden[(aim.padded[1] == tokens.size(1) - 1).nonzero().squeeze(1)]
        return self._head(self._norm(hidden))

    def _aim(
        self, tokens: Tensor, positions: Tensor, real: Tensor | None, mask: Tensor, cache: PackedCache
    ) -> tuple[_Aim, Tensor]:
        place = cache.placement
        groups = self._heads // self._kv_heads
        if real is None:
            flat = positions[:, 0]
            places = place.flat_places(place.rows[:, 0], place.slots[:, 0], self._kv_heads)
            return _Aim(self._cos[flat], self._sin[flat], places, None, mask[:, None]), tokens[:, 0]
        rows, columns = real.nonzero(as_tuple=True)
        flat = positions[rows, columns]
        # Queries of one head of keys stand one behind the other, group by group.
        repeated = mask[:, None].repeat(1, 1, groups, 1)
        places = place.flat_places(rows + place.first, place.slots[rows, columns], self._kv_heads)
        aim = _Aim(self._cos[flat], self._sin[flat], places, (rows, columns), repeated)
        return aim, tokens[rows, columns]

    def _attend(self, inputs: Tensor, layer: _Layer, kept: PackedLayer, aim: _Aim) -> Float[Tensor, "M HD"]:
        heads, kv_heads = self._heads, self._kv_heads
        projected = layer.query_key_value(inputs)
        width = projected.size(-1) // (heads + 2 * kv_heads)
        split = projected.view(-1, heads + 2 * kv_heads, width)
        turned = _rotate(split[:, : heads + kv_heads], aim.cos, aim.sin)
        keys, values = kept.write(aim.places, turned[:, heads:], split[:, heads + kv_heads :])
        queries = self._grouped(turned[:, :heads], keys.size(0), aim)
        found = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=aim.mask)
        return self._ungrouped(found, aim)

    def _grouped(self, queries: Tensor, rows: int, aim: _Aim) -> Float[Tensor, "R K GQ D"]:
        heads, kv_heads, width = self._heads, self._kv_heads, queries.size(-1)
        if aim.padded is None:
            return queries.reshape(rows, kv_heads, heads // kv_heads, width)
        size = aim.mask.size(2) // (heads // kv_heads)
        padded = queries.new_zeros(rows, size, heads, width)
        padded[aim.padded] = queries
        by_key = padded.view(rows, size, kv_heads, -1, width).permute(0, 2, 3, 1, 4)
        return by_key.reshape(rows, kv_heads, -1, width)

    def _ungrouped(self, found: Float[Tensor, "R K GQ D"], aim: _Aim) -> Float[Tensor, "M HD"]:
        rows, kv_heads, _, width = found.shape
        if aim.padded is None:
            return found.reshape(rows, -1)
        groups = self._heads // kv_heads
        by_token = found.view(rows, kv_heads, groups, -1, width).permute(0, 3, 1, 2, 4)
        return by_token.reshape(rows, -1, self._heads * width)[aim.padded]


def _rotate(split: Float[Tensor, "M N D"], cos: Tensor, sin: Tensor) -> Float[Tensor, "M N D"]:
    half = split.size(-1) // 2
    crossed = torch.cat((-split[..., half:], split[..., :half]), -1)
    return split * cos + crossed * sin


def _linears(layer: Any) -> list[nn.Module]:
    attention, mlp = layer.self_attn, layer.mlp
    first = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    return [*first, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def _read(layer: Any) -> _Layer:
    q, k, v, o, gate, up, down = map(_full, _linears(layer))
    return _Layer(
        Norm(layer.input_layernorm),
        fused([q, k, v]),
        fused([o]),
        Norm(layer.post_attention_layernorm),
        fused([gate]),
        fused([up]),
        fused([down]),
    )


def _full(layer: nn.Module) -> nn.Module:
    linear = full_linear(layer)
    if linear is None:
        raise ValueError(f"{type(layer).__name__} is not an ordinary linear layer; ask `supports` first")
    return linear
