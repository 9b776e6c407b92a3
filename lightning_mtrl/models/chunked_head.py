"""A linear output head in chunks of tokens, with exact gradients; only one chunk of logits exists at a time.

Shape letters: N tokens, C tokens of a chunk, V vocabulary, H hidden. With z the logits of a token, y its
target, l = log softmax(z), p = exp(l) and S = -sum_v p_v l_v the entropy, both gradients are short:

    d l_y / d z = e_y - p        d S / d z = -p (l + S)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_mtrl.models.onednn import linear, onednn_is_faster
from lightning_mtrl.models.precision import no_autocast

# Logits in a chunk, by measurement on 2 cores with a vocabulary of 49152: half as many are slower, twice as
# many no faster. A trained head also adds up a gradient of its own size once a chunk: its chunks are larger.
FROZEN_ELEMENTS = 12 * 1024 * 1024
TRAINED_ELEMENTS = 24 * 1024 * 1024


@dataclass(frozen=True)
class Squash:
    """What a model does to its logits after the head.

    Attributes:
        softcap: they are squashed to (-softcap, softcap) by a tanh; 0 for none.
        scale: they are multiplied by this number before.
    """

    softcap: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True)
class Entropy:
    """What is asked about the entropies.

    Attributes:
        wanted: False leaves them at 0.
        trained: whether a loss may depend on them; costs a third matrix product with a frozen head.
    """

    wanted: bool
    trained: bool


Pair = tuple[Float[Tensor, " N"], Float[Tensor, " N"]]


def head_logprobs(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    bias: Float[Tensor, " V"] | None,
    targets: Int[Tensor, " N"],
    squash: Squash,
    entropy: Entropy,
) -> Pair:
    """Log-probability of each target and entropy of each distribution, in nats.

    Products are in the weight's precision (under autocast in autocast's), everything else in fp32. With a
    frozen head the gradient to the hidden states is found in the forward pass, [N, H]; with a trained one
    the logits are computed again in the backward pass.

    Args:
        hidden: hidden states that predict the targets.
        weight: of the head.
        bias: of the head, or None.
        targets: token ids.
        squash: what happens to the logits after the head.
        entropy: what is asked about the entropies.
    """
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    if not torch.is_grad_enabled() or not (trained or hidden.requires_grad):
        return _score(_Chunk.of(hidden, weight, bias, squash, FROZEN_ELEMENTS), hidden, targets, entropy)
    function = _TrainedHead if trained else _FrozenHead
    apply = cast(Callable[..., Pair], function.apply)
    return apply(hidden, weight, bias, targets, squash, entropy)


class _Chunk:
    """Room for one chunk of logits, used again by the next, since fresh memory of this size is slow."""

    def __init__(self, weight: Tensor, bias: Tensor | None, squash: Squash, rows: int) -> None:
        self.weight, self.bias, self.squash, self.rows = weight, bias, squash, rows
        self.dtype = torch.promote_types(weight.dtype, torch.float32)

        def room(dtype: torch.dtype) -> Tensor:
            return torch.empty(rows, weight.size(0), dtype=dtype, device=weight.device)

        self.logits, self.logprobs = room(self.dtype), room(self.dtype)
        self.product = None if weight.dtype == self.dtype else room(weight.dtype)
        self.slope = room(self.dtype) if squash.softcap else None

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, squash: Squash, elements: int) -> _Chunk:
        device = hidden.device.type
        if torch.is_autocast_enabled(device):
            weight = weight.to(torch.get_autocast_dtype(device))
        rows = min(hidden.size(0), max(1, elements // weight.size(0)))
        return cls(weight.detach(), None if bias is None else bias.detach(), squash, rows)

    def read(self, hidden: Float[Tensor, "C H"]) -> Float[Tensor, "C V"]:
        """Log-probabilities of the whole vocabulary; they stand until the next call."""
        size, logits = hidden.size(0), self._product(hidden.to(self.weight.dtype))
        if self.bias is not None:
            logits.add_(self.bias)
        if self.squash.scale != 1.0:
            logits.mul_(self.squash.scale)
        if self.slope is not None:
            logits.div_(self.squash.softcap).tanh_()
            torch.mul(logits, logits, out=self.slope[:size]).neg_().add_(1.0)
            logits.mul_(self.squash.softcap)
        return torch.log_softmax(logits, -1, out=self.logprobs[:size])

    def _product(self, hidden: Float[Tensor, "C H"]) -> Float[Tensor, "C V"]:
        if onednn_is_faster(self.weight):
            # It takes no place for its result, so the last one is given back before this one is made.
            del self.logits
            self.logits = linear(hidden, self.weight)
            return self.logits
        logits = self.logits[: hidden.size(0)]
        product = logits if self.product is None else self.product[: hidden.size(0)]
        torch.mm(hidden, self.weight.t(), out=product)
        return logits if self.product is None else logits.copy_(product)

    def probabilities(self, logprobs: Float[Tensor, "C V"]) -> Float[Tensor, "C V"]:
        """Of what `read` gave, in the place of the logits."""
        return torch.exp(logprobs, out=self.logits[: logprobs.size(0)])

    def before_squash(self, gradient: Float[Tensor, "C V"]) -> Float[Tensor, "C V"]:
        """A gradient with respect to the head's output, in place and in the weight's precision."""
        if self.slope is not None:
            gradient.mul_(self.slope[: gradient.size(0)])
        if self.squash.scale != 1.0:
            gradient.mul_(self.squash.scale)
        return gradient.to(self.weight.dtype)

    def parts(self, number: int) -> list[slice]:
        return [slice(start, start + self.rows) for start in range(0, number, max(1, self.rows))]


def _score(chunk: _Chunk, hidden: Tensor, targets: Tensor, entropy: Entropy) -> Pair:
    chosen = hidden.new_zeros(hidden.size(0), dtype=chunk.dtype)
    entropies = torch.zeros_like(chosen)
    with torch.no_grad(), no_autocast(hidden):
        for part in chunk.parts(hidden.size(0)):
            logprobs = chunk.read(hidden[part])
            chosen[part] = _at(logprobs, targets[part])
            if entropy.wanted:
                entropies[part] = _entropies(logprobs, chunk.probabilities(logprobs))
    return chosen, entropies


class _FrozenHead(torch.autograd.Function):
    """Gradients to the hidden states alone, found in the forward pass: they do not depend on the loss."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        squash: Squash,
        entropy: Entropy,
    ) -> Pair:
        chunk = _Chunk.of(hidden, weight, bias, squash, FROZEN_ELEMENTS)
        chosen = hidden.new_zeros(hidden.size(0), dtype=chunk.dtype)
        entropies = torch.zeros_like(chosen)
        slopes = torch.empty_like(hidden)
        entropy_slopes = torch.empty_like(hidden) if entropy.trained else None
        with no_autocast(hidden):
            for part in chunk.parts(hidden.size(0)):
                logprobs, there = chunk.read(hidden[part]), targets[part, None]
                chosen[part] = _at(logprobs, targets[part])
                minus = chunk.probabilities(logprobs)
                if entropy.wanted:
                    entropies[part] = _entropies(logprobs, minus)
                if entropy_slopes is not None:
                    change = logprobs.add_(entropies[part, None]).mul_(minus)
                    entropy_slopes[part] = (chunk.before_squash(change) @ chunk.weight).neg_()
                minus.scatter_add_(1, there, minus.new_full(there.shape, -1.0))
                slopes[part] = (chunk.before_squash(minus) @ chunk.weight).neg_()
                del minus  # so that the chunk's logits can be given back
        ctx.save_for_backward(slopes, entropy_slopes)
        if not entropy.trained:
            ctx.mark_non_differentiable(entropies)
        return chosen, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        slopes, entropy_slopes = ctx.saved_tensors
        found = slopes * gradients[0][:, None]
        if entropy_slopes is not None:
            found.addcmul_(entropy_slopes.to(found.dtype), gradients[1][:, None].to(found.dtype))
        return found.to(slopes.dtype), None, None, None, None, None


