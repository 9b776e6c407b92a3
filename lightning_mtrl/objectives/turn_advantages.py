"""Advantages where a row has several rewards, one for each turn or each token; none carries a gradient.

Rewards stand on tokens (`reward_mask` says on which), are undiscounted by default, and are compared inside
groups of rows that share the initial state. Every function returns the advantage of each *reward*, at its
place; `spread_back` gives it to the tokens that led to it. Groups may differ in size.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_mtrl.objectives.advantages import grpo_advantages, returns_to_go, rloo_advantages
from lightning_mtrl.objectives.masked import masked_sum, token_weights, zero_outside


def rloo_of_returns(
    rewards: Float[Tensor, "B T"],
    reward_mask: Bool[Tensor, "B T"],
    group: Int[Tensor, " B"],
    gamma: float = 1.0,
) -> Float[Tensor, "B T"]:
    """Each return-to-go less the mean return-to-go of the group's other rows at their reward of that number.

    A row that has no more rewards counts with 0, which is its return. The baseline of a reward does not
    depend on the row's own responses, so the policy gradient stays unbiased.

    Args:
        rewards: one at each place of `reward_mask`.
        reward_mask: True where a reward stands.
        group: number of the group of each row.
        gamma: discount from one reward to the next.

    Raises:
        ValueError: for a group of one.
    """
    returns = returns_to_go(rewards, reward_mask, gamma)
    number = _numbers(reward_mask)
    width = int(number.max()) + 1 if number.numel() else 1
    table = returns.new_zeros(len(returns), width).scatter_add(1, number, returns)
    # Column 0 holds what has no reward. One group for each number, so that all are compared in one call.
    columns = torch.arange(width, device=group.device)
    members = group[:, None] * width + columns
    compared = rloo_advantages(table.flatten(), members.flatten()).view_as(table)
    return zero_outside(compared.gather(1, number), reward_mask)


def rloo_of_totals(
    rewards: Float[Tensor, "B T"], reward_mask: Bool[Tensor, "B T"], group: Int[Tensor, " B"]
) -> Float[Tensor, "B T"]:
    """The row's total less the mean total of the group's other rows, less the rewards already received.

    It is the return-to-go against one baseline for the whole row, the expected total.

    Raises:
        ValueError: for a group of one.
    """
    compared = rloo_advantages(masked_sum(rewards, reward_mask, dim=1), group)
    kept = zero_outside(rewards, reward_mask)
    received = kept.cumsum(1) - kept
    return zero_outside(compared[:, None] - received, reward_mask)


def grpo_of_rewards(
    rewards: Float[Tensor, "B T"],
    reward_mask: Bool[Tensor, "B T"],
    group: Int[Tensor, " B"],
    divide_by_std: bool = True,
    by_turn: bool = False,
    gamma: float = 1.0,
) -> Float[Tensor, "B T"]:
    """Sum, from each reward on, of the rewards standardised inside the group.

    Args:
        rewards: one at each place of `reward_mask`.
        reward_mask: True where a reward stands.
        group: number of the group of each row.
        divide_by_std: divide by the standard deviation of what was compared (the unbiased one).
        by_turn: compare with rewards of the same number only, and not with all of the group.
        gamma: discount from one reward to the next.

    Source: process supervision of GRPO, Shao et al. 2024 (arXiv:2402.03300), section 4.1.3.
    """
    standard = _compared(rewards, reward_mask, group, divide_by_std, by_turn)
    return returns_to_go(standard, reward_mask, gamma)


def grpo_of_returns(
    rewards: Float[Tensor, "B T"],
    reward_mask: Bool[Tensor, "B T"],
    group: Int[Tensor, " B"],
    divide_by_std: bool = True,
    by_turn: bool = False,
    gamma: float = 1.0,
) -> Float[Tensor, "B T"]:
    """The return-to-go of each reward, standardised inside the group; arguments as in `grpo_of_rewards`."""
    returns = returns_to_go(rewards, reward_mask, gamma)
    return _compared(returns, reward_mask, group, divide_by_std, by_turn)


def spread_back(
    advantages: Float[Tensor, "B T"], reward_mask: Bool[Tensor, "B T"], response_mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Give each sampled token the advantage of the next reward, its own place included; 0 if none follows."""
    # With the difference to the following reward at each place, sums from the right give it back exactly
    # only up to rounding, so the place of the next reward is looked up instead.
    width = advantages.size(1)
    places = torch.arange(width, device=advantages.device).expand_as(reward_mask)
    following = torch.where(reward_mask, places, width).flip(1).cummin(1).values.flip(1)
    padded = torch.nn.functional.pad(zero_outside(advantages, reward_mask), (0, 1))
    return zero_outside(padded.gather(1, following), response_mask)


def whiten_turns(
    advantages: Float[Tensor, "B T"], turn_index: Int[Tensor, "B T"], epsilon: float = 1e-8
) -> Float[Tensor, "B T"]:
    """Scale to mean 0 and variance 1 with every response weighing the same; 0 outside responses.

    `masked_whiten` lets long responses weigh more, as the released code of ITPO does.

    Args:
        advantages: of each token; inside a response they may differ.
        turn_index: k on the tokens of the k-th response, 0 elsewhere.
        epsilon: added to the variance, in squared units of `advantages`.
    """
    mask = turn_index > 0
    weights = token_weights(mask, "response", turn_index, advantages.dtype)
    kept = zero_outside(advantages, mask)
    centred = zero_outside(kept - (weights * kept).sum(), mask)
    number = (turn_index.amax(1).sum() if turn_index.numel() else turn_index.sum()).to(advantages.dtype)
    variance = (weights * centred**2).sum() * number / (number - 1).clamp(min=1)
    return centred * (variance + epsilon).rsqrt()


def zero_variance_groups(scores: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, ""]:
    """Share of the groups whose scores are all equal; they teach nothing."""
    members = group.unique(return_inverse=True)[1]
    empty = scores.new_zeros(int(members.max()) + 1)
    low = empty.scatter_reduce(0, members, scores, "amin", include_self=False)
    high = empty.scatter_reduce(0, members, scores, "amax", include_self=False)
    return (low == high).to(scores.dtype).mean()


def _compared(
    values: Tensor, reward_mask: Tensor, group: Tensor, divide_by_std: bool, by_turn: bool
) -> Tensor:
    """`grpo_advantages` of all values of a group, or of those that have one number in their row."""
    number = _numbers(reward_mask)
    rows = group[:, None].expand_as(number)
    members = rows * (int(number.max()) + 1) + number if by_turn and number.numel() else rows
    compared = grpo_advantages(values[reward_mask], members[reward_mask], divide_by_std)
    return torch.zeros_like(values).masked_scatter(reward_mask, compared)


def _numbers(reward_mask: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """M on the m-th reward of each row, 0 elsewhere."""
    return reward_mask.cumsum(1) * reward_mask
