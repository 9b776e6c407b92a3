"""The implicit process reward model: rewards from log-ratios, its loss on pairs, and how well it ranks.

With an outcome reward r(y) = beta log(pi_phi(y) / pi_0(y)), the sum of beta times the log-ratios over the
tokens so far is a soft value of the prefix, and each token's own term is its reward. The loss on single
outcomes is `bce_loss` of `trajectory_scores`.

Source: "Free Process Rewards without Process Labels" (arXiv:2412.01981); PRIME (arXiv:2502.01456).
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_mtrl.objectives.masked import masked_sum, zero_outside

BATCH_MAX_EPSILON = 1e-6


def implicit_rewards(
    log_ratio: Float[Tensor, "B T"], response_mask: Bool[Tensor, "B T"], beta: float
) -> Float[Tensor, "B T"]:
    """Beta (log pi_phi - log pi_0) of each sampled token; 0 outside responses.

    Args:
        log_ratio: in nats.
        response_mask: True on sampled tokens.
        beta: scale, above 0; reward per nat.

    Raises:
        ValueError: if beta is not above 0.
    """
    if not beta > 0:
        raise ValueError(f"beta is {beta}, but a reward model needs a scale above 0")
    return beta * zero_outside(log_ratio, response_mask)


def trajectory_scores(
    log_ratio: Float[Tensor, "B T"], response_mask: Bool[Tensor, "B T"], beta: float
) -> Float[Tensor, " B"]:
    """Sum of the implicit rewards of each row: the logit of its outcome in the loss; 0 without a response."""
    return masked_sum(implicit_rewards(log_ratio, response_mask, beta), response_mask, dim=1)


def without_rewards_from(rewards: Float[Tensor, "B T"], last: Int[Tensor, " B"]) -> Float[Tensor, "B T"]:
    """The same rewards, with 0 at column `last` of each row and behind it.

    The released code loses the reward of a row's last attended position, which is the last sampled token
    where the row ends on a response. The paper does not.

    Source: released code of ITPO (arXiv:2603.23550), after PRIME (arXiv:2502.01456).
    """
    places = torch.arange(rewards.size(1), device=rewards.device)
    return zero_outside(rewards, places < last[:, None])


def scaled_by_batch_max(rewards: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Rewards over the largest absolute suffix sum of the whole batch, so that those lie in [-1, 1].

    One number for the batch, so give it all rollouts of an iteration at once. beta cancels, up to the 1e-6
    that is added to the number.

    Args:
        rewards: of each token; 0 outside responses.

    Source: released code of ITPO (arXiv:2603.23550), which takes the largest of each data-parallel rank.
    """
    suffix_sums = rewards.flip(1).cumsum(1).flip(1)
    largest = suffix_sums.abs().amax() if rewards.numel() else rewards.sum()
    return rewards / (largest + BATCH_MAX_EPSILON)


def pairwise_loss(
    scores: Float[Tensor, " B"], outcomes: Float[Tensor, " B"], group: Int[Tensor, " B"]
) -> Float[Tensor, ""]:
    """Mean of -log sigmoid(score of the better - score of the worse) over pairs of one group, in nats.

    Pairs of equal outcome count nothing; without any pair the loss is 0.

    Args:
        scores: `trajectory_scores`; they carry the gradient.
        outcomes: of any range; only their order matters.
        group: number of the group of each row.

    Source: the trajectory form of DPO, as in iStar (arXiv:2509.19199).
    """
    better = (outcomes[:, None] > outcomes) & (group[:, None] == group)
    losses = torch.nn.functional.softplus(scores - scores[:, None])
    return masked_sum(losses, better) / better.sum().clamp(min=1)


def pairwise_accuracy(
    scores: Float[Tensor, " B"], outcomes: Float[Tensor, " B"], group: Int[Tensor, " B"]
) -> Float[Tensor, ""]:
    """How often scores order two rows of a group as their outcomes do: a mean over groups.

    Inside a group a pair weighs the difference of its outcomes. Where all are equal the group counts as 0.5.
    Of two equal scores neither is larger, which is right in one of the two orders; the earlier row is the
    first of a pair.

    Source: released code of PRIME (arXiv:2502.01456).
    """
    rows = torch.arange(len(scores), device=scores.device)
    pair = (group[:, None] == group) & (rows[:, None] < rows)
    apart = outcomes[:, None] - outcomes
    right = (scores[:, None] > scores) == (apart > 0)
    weights = zero_outside(apart.abs(), pair)
    members = group.unique(return_inverse=True)[1]
    total = weights.new_zeros(int(members.max()) + 1).index_add(0, members, weights.sum(1))
    hits = torch.zeros_like(total).index_add(0, members, (weights * right).sum(1))
    ordered = total > 0
    return torch.where(ordered, hits / torch.where(ordered, total, 1.0), 0.5).mean()


def absolute_accuracy(scores: Float[Tensor, " B"], outcomes: Float[Tensor, " B"]) -> Float[Tensor, ""]:
    """Share of rows whose score is positive for an outcome above one half, negative for one below.

    Source: released code of PRIME (arXiv:2502.01456).
    """
    return (scores.sign() == (2 * outcomes - 1).sign()).to(scores.dtype).mean()
