"""From rewards and values to advantages. All are constants of a policy loss; none carries a gradient."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_mtrl.objectives.masked import masked_mean, turn_index_of, zero_outside


def gae(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    turn_gamma: float | None = None,
    turn_lambda: float | None = None,
    turn_index: Int[Tensor, "B T"] | None = None,
    bootstrap: Float[Tensor, " B"] | None = None,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Generalised advantage estimation over the sampled tokens of each row.

    Observation tokens are skipped: what follows the last token of a response is the first token of the
    next response. A token inside a response is followed with `gamma` and `gae_lambda`, the last one with
    `turn_gamma` and `turn_lambda`. With 1 inside and less between this is the credit of one action a turn.

    Args:
        rewards: reward that arrives with each token.
        values: prediction for each token, before it is sampled.
        response_mask: True on sampled tokens; what stands elsewhere has no effect.
        gamma: discount between two tokens of one response, in [0, 1].
        gae_lambda: 1 for Monte Carlo, 0 for one step, between two tokens of one response.
        turn_gamma: discount from one response to the next; by default as inside.
        turn_lambda: lambda from one response to the next; by default as inside.
        turn_index: k on the tokens of the k-th response; by default each run of True is one response.
        bootstrap: value of the state in which a truncated row was cut off; 0 for one that terminated.

    Returns:
        Advantages, and returns (advantages plus values, the targets of the value head); 0 outside.

    Source: Schulman et al. 2016 (arXiv:1506.02438), Eq. 16; with two discounts: POAD (arXiv:2405.15821).
    """
    inside = values.new_tensor([gamma, gae_lambda])
    between = values.new_tensor(
        [gamma if turn_gamma is None else turn_gamma, gae_lambda if turn_lambda is None else turn_lambda]
    )
    rewards, values = zero_outside(rewards, response_mask), zero_outside(values, response_mask)
    index = turn_index_of(response_mask) if turn_index is None else turn_index
    next_value = torch.zeros_like(values[:, 0]) if bootstrap is None else bootstrap.to(values)
    next_index, advantage = torch.zeros_like(index[:, 0]), torch.zeros_like(values[:, 0])
    columns: list[Tensor] = []
    for t in reversed(range(values.size(1))):
        sampled, same = response_mask[:, t], index[:, t] == next_index
        discount, keep = torch.where(same, inside[:, None], between[:, None])
        estimate = rewards[:, t] + discount * next_value - values[:, t] + discount * keep * advantage
        advantage = torch.where(sampled, estimate, advantage)
        next_value = torch.where(sampled, values[:, t], next_value)
        next_index = torch.where(sampled, index[:, t], next_index)
        columns.append(estimate)
    advantages = zero_outside(torch.stack(columns[::-1], 1), response_mask)
    return advantages, advantages + values


def returns_to_go(
    rewards: Float[Tensor, "B T"], response_mask: Bool[Tensor, "B T"], gamma: float = 1.0
) -> Float[Tensor, "B T"]:
    """Sum of the rewards from each sampled token on, as REINFORCE uses it; 0 outside responses.

    Args:
        rewards: reward that arrives with each token.
        response_mask: True on sampled tokens; observation tokens are skipped and not discounted.
        gamma: discount for each sampled token, in [0, 1].

    Source: Williams 1992, in the form of Sutton and Barto 2018, section 13.3.
    """
    return gae(rewards, torch.zeros_like(rewards), response_mask, gamma, 1.0)[0]


def rloo_advantages(scores: Float[Tensor, " N"], group: Int[Tensor, " N"] | int) -> Float[Tensor, " N"]:
    """Each score less the mean of the other scores of its group; exactly 0 where all are equal.

    Args:
        scores: one for each response or conversation.
        group: index of each one's group, in any order; or the size of groups that stand one after another.

    Raises:
        ValueError: for a group of one, which has no others.

    Source: Ahmadian et al. 2024 (arXiv:2402.14740).
    """
    members = _members(scores, group)
    counts = _group_sum(torch.ones_like(scores), members)
    if (counts < 2).any():
        raise ValueError("RLOO compares a score with the others of its group, but a group has only one score")
    shifted = _less_smallest(scores, members)
    return shifted - (_group_sum(shifted, members) - shifted) / (counts - 1)


