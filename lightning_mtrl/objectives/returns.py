"""From rewards to returns, one number a turn; and from turns to tokens.

The unit of time is the turn. A discount per token would make a return depend on how long the responses
are, which says nothing about the conversation.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_mtrl.objectives.masked import zero_outside


def discounted_returns(
    turn_rewards: Float[Tensor, "B K"],
    turn_mask: Bool[Tensor, "B K"],
    gamma: float,
    bootstrap: Float[Tensor, " B"] | None = None,
) -> Float[Tensor, "B K"]:
    """Monte Carlo return of each turn: G_k = r_k + gamma r_{k+1} + gamma^2 r_{k+2} + ...

    Args:
        turn_rewards: reward observed after each response.
        turn_mask: True where the conversation has that turn; turns start at column 0.
        gamma: discount for each turn, in [0, 1].
        bootstrap: value of the state in which a *truncated* conversation was cut off; 0 for one that
            terminated. Without it a truncated conversation counts as one that fails from there on, so
            leave such conversations out or give this.

    Returns:
        Returns in units of reward; 0 outside `turn_mask`.

    Source: Iterative PPO (arXiv:2511.21638), section 3, Monte Carlo evaluation.
    """
    return lambda_returns(turn_rewards, torch.zeros_like(turn_rewards), turn_mask, gamma, 1.0, bootstrap)


def lambda_returns(
    turn_rewards: Float[Tensor, "B K"],
    values: Float[Tensor, "B K"],
    turn_mask: Bool[Tensor, "B K"],
    gamma: float,
    td_lambda: float,
    bootstrap: Float[Tensor, " B"] | None = None,
) -> Float[Tensor, "B K"]:
    """Targets of SARSA(lambda): G_k = r_k + gamma ((1 - lambda) Q_{k+1} + lambda G_{k+1}).

    Lambda 1 gives Monte Carlo returns, lambda 0 one-step SARSA.

    Args:
        turn_rewards: reward observed after each response.
        values: Q(s_k, a_k) of each turn under the policy that is evaluated; constant.
        turn_mask: True where the conversation has that turn; turns start at column 0.
        gamma: discount for each turn, in [0, 1].
        td_lambda: weight of the sampled continuation against the predicted one, in [0, 1].
        bootstrap: see `discounted_returns`.

    Returns:
        Targets in units of reward; 0 outside `turn_mask`.

    Source: Sutton and Barto 2018, chapter 12, with action values.
    """
    rewards, known = zero_outside(turn_rewards, turn_mask), zero_outside(values, turn_mask)
    following = torch.zeros_like(rewards[:, 0]) if bootstrap is None else bootstrap.to(rewards)
    ahead, predicted = following, following
    columns: list[Tensor] = []
    for k in reversed(range(rewards.size(1))):
        target = rewards[:, k] + gamma * ((1 - td_lambda) * predicted + td_lambda * ahead)
        # Columns after the last turn hand the bootstrap value on.
        ahead = torch.where(turn_mask[:, k], target, ahead)
        predicted = torch.where(turn_mask[:, k], known[:, k], predicted)
        columns.append(target)
    return zero_outside(torch.stack(columns[::-1], 1), turn_mask)


def place_turn_rewards(
    turn_rewards: Float[Tensor, "B K"], turn_index: Int[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Put the reward of each turn on the last token of its response; 0 at all other places.

    Args:
        turn_rewards: reward of each turn.
        turn_index: k on the tokens of the k-th response (k = 1, 2, ...), 0 elsewhere.

    Raises:
        ValueError: if `turn_index` names a turn that has no reward.
    """
    if turn_index.numel() and int(turn_index.max()) > turn_rewards.size(1):
        raise ValueError(
            f"turn_index goes up to {int(turn_index.max())}, but a row has {turn_rewards.size(1)} rewards"
        )
    following = torch.nn.functional.pad(turn_index, (0, 1))[:, 1:]
    is_last = (turn_index > 0) & (turn_index != following)
    return zero_outside(turn_rewards.gather(1, (turn_index - 1).clamp(min=0)), is_last)
