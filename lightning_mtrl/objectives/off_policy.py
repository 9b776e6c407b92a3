"""Evaluation of a policy pi on conversations that another one, the behaviour policy mu, has led.

The unit of time is the turn: an importance ratio is that of a whole response. All targets here are cases of
one recursion (`traced_returns`), whose fixed point is Q^pi whatever the traces are; they decide how much is
taken from what happened and how much from what is predicted.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_mtrl.objectives.credit import turn_sums
from lightning_mtrl.objectives.masked import zero_outside

BISECTIONS = 40  # halvings of the interval in which an expectile is looked for


def turn_log_ratios(
    logprobs: Float[Tensor, "B T"], behaviour_logprobs: Float[Tensor, "B T"], turn_index: Int[Tensor, "B T"]
) -> Float[Tensor, "B K"]:
    """Log-ratio log pi(a_k|s_k) - log mu(a_k|s_k) in nats of each response: the sum over its tokens.

    Args:
        logprobs: of each sampled token under the policy that is evaluated, in its own prompt.
        behaviour_logprobs: under the policy that sampled it, in the prompt it had (its persona included).
        turn_index: k on the tokens of the k-th response (k = 1, 2, ...), 0 elsewhere.
    """
    return turn_sums(logprobs - behaviour_logprobs, turn_index)


def clipped_ratios(log_ratios: Float[Tensor, "*S"], clip: float) -> Float[Tensor, "*S"]:
    """min(clip, pi/mu), in [0, clip]; from logarithms, so that a large ratio doesn't overflow."""
    return log_ratios.clamp(max=torch.tensor(clip).log().item()).exp()


def self_normalised_weights(
    log_weights: Float[Tensor, "*S"], mask: Bool[Tensor, "*S"]
) -> Float[Tensor, "*S"]:
    """Weights that sum to 1 over the mask: the ratios divided by their sum; 0 elsewhere.

    Source: Hesterberg 1995, weighted importance sampling.

    Raises:
        ValueError: for an empty mask.
    """
    if not bool(mask.any()):
        raise ValueError("self-normalised weights need at least one ratio")
    return log_weights.masked_fill(~mask, -torch.inf).flatten().softmax(0).view(log_weights.shape)


def effective_sample_size(log_weights: Float[Tensor, "*S"], mask: Bool[Tensor, "*S"]) -> Float[Tensor, ""]:
    """(sum w)^2 / sum w^2 over the mask: from 1, where one weight is all there is, to the number of weights.

    Source: Kish 1965; for importance weights Kong 1992.

    Raises:
        ValueError: for an empty mask.
    """
    return 1 / (self_normalised_weights(log_weights, mask) ** 2).sum()


def traced_returns(
    turn_rewards: Float[Tensor, "B K"],
    values: Float[Tensor, "B K"],
    next_values: Float[Tensor, "B K"],
    traces: Float[Tensor, "B K"],
    turn_mask: Bool[Tensor, "B K"],
    gamma: float,
) -> Float[Tensor, "B K"]:
    """G_k = r_k + gamma (V_{k+1} + c_{k+1} (G_{k+1} - Q_{k+1})).

    In expectation over the behaviour policy Q^pi is a fixed point of it for any traces c, also for those of a
    ratio that isn't exact; it is the only one, and is approached, where 0 <= c <= pi/mu.

    Args:
        turn_rewards: reward observed after each response.
        values: Q(s_k, a_k) of each logged response; constant.
        next_values: E_{a ~ pi} Q(s_{k+1}, a) of the state *after* each response; 0 where the conversation
            terminated with it. For the last turn of a truncated conversation the value of where it stopped.
        traces: c_k of each logged response; that of the first one is never used, since Q(s_1, a_1) is given
            its response.
        turn_mask: True where the conversation has that turn; turns start at column 0.
        gamma: discount for each turn, in [0, 1].

    Returns:
        Targets in units of reward; 0 outside `turn_mask`. They may leave the range of the returns.

    Source: Munos et al. 2016 (arXiv:1606.02647), equation 3, as a recursion.
    """
    rewards, known = zero_outside(turn_rewards, turn_mask), zero_outside(values, turn_mask)
    after, kept = zero_outside(next_values, turn_mask), zero_outside(traces, turn_mask)
    correction = torch.zeros_like(rewards[:, 0])
    columns: list[Tensor] = []
    for k in reversed(range(rewards.size(1))):
        target = rewards[:, k] + gamma * (after[:, k] + correction)
        # Columns after the last turn have no trace, so nothing comes from them.
        correction = kept[:, k] * (target - known[:, k])
        columns.append(target)
    return zero_outside(torch.stack(columns[::-1], 1), turn_mask)