def grpo_advantages(
    scores: Float[Tensor, " N"],
    group: Int[Tensor, " N"] | int,
    divide_by_std: bool = True,
    epsilon: float = 1e-6,
) -> Float[Tensor, " N"]:
    """Each score less the mean of its group; exactly 0 where all are equal.

    Args:
        scores: one for each response or conversation.
        group: index of each one's group, in any order; or the size of groups that stand one after another.
        divide_by_std: divide by the group's standard deviation (the unbiased one); it gives groups whose
            scores hardly differ as much weight as the others.
        epsilon: added to the standard deviation.

    Source: Shao et al. 2024 (arXiv:2402.03300); without the division Liu et al. 2025
    (arXiv:2503.20783).
    """
    members = _members(scores, group)
    counts = _group_sum(torch.ones_like(scores), members)
    shifted = _less_smallest(scores, members)
    centred = shifted - _group_sum(shifted, members) / counts
    if not divide_by_std:
        return centred
    variance = _group_sum(centred**2, members) / (counts - 1).clamp(min=1)
    return centred / (variance.sqrt() + epsilon)


def q_baseline_advantages(q: Float[Tensor, "S n"], baseline_q: Float[Tensor, "S m"]) -> Float[Tensor, "S n"]:
    """Q of each response less the mean Q of other responses of the policy in the same state.

    The mean over fresh samples estimates V(s), so what is left estimates the advantage A(s, a).

    Args:
        q: Q of the responses that are trained on, one row a state.
        baseline_q: Q of responses that were sampled apart from those.
    """
    return q - baseline_q.mean(1, keepdim=True)


def rloo_centred_rewards(
    rewards: Float[Tensor, "B T"], reward_mask: Bool[Tensor, "B T"], group: Int[Tensor, " B"] | int
) -> Float[Tensor, "B T"]:
    """Rewards less a leave-one-out baseline where a row has several rewards, as the ITPO code does it.

    With m_j the mean reward of row j of a group of n: n/(n-1) r - 1/(n-1) sum_j m_j at each reward. It is
    `rloo_advantages` where each row has one reward. Otherwise the baseline enters once for each reward, so
    rows with many rewards are held to a higher one. The advantage is `returns_to_go` of the result.

    Args:
        rewards: one at each place of `reward_mask`.
        reward_mask: True where a reward stands.
        group: index of each row's group; or the size of groups that stand one after another.

    Raises:
        ValueError: for a group of one.

    Source: released code of ITPO (arXiv:2603.23550), after PRIME (arXiv:2502.01456).
    """
    row_means = masked_mean(rewards, reward_mask, dim=1)
    members = _members(row_means, group)
    counts = _group_sum(torch.ones_like(row_means), members)
    if (counts < 2).any():
        raise ValueError("RLOO compares a row with the others of its group, but a group has only one row")
    baseline = _group_sum(row_means, members) / (counts - 1)
    centred = rewards * (counts / (counts - 1))[:, None] - baseline[:, None]
    return zero_outside(centred, reward_mask)


def _members(scores: Float[Tensor, " N"], group: Int[Tensor, " N"] | int) -> Int[Tensor, " N"]:
    """Groups numbered 0, 1, ..."""
    if isinstance(group, Tensor):
        members: Tensor = group.unique(return_inverse=True)[1]
        return members
    if group < 1 or scores.numel() % group:
        raise ValueError(f"{scores.numel()} scores do not divide into groups of {group}")
    return torch.arange(scores.numel(), device=scores.device) // group


def _group_sum(values: Float[Tensor, " N"], members: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    totals = torch.zeros_like(values).index_add(0, members, values)
    return totals[members]


def _less_smallest(scores: Float[Tensor, " N"], members: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Distance to the group's smallest score: exactly 0 for equal scores, which a rounded mean is not."""
    smallest = torch.zeros_like(scores).scatter_reduce(0, members, scores, "amin", include_self=False)
    return scores - smallest[members]
