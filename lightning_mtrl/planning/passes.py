"""What one pass of a role's model, or one step of sampling, keeps in memory besides weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from lightning_mtrl.models.adapters import Backbone
from lightning_mtrl.models.logprobs import token_logprobs, token_logprobs_and_entropies
from lightning_mtrl.modules.workload import Pass, Sampling
from lightning_mtrl.planning.pretend import LiveBytes, Pretence
from lightning_mtrl.rollouts.cache import PackedCache
from lightning_mtrl.rollouts.memory import MASK_CELLS_PER_FORWARD, TOKENS_PER_FORWARD
from lightning_mtrl.rollouts.packing import reason_in_config
from lightning_mtrl.rollouts.sampling import SamplingConfig


@dataclass(frozen=True)
class PassMemory:
    """Bytes of a pass.

    Attributes:
        activations: hidden states, and what the backward pass needs of them.
        logprobs: what log-probabilities add to that.
    """

    activations: int
    logprobs: int


@dataclass(frozen=True)
class SamplingMemory:
    """Bytes of sampling.

    Attributes:
        cache: keys and values.
        activations: what one forward pass makes, its mask and logits, and the copies of the sampler.
    """

    cache: int
    activations: int


def pass_memory(pretence: Pretence, backbone: Backbone, wanted: Pass, checkpointing: bool) -> PassMemory:
    """Pretend one pass.

    Args:
        pretence: of the backbone.
        backbone: the model.
        wanted: the pass.
        checkpointing: whether its activations are computed again in the backward pass.
    """
    model: Any = backbone.causal(wanted.role)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()
    backbone.train(wanted.trains)
    with pretence.counting() as counted, torch.set_grad_enabled(wanted.trains):
        role = "base" if wanted.merged else wanted.role
        hidden = _hidden(backbone, role, wanted)
        # A head's backward pass ends before that of the layers below begins; apart, each has its own peak.
        above = hidden.detach().requires_grad_(wanted.trains)
        before = counted.peak
        if wanted.scored:
            _score(backbone, role, above, wanted)
        whole = counted.peak
        if wanted.trains:
            counted.peak = before
            hidden.backward(torch.zeros_like(hidden))
    _forget_gradients(backbone)
    return PassMemory(counted.peak, max(0, whole - counted.peak))


def _hidden(backbone: Backbone, role: str, wanted: Pass) -> Tensor:
    rows, tokens = wanted.rows, wanted.tokens
    ids = torch.zeros(rows, tokens, dtype=torch.long)
    seen = torch.ones(rows, tokens, tokens, dtype=torch.bool)
    return backbone.hidden(role, ids, seen, torch.zeros_like(ids), wanted.layer)


def _score(backbone: Backbone, role: str, hidden: Tensor, wanted: Pass) -> None:
    places = torch.zeros(wanted.rows * min(wanted.scored, wanted.tokens), dtype=torch.long)
    read = hidden.flatten(0, 1)[places]
    head = backbone.logit_head(role)
    if not wanted.trains:
        token_logprobs(head, read, places)
        return
    logprobs, entropies = token_logprobs_and_entropies(head, read, places)
    (logprobs.sum() + entropies.sum()).backward()


def _forget_gradients(backbone: Backbone) -> None:
    for parameter in backbone.parameters():
        parameter.grad = None


def sampling_memory(
    pretence: Pretence,
    backbone: Backbone,
    wanted: Sampling,
    sampling: SamplingConfig,
    context_length: int,
    merged: bool,
) -> SamplingMemory:
    """Pretend the largest forward passes of sampling: the first reading, and the last token.

    Args:
        pretence: of the backbone.
        backbone: the model.
        wanted: what is sampled.
        sampling: how tokens are drawn.
        context_length: tokens that a conversation may hold.
        merged: whether the policy's adapter is merged into the base meanwhile.
    """
    backbone.eval()
    model = backbone.causal("base" if merged and not backbone.full else "policy")
    per_row = max(1, -(-wanted.read // wanted.rows))
    together = min(
        wanted.rows, max(1, TOKENS_PER_FORWARD // per_row), max(1, MASK_CELLS_PER_FORWARD // per_row**2)
    )
    vocabulary = int(model.config.get_text_config().vocab_size)
    drawn = wanted.rows * vocabulary * 4 * _copies(sampling)
    if reason_in_config(model, context_length) is not None:
        return SamplingMemory(0, max(drawn, _recomputed(pretence, model, wanted)))
    with pretence.counting() as counted, torch.no_grad():
        reading, _ = _step(counted, model, together, per_row, per_row, wanted, context_length)
        last, cache = _step(counted, model, wanted.rows, 1, wanted.tokens, wanted, context_length)
    layers = max(1, len(DynamicCache(config=model.config.get_text_config()).layers))
    # A layer that grows is there twice for a moment.
    return SamplingMemory(cache + cache // layers, max(reading, last, drawn))


def _step(
    counted: LiveBytes, model: Any, rows: int, new: int, used: int, wanted: Sampling, context_length: int
) -> tuple[int, int]:
    """Bytes of one forward pass over the cache, and of the cache."""
    cache = PackedCache(
        len(DynamicCache(config=model.config.get_text_config()).layers), wanted.rows, context_length
    )
    cache.ensure(min(used, context_length))
    places = torch.zeros(rows, new, dtype=torch.long)
    cache.placement.aim(0, places, used)
    start = counted.now
    counted.peak = start
    mask = torch.zeros(rows, new, used, dtype=next(model.parameters()).dtype)
    model(
        input_ids=places, attention_mask=mask[:, None], position_ids=places,
        cache=cache, use_cache=True, logits_to_keep=1,
    )  # fmt: skip
    kept = sum(tensor.untyped_storage().nbytes() for layer in cache.packed for tensor in layer.storage)
    return counted.peak - start - kept, kept


def _recomputed(pretence: Pretence, model: Any, wanted: Sampling) -> int:
    """Bytes of a forward pass over whole rows, for models that cannot keep packed keys and values."""
    rows = min(wanted.rows, max(1, TOKENS_PER_FORWARD // wanted.tokens))
    with pretence.counting() as counted, torch.no_grad():
        ids = torch.zeros(rows, wanted.tokens, dtype=torch.long)
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    return counted.peak


def _copies(sampling: SamplingConfig) -> int:
    """Tensors of the logits' size that are alive together in `sample_tokens`."""
    if sampling.top_p < 1.0:
        return 12
    plain = sampling.temperature in (0.0, 1.0) and sampling.top_k == 0 and sampling.min_p == 0.0
    return 5 if plain else 8
