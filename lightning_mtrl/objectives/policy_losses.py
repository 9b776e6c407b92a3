"""Losses of the policy, one number for each sampled token, to be minimised.

The caller sums them with the weights of `token_weights`. A ratio is that of the policy being trained to the
one that sampled: of a token, of a response, or of all responses of a row. In this file's functions what
stands outside responses has no effect on any value or gradient.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_mtrl.objectives.kl import MAX_LOG_RATIO
from lightning_mtrl.objectives.masked import zero_outside


def token_ratio(
    logprobs: Float[Tensor, "B T"],
    behaviour_logprobs: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
) -> Float[Tensor, "B T"]:
    """Probability ratio of each sampled token; 1 outside responses.

    Args:
        logprobs: log-probability under the policy being trained, in nats; carries the gradient.
        behaviour_logprobs: the same under the policy that sampled; constant.
        response_mask: True on sampled tokens.
    """
    return _exp(_log_ratio(logprobs, behaviour_logprobs, response_mask))


def turn_product_ratio(
    logprobs: Float[Tensor, "B T"], behaviour_logprobs: Float[Tensor, "B T"], turn_index: Int[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Probability ratio of the whole response, at each of its tokens; 1 outside responses.

    Sum with weights that are a mean over responses to give every response one clipped term. The
    logarithm spreads with the square root of the length, so long responses are clipped soon.

    Args:
        logprobs: log-probability under the policy being trained, in nats; carries the gradient.
        behaviour_logprobs: the same under the policy that sampled; constant.
        turn_index: k on the tokens of the k-th response, 0 elsewhere.
    """
    total, _ = _response_log_ratio(logprobs, behaviour_logprobs, turn_index)
    return _exp(total)


def turn_geometric_ratio(
    logprobs: Float[Tensor, "B T"], behaviour_logprobs: Float[Tensor, "B T"], turn_index: Int[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Geometric mean of the token ratios of a response, at each of its tokens; 1 outside responses.

    It is close to 1 and needs a clip range of a thousandth or less. Arguments as in `turn_product_ratio`.

    Source: GSPO (arXiv:2507.18071), taken for each response.
    """
    total, count = _response_log_ratio(logprobs, behaviour_logprobs, turn_index)
    return _exp(total / count)


def sequence_product_ratio(
    logprobs: Float[Tensor, "B T"],
    behaviour_logprobs: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
) -> Float[Tensor, "B T"]:
    """Probability ratio of all responses of a row together, at each sampled token."""
    return turn_product_ratio(logprobs, behaviour_logprobs, response_mask.long())


def sequence_geometric_ratio(
    logprobs: Float[Tensor, "B T"],
    behaviour_logprobs: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
) -> Float[Tensor, "B T"]:
    """Geometric mean of the ratios of all sampled tokens of a row.

    Source: GSPO (arXiv:2507.18071).
    """
    return turn_geometric_ratio(logprobs, behaviour_logprobs, response_mask.long())


def with_token_gradient(
    ratio: Float[Tensor, "B T"], logprobs: Float[Tensor, "B T"], response_mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """The same ratio, with a gradient that reaches only the token where it stands.

    So each token of a response can have an advantage of its own.

    Source: GSPO-token (arXiv:2507.18071).
    """
    own = zero_outside(logprobs, response_mask)
    return ratio.detach() * torch.exp(own - own.detach())


def clipped_surrogate(
    ratio: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    clip_range: float = 0.2,
    clip_range_high: float | None = None,
    dual_clip: float | None = None,
) -> Float[Tensor, "B T"]:
    """Clipped surrogate of PPO for given ratios; 0 outside responses.

    Args:
        ratio: of a token or of a larger unit; carries the gradient.
        advantages: of each token; constant.
        response_mask: True on sampled tokens.
        clip_range: how far below 1 a ratio is followed, above 0; and above 1 too without the next.
        clip_range_high: how far above 1 a ratio is followed.
        dual_clip: a negative advantage is followed up to this ratio only, above 1; None for no such limit.

    Raises:
        ValueError: for a clip range that is not above 0 or a dual clip that is not above 1.

    Source: Schulman et al. 2017 (arXiv:1707.06347), Eq. 7, with the sign turned; two ranges: DAPO
    (arXiv:2503.14476); dual clip: Ye et al. 2020 (arXiv:1912.09729).
    """
    high = clip_range if clip_range_high is None else clip_range_high
    if clip_range <= 0 or high <= 0:
        raise ValueError(f"clip ranges must be above 0, got {clip_range} below 1 and {high} above")
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be above 1, got {dual_clip}")
    ratio, advantages = zero_outside(ratio, response_mask), zero_outside(advantages, response_mask)
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + high))
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * dual_clip), losses)
    return losses


def clipped_policy_loss(
    logprobs: Float[Tensor, "B T"],
    behaviour_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    clip_range: float = 0.2,
    clip_range_high: float | None = None,
    dual_clip: float | None = None,
) -> Float[Tensor, "B T"]:
    """Clipped surrogate of PPO with the ratio of each token; 0 outside responses.

    Args:
        logprobs: log-probability of each token under the policy being trained, in nats; carries the
            gradient.
        behaviour_logprobs: the same under the policy that sampled; constant.
        advantages: of each token; constant.
        response_mask: True on sampled tokens, end-of-turn token included.
        clip_range: see `clipped_surrogate`, as for the other two.
        clip_range_high: how far above 1 a ratio is followed.
        dual_clip: limit on the ratio of a negative advantage.
    """
    ratio = token_ratio(logprobs, behaviour_logprobs, response_mask)
    return clipped_surrogate(ratio, advantages, response_mask, clip_range, clip_range_high, dual_clip)


def reinforce_loss(
    logprobs: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"], response_mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Minus log-probability times advantage; its gradient is minus the policy gradient; 0 outside responses.

    Source: Williams 1992.
    """
    return -zero_outside(logprobs, response_mask) * zero_outside(advantages, response_mask)


def is_clipped(
    ratio: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    clip_range: float = 0.2,
    clip_range_high: float | None = None,
) -> Bool[Tensor, "B T"]:
    """Where the clipped term is the larger loss, so that the ratio gets no gradient."""
    high = clip_range if clip_range_high is None else clip_range_high
    return -advantages * ratio.clamp(1 - clip_range, 1 + high) > -advantages * ratio


def is_dual_clipped(
    ratio: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"], dual_clip: float
) -> Bool[Tensor, "B T"]:
    """Where the ratio of a negative advantage is above the limit of the dual clip."""
    return (advantages < 0) & (ratio > dual_clip)


def _log_ratio(logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor) -> Tensor:
    return zero_outside(logprobs, mask) - zero_outside(behaviour_logprobs, mask)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _response_log_ratio(
    logprobs: Tensor, behaviour_logprobs: Tensor, turn_index: Tensor
) -> tuple[Tensor, Tensor]:
    """Sum over the response, and its number of tokens, at each of its tokens; 0 and 1 outside."""
    mask = turn_index > 0
    log_ratio = _log_ratio(logprobs, behaviour_logprobs, mask)
    width = int(turn_index.max()) + 1 if turn_index.numel() else 1
    empty = log_ratio.new_zeros(log_ratio.size(0), width)
    totals = empty.scatter_add(1, turn_index, log_ratio).gather(1, turn_index)
    # Whole numbers, since half precision cannot count beyond a few hundred.
    counts = empty.long().scatter_add(1, turn_index, mask.long()).gather(1, turn_index)
    return zero_outside(totals, mask), counts.clamp(min=1)