class _TrainedHead(torch.autograd.Function):
    """Gradients to hidden states, weight and bias, from logits that are made again if they are many."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        squash: Squash,
        entropy: Entropy,
    ) -> Pair:
        chunk = _Chunk.of(hidden, weight, bias, squash, TRAINED_ELEMENTS)
        chosen, entropies = _score(chunk, hidden, targets, entropy)
        ctx.save_for_backward(hidden, weight, bias, targets, entropies)
        ctx.squash, ctx.entropy, ctx.dtype = squash, entropy, chunk.weight.dtype
        # A single chunk is there already and would be made again at once, so it is kept instead.
        ctx.only_chunk = chunk if len(chunk.parts(hidden.size(0))) == 1 else None
        if not entropy.trained:
            ctx.mark_non_differentiable(entropies)
        return chosen, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropies = ctx.saved_tensors
        # Its log-probabilities are overwritten below, so a second backward pass computes them again.
        only, ctx.only_chunk = ctx.only_chunk, None
        # Autocast is off in a backward pass, so the forward pass's precision is brought along.
        chunk = only or _Chunk.of(hidden, weight.to(ctx.dtype), bias, ctx.squash, TRAINED_ELEMENTS)
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros_like(weight, dtype=chunk.dtype)
        to_bias = None if bias is None else torch.zeros_like(bias, dtype=chunk.dtype)
        for part in chunk.parts(hidden.size(0)):
            logprobs = chunk.logprobs[part] if only else chunk.read(hidden[part])
            change = chunk.probabilities(logprobs)
            change.mul_(_weights_of_probabilities(ctx.entropy, logprobs, entropies[part], gradients, part))
            change.scatter_add_(1, targets[part, None], -gradients[0][part, None])
            change = chunk.before_squash(change)
            to_hidden[part] = (change @ chunk.weight).neg_()
            _subtract_product(to_weight, change, hidden[part].to(change.dtype))
            if to_bias is not None:
                to_bias -= change.sum(0)
            del change  # so that the chunk's logits can be given back
        found_bias = None if bias is None or to_bias is None else to_bias.to(bias.dtype)
        return to_hidden, to_weight.to(weight.dtype), found_bias, None, None, None


def _weights_of_probabilities(
    entropy: Entropy, logprobs: Tensor, entropies: Tensor, gradients: tuple[Tensor, ...], part: slice
) -> Float[Tensor, "C ?1"]:
    """What p is multiplied by in minus the gradient: that of log-probabilities, and of entropies in place."""
    of_logprobs = gradients[0][part, None]
    if not entropy.trained:
        return of_logprobs
    return logprobs.add_(entropies[:, None]).mul_(gradients[1][part, None]).add_(of_logprobs)


def _subtract_product(total: Tensor, change: Float[Tensor, "C V"], hidden: Float[Tensor, "C H"]) -> None:
    if total.dtype == change.dtype:
        total.addmm_(change.t(), hidden, alpha=-1.0)
    else:
        total.sub_(change.t() @ hidden)  # each chunk's product in half precision, their sum in fp32


def _at(logprobs: Float[Tensor, "C V"], targets: Int[Tensor, " C"]) -> Float[Tensor, " C"]:
    return logprobs.gather(1, targets[:, None]).squeeze(1)


def _entropies(logprobs: Float[Tensor, "C V"], probabilities: Float[Tensor, "C V"]) -> Float[Tensor, " C"]:
    """A batched product, because it needs no room for p log p."""
    return torch.bmm(probabilities[:, None], logprobs[:, :, None])[:, 0, 0].neg_()
