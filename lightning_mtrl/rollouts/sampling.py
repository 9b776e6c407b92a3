"""Drawing tokens: one uniform number a row, by inverting the cumulative distribution.

Shape letters: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, isqrt

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from lightning_mtrl.errors import UserError
from lightning_mtrl.ranges import COUNT, MIN_P, TOP_K, TOP_P


@dataclass(frozen=True)
class SamplingConfig:
    """How responses are drawn from the policy.

    The behaviour log-probabilities that are kept are those of the plain distribution whatever stands
    here, so training on responses drawn with a truncated or flattened distribution is off-policy.

    Attributes:
        temperature: divides the logits; 1 is the policy itself, 0 takes the most probable token.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the most probable tokens up to this much probability, in (0, 1]; 1 keeps all.
        min_p: keep tokens with at least this share of the best token's probability, in [0, 1); 0
            keeps all (Nguyen et al. 2024, arXiv:2407.01082).
        max_response_tokens: length limit of one response, end-of-turn token included.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_response_tokens: int = 64

    def __post_init__(self) -> None:
        finite = isfinite(self.temperature) and self.temperature >= 0
        _expect(finite, "temperature", self.temperature, "a number >= 0 (0 is greedy, 1 the policy itself)")
        for allowed, name in ((TOP_K, "top_k"), (TOP_P, "top_p"), (MIN_P, "min_p")):
            value = getattr(self, name)
            _expect(allowed.holds(value), name, value, allowed.expected)
        enough = COUNT.holds(self.max_response_tokens)
        _expect(enough, "max_response_tokens", self.max_response_tokens, COUNT.expected)


def _expect(holds: bool, key: str, value: object, expected: str) -> None:
    if not holds:
        raise UserError(f"sampling.{key} is {value}, but {expected} was expected.")


def sample_tokens(
    logits: Float[Tensor, "R V"],
    uniforms: Float[Tensor, " R"],
    temperature: float | Float[Tensor, " R"] = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float | Float[Tensor, " R"] = 0.0,
) -> tuple[Int[Tensor, " R"], Float[Tensor, " R"], Float[Tensor, " R"]]:
    """Draw one token a row.

    The distribution is changed in the order of transformers' `generate`: temperature, top-k, top-p,
    min-p. All arithmetic is in float32. A tie at temperature 0 goes to the lowest id.

    Args:
        logits: scores of the next token, any floating type.
        uniforms: one number in [0, 1) a row; equal numbers and equal logits give equal tokens. Not
            read where the temperature is 0.
        temperature: one for all rows, or one a row; >= 0.
        top_k: see `SamplingConfig`.
        top_p: see `SamplingConfig`.
        min_p: one for all rows, or one a row.

    Returns:
        The tokens; their log-probabilities in nats under the plain distribution (temperature 1,
        nothing cut off); and those under the distribution that they were drawn from.
    """
    scores = logits.float()
    if isinstance(temperature, float | int) and temperature == 0:
        tokens = scores.argmax(-1)
        chosen = _at(scores, tokens) - scores.logsumexp(-1)
        return tokens, chosen, torch.zeros_like(chosen)
    uniforms = uniforms.to(scores)
    if _is(temperature, 1.0) and top_k == 0 and top_p == 1.0 and _is(min_p, 0.0):
        highest = scores.amax(-1, keepdim=True)
        tokens, total = _invert((scores - highest).exp_(), uniforms)
        chosen = _at(scores, tokens) - highest.squeeze(-1) - total.log()
        return tokens, chosen, chosen
    plain = torch.log_softmax(scores, dim=-1)
    drawn_from = _changed(plain, temperature, top_k, top_p, min_p)
    tokens, _ = _invert(drawn_from.exp(), uniforms)
    return tokens, _at(plain, tokens), _at(drawn_from, tokens)


def _is(value: float | Tensor, number: float) -> bool:
    return not isinstance(value, Tensor) and value == number


def _at(logprobs: Tensor, tokens: Tensor) -> Tensor:
    return logprobs.gather(-1, tokens[:, None]).squeeze(-1)


def _column(value: float | Tensor, like: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).reshape(-1, 1)


def _changed(
    plain: Tensor, temperature: float | Tensor, top_k: int, top_p: float, min_p: float | Tensor
) -> Tensor:
    """Log-probabilities of the distribution that is drawn from; -inf on tokens that were cut off."""
    heat = _column(temperature, plain)
    greedy = heat == 0
    logprobs = torch.log_softmax(plain / torch.where(greedy, 1.0, heat), dim=-1)
    if 0 < top_k < plain.size(-1):
        # Only the k best survive, whatever the ties: a threshold would keep more than k.
        best = logprobs.topk(top_k, dim=-1)
        logprobs = torch.full_like(logprobs, -torch.inf).scatter_(-1, best.indices, best.values)
    if top_p < 1:
        logprobs = _nucleus(torch.log_softmax(logprobs, dim=-1), top_p)
    if not _is(min_p, 0.0):
        floor = logprobs.amax(-1, keepdim=True) + _column(min_p, plain).log()
        logprobs = logprobs.masked_fill(logprobs < floor, -torch.inf)
    changed = torch.log_softmax(logprobs, dim=-1)
    if not bool(greedy.any()):
        return changed
    certain = torch.full_like(plain, -torch.inf).scatter_(-1, plain.argmax(-1, keepdim=True), 0.0)
    return torch.where(greedy, certain, changed)


def _nucleus(logprobs: Tensor, top_p: float) -> Tensor:
    """Keep the most probable tokens; one is cut when those before it already hold `top_p`."""
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    return torch.empty_like(logprobs).scatter_(-1, order, ordered.masked_fill(before >= top_p, -torch.inf))


def _invert(masses: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The first token up to which the mass exceeds the uniform share of the total; and the total.

    Masses are first summed in blocks and the block is looked up, then the token in it: adding up a large
    vocabulary one by one takes longer than a step of a small model. What is left to be found in the block
    is kept below the block's own mass, so rounding can never lead beyond its last token that has any.
    """
    rows, size = masses.shape
    width = max(1, isqrt(size))
    blocks = functional.pad(masses, (0, -size % width)).view(rows, -1, width)
    sums = blocks.sum(-1)
    reached = sums.cumsum(-1)
    block = _first_above(reached, uniforms * reached[:, -1])
    before = _at(reached, block) - _at(sums, block)
    inside = blocks[torch.arange(rows, device=masses.device), block].cumsum(-1)
    place = _first_above(inside, uniforms * reached[:, -1] - before)
    # Masses that are not numbers lead nowhere; whoever asked sees it in the total.
    return (block * width + place).clamp_(max=size - 1), reached[:, -1]


def _first_above(cumulative: Float[Tensor, "R N"], wanted: Float[Tensor, " R"]) -> Int[Tensor, " R"]:
    """The first place whose cumulative mass exceeds what is wanted, which is kept within it."""
    total = cumulative[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))
    sought = torch.minimum(wanted[:, None].clamp(min=0), below)
    return torch.searchsorted(cumulative, sought, right=True).squeeze(-1).clamp_(max=cumulative.size(-1) - 1)
