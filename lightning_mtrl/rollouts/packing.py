"""Whether a model allows packed keys and values: by what it says of itself, and by trying it once."""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from lightning_mtrl.rollouts.cache import PackedCache
from lightning_mtrl.rollouts.forwards import Forward, TransformersForward
from lightning_mtrl.rollouts.lean import LeanDecoder
from lightning_mtrl.rollouts.memory import Memory, PackedMemory, RecomputedMemory

logger = logging.getLogger(__name__)

_explained: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_disagreement: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_lean_disagreement: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
# Tokens of the two rows on which two ways to compute are compared: a token that a mask wrongly shows or hides
# counts most in a short row, and positions in a long one.
TRIED = (6, 60)
# Two right ways differ by rounding, by so much of the logits' spread at most: 0.036 in bfloat16 with a model
# of 30 layers, in which a wrong mask makes 0.12 or more.
ROUNDING = {torch.bfloat16: 0.065, torch.float16: 0.02}
FULL_ROUNDING = 1e-4


class Memories:
    """Makes the fastest memory that a model allows, for the weights that it has now.

    A model whose attention is not plain causal attention over all tokens at explicit positions (a
    sliding window shorter than the context, ALiBi, a recurrent state, its own kind of cache) is
    served by computing each row anew for each token: right, and much slower. It is logged once.

    Args:
        model: a transformers causal language model; its weights must stay as they are.
        context_length: tokens that a row can hold at most.
        pad_id: id written on padding; without influence.
    """

    def __init__(self, model: nn.Module, context_length: int, pad_id: int) -> None:
        self._model, self._context_length, self._pad_id = model, context_length, pad_id
        reason = _reason_against_packing(model, context_length)
        if reason is not None:
            _explain_once(model, reason)
        self._forward = None if reason is not None else _fastest_forward(model, context_length)

    def of(self, num_rows: int, context_length: int | None = None) -> Memory:
        """A memory of so many rows; of a shorter context, where that is known."""
        if self._forward is None:
            return RecomputedMemory(self._model, num_rows, self._pad_id)
        cache = PackedCache(_num_layers(self._model), num_rows, context_length or self._context_length)
        return PackedMemory(self._model, self._forward, cache, self._pad_id)


def _explain_once(model: nn.Module, reason: str) -> None:
    if _explained.get(model) == reason:
        return
    _explained[model] = reason
    name = type(model).__name__
    logger.warning("%s cannot keep packed keys and values (%s); each token costs its prefix.", name, reason)


def _fastest_forward(model: nn.Module, context_length: int) -> Forward:
    """The lean one where it computes the same."""
    if LeanDecoder.supports(model):
        if model not in _lean_disagreement:
            _lean_disagreement[model] = _compare(model, LeanDecoder(model, max(TRIED)))
        if not _lean_disagreement[model]:
            return LeanDecoder(model, context_length)
    return TransformersForward(model)


def _num_layers(model: nn.Module) -> int:
    return len(DynamicCache(config=_config(model)).layers)


def _config(model: nn.Module) -> Any:
    config: Any = model.config
    return config.get_text_config(decoder=True)


def _reason_against_packing(model: nn.Module, context_length: int) -> str | None:
    """What speaks against packed keys and values; None when nothing does."""
    if reason := reason_in_config(model, context_length):
        return reason
    if model not in _disagreement:
        _disagreement[model] = _compare(model, TransformersForward(model))
    return _disagreement[model] or None


def reason_in_config(model: nn.Module, context_length: int) -> str | None:
    """What a model's configuration says against packed keys and values; None when it says nothing."""
    config = _config(model)
    for layer in DynamicCache(config=config).layers:
        if isinstance(layer, DynamicSlidingWindowLayer) and layer.sliding_window >= context_length:
            continue
        if type(layer) is not DynamicLayer:
            return f"its layers keep a {type(layer).__name__}"
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return "it has local attention"
    if any(kind in repr(getattr(config, "rope_parameters", None)) for kind in ("'dynamic'", "'longrope'")):
        return "its rotary positions change with the length of the longest row"
    return None


def _compare(model: nn.Module, forward: Forward) -> str:
    """Run a few tokens both ways; empty when the logits agree."""
    size = min(int(_config(model).vocab_size), 97)
    longest = getattr(_config(model), "max_position_embeddings", None) or max(TRIED)
    ids = [[(7 * i + i // 2 + 3) % size for i in range(min(n, longest))] for n in TRIED]
    packed = PackedMemory(model, forward, PackedCache(_num_layers(model), 3, max(TRIED)), 0)
    plain = RecomputedMemory(model, 3, 0)
    try:
        with torch.no_grad():
            answers = [_answer(memory, ids) for memory in (packed, plain)]
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    agree = _difference(*answers) <= _rounding(model)
    return "" if agree else "its logits then differ from those of a plain forward"


def _difference(ours: Float[Tensor, "R V"], theirs: Float[Tensor, "R V"]) -> float:
    """Root mean square difference of a row's logits beside their standard deviation, the largest of all rows.

    What is added to all logits of a row does not count, since it changes no probability.
    """
    ours, theirs = (logits.float() - logits.float().mean(-1, keepdim=True) for logits in (ours, theirs))
    apart, spread = (ours - theirs).norm(dim=-1), theirs.norm(dim=-1)
    # Logits that are all alike must be so both ways.
    return float(torch.where(apart == 0, 0.0, apart / spread).max())


def _rounding(model: nn.Module) -> float:
    """Of the coarsest type in which a part of the model computes."""
    return max(ROUNDING.get(weight.dtype, FULL_ROUNDING) for weight in model.parameters())


def _answer(memory: Memory, ids: list[list[int]]) -> Tensor:
    """Logits at the end of two rows that were fed in parts, one of them left out and moved meanwhile."""
    of = {2: ids[0], 0: ids[1]}
    for row, whole in of.items():
        memory.extend(memory.arrange([row])[0], [whole[: len(whole) // 2]])
    rows = memory.arrange([0, 2])[0]
    logits = memory.extend(rows, [of[row][len(of[row]) // 2 :] for row in rows])
    return logits if rows == [0, 2] else logits.flip(0)