def expected_sarsa_targets(
    turn_rewards: Float[Tensor, "B K"],
    next_values: Float[Tensor, "B K"],
    turn_mask: Bool[Tensor, "B K"],
    gamma: float,
) -> Float[Tensor, "B K"]:
    """G_k = r_k + gamma E_{a ~ pi} Q(s_{k+1}, a): one turn of the log, then the policy's own responses.

    Source: van Seijen et al. 2009; see `traced_returns` for the arguments.
    """
    nothing = torch.zeros_like(turn_rewards)
    return traced_returns(turn_rewards, nothing, next_values, nothing, turn_mask, gamma)


def per_decision_returns(
    turn_rewards: Float[Tensor, "B K"],
    ratios: Float[Tensor, "B K"],
    turn_mask: Bool[Tensor, "B K"],
    gamma: float,
) -> Float[Tensor, "B K"]:
    """G_k = r_k + gamma rho_{k+1} G_{k+1}: per-decision importance sampling, without any prediction.

    Unbiased for Q^pi with the plain ratios rho = pi/mu, whose product can have a huge variance; biased, with
    less variance, where they are clipped.

    Source: Precup, Sutton and Singh 2000, for action values; see `traced_returns` for the arguments.
    """
    nothing = torch.zeros_like(turn_rewards)
    return traced_returns(turn_rewards, nothing, nothing, ratios, turn_mask, gamma)


def retrace_targets(
    turn_rewards: Float[Tensor, "B K"],
    values: Float[Tensor, "B K"],
    next_values: Float[Tensor, "B K"],
    log_ratios: Float[Tensor, "B K"],
    turn_mask: Bool[Tensor, "B K"],
    gamma: float,
    td_lambda: float = 1.0,
    clip: float = 1.0,
) -> Float[Tensor, "B K"]:
    """Targets of Retrace(lambda): traces c = lambda min(clip, pi/mu) in `traced_returns`.

    Args:
        turn_rewards: see `traced_returns`, as for the others that are not named here.
        values: likewise.
        next_values: likewise.
        log_ratios: log pi/mu of each response, in nats.
        turn_mask: likewise.
        gamma: likewise.
        td_lambda: in [0, 1]; 0 is `expected_sarsa_targets`.
        clip: largest ratio that counts, above 0; 1 in the paper. More keeps longer traces, of more variance.

    Source: Munos et al. 2016 (arXiv:1606.02647), section 3.
    """
    traces = td_lambda * clipped_ratios(log_ratios, clip)
    return traced_returns(turn_rewards, values, next_values, traces, turn_mask, gamma)


def expectile_loss(
    predictions: Float[Tensor, "*S"], targets: Float[Tensor, "*S"], expectile: float
) -> Float[Tensor, "*S"]:
    """|tau - 1(u < 0)| u^2 with u = target - prediction: half the squared error for tau = 0.5.

    Above 0.5 a prediction that is too low costs more, so its minimiser lies between mean and maximum.

    Source: Kostrikov, Nair and Levine 2021 (arXiv:2110.06169), section 4.1.
    """
    off = targets - predictions
    return torch.where(off < 0, 1 - expectile, expectile) * off**2


def expectiles(samples: Float[Tensor, "*S N"], expectile: float) -> Float[Tensor, "*S"]:
    """Minimiser of the mean `expectile_loss` over the last dimension: 0.5 is the mean, towards 1 the maximum.

    Of Q over responses of a state it is the value that ILQL bootstraps from (Snell et al. 2022,
    arXiv:2206.11871), which leans towards the best responses that the policy gives without ever asking for
    others. Found by bisection.

    Args:
        samples: at least one number each.
        expectile: in (0, 1).
    """
    low, high = samples.amin(-1), samples.amax(-1)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        off = samples - middle[..., None]
        # Minus half the slope of the loss, which falls in the prediction and is 0 at its minimiser.
        pull = (torch.where(off < 0, 1 - expectile, expectile) * off).sum(-1)
        low, high = torch.where(pull > 0, middle, low), torch.where(pull > 0, high, middle)
    return (low + high) / 2
