"""From token rewards and an outcome to a reward for each turn (credit assignment).

Responses are numbered by `turn_index`: k on the tokens of the k-th response, 0 elsewhere. A table of turns
has as many columns as the longest row has responses; what it holds beyond a row's last turn is 0.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_mtrl.objectives.masked import masked_mean, zero_outside


def turn_tokens(turn_index: Int[Tensor, "B T"]) -> Int[Tensor, "B K"]:
    """Number of tokens of each response."""
    width = int(turn_index.max()) if turn_index.numel() else 0
    counts = torch.zeros(turn_index.size(0), width + 1, dtype=torch.int64, device=turn_index.device)
    return counts.scatter_add(1, turn_index, torch.ones_like(turn_index))[:, 1:]


def turn_sums(values: Float[Tensor, "B T"], turn_index: Int[Tensor, "B T"]) -> Float[Tensor, "B K"]:
    """Sum over the tokens of each response.

    Of token rewards it is the turn reward of ITPO, and the evidence of Norm-ITPO as the paper has it.

    Source: ITPO (arXiv:2603.23550).
    """
    width = int(turn_index.max()) if turn_index.numel() else 0
    sums = values.new_zeros(values.size(0), width + 1)
    return sums.scatter_add(1, turn_index, zero_outside(values, turn_index > 0))[:, 1:]


def turn_means(values: Float[Tensor, "B T"], turn_index: Int[Tensor, "B T"]) -> Float[Tensor, "B K"]:
    """Mean over the tokens of each response."""
    return turn_sums(values, turn_index) / turn_tokens(turn_index).clamp(min=1)


def scaled_turn_means(values: Float[Tensor, "B T"], turn_index: Int[Tensor, "B T"]) -> Float[Tensor, "B K"]:
    """Mean over the tokens of each response, times the mean length of all responses of the batch.

    It has the size of a sum, and a long response has no advantage. It equals `turn_sums` where all responses
    have one length. What is in the batch matters, so give it all rollouts of an iteration at once.

    Source: released code of ITPO (arXiv:2603.23550), in the place of the paper's sum.
    """
    tokens = turn_tokens(turn_index)
    return turn_means(values, turn_index) * masked_mean(tokens.to(values.dtype), tokens > 0)


def token_fractions(
    turn_index: Int[Tensor, "B T"], dtype: torch.dtype = torch.float32
) -> Float[Tensor, "B K"]:
    """Each response's share of the sampled tokens of its row; a row without a response has zeros."""
    tokens = turn_tokens(turn_index).to(dtype)
    return tokens / tokens.sum(1, keepdim=True).clamp(min=1)


def spread_by_length(totals: Float[Tensor, " B"], turn_index: Int[Tensor, "B T"]) -> Float[Tensor, "B K"]:
    """Split a number of each row, such as its token penalty, over its turns in proportion to their length.

    Source: released code of ITPO (arXiv:2603.23550).
    """
    return totals[:, None] * token_fractions(turn_index, totals.dtype)


def uniform_weights(
    turn_mask: Bool[Tensor, "B K"], dtype: torch.dtype = torch.float32
) -> Float[Tensor, "B K"]:
    """1 / K for each turn of a row with K turns."""
    return proportional_weights(turn_mask.to(dtype), turn_mask)


def proportional_weights(sizes: Float[Tensor, "B K"], turn_mask: Bool[Tensor, "B K"]) -> Float[Tensor, "B K"]:
    """Weights of a row's turns in proportion to numbers that are not negative; they sum to 1.

    Draws from a gamma distribution become draws from a Dirichlet distribution of the same concentration.
    Turns whose numbers are all 0 weigh the same.
    """
    sizes = zero_outside(sizes, turn_mask)
    nothing = sizes.sum(1, keepdim=True) == 0
    sizes = torch.where(nothing, turn_mask.to(sizes.dtype), sizes)
    total = sizes.sum(1, keepdim=True)
    return sizes / torch.where(total > 0, total, torch.ones_like(total))


def norm_itpo_weights(
    evidence: Float[Tensor, "B K"], turn_mask: Bool[Tensor, "B K"], eta: float
) -> Float[Tensor, "B K"]:
    """w_k = exp(e_k / eta) / sum_j exp(e_j / eta) over the turns of a row; they sum to 1.

    With e_k as the log-evidence that turn k brought about the outcome, w is the posterior of the pivotal
    turn under a uniform prior. A large eta splits evenly, a small one gives all to one turn.

    Args:
        evidence: of each turn: `turn_sums` of token rewards in the paper, `scaled_turn_means` in the
            released code.
        turn_mask: True where the row has that turn.
        eta: temperature, above 0.

    Raises:
        ValueError: if eta is not above 0.

    Source: Norm-ITPO (arXiv:2603.23550).
    """
    if not eta > 0:
        raise ValueError(f"eta is {eta}, but it divides and must be above 0")
    scores = (evidence / eta).masked_fill(~turn_mask, -torch.inf)
    # A softmax over nothing would be NaN.
    scores = torch.where(turn_mask.any(1, keepdim=True), scores, torch.zeros_like(scores))
    return zero_outside(scores.softmax(1), turn_mask)


def top_turn_share(weights: Float[Tensor, "B K"]) -> Float[Tensor, " B"]:
    """The largest weight of each row; 0 for a row without a turn."""
    return weights.amax(1) if weights.size(1) else weights.sum(1)


def weight_entropy(weights: Float[Tensor, "B K"]) -> Float[Tensor, " B"]:
    """Entropy of each row's weights in nats: 0 when one turn has all, log K when K turns share evenly."""
    entropy: Tensor = torch.special.entr(weights).sum(1)
    return entropy
