"""Kullback-Leibler divergence between policy and reference: exact, and from samples.

KL(p || q) is an expectation under p. "reverse" is KL(policy || reference), whose samples come from the
policy; "forward" is KL(reference || policy), whose samples come from the reference. For samples of a third
policy multiply an estimate by `importance_weights`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_mtrl.objectives.masked import zero_outside

Estimator = Literal["k1", "abs", "k2", "k3", "k1+", "k3+"]
Direction = Literal["reverse", "forward"]

MAX_LOG_RATIO = 20.0  # exp(20) is 5e8; more only overflows


def kl_penalty(
    logprobs: Float[Tensor, "*S"],
    reference_logprobs: Float[Tensor, "*S"],
    estimator: Estimator = "k3",
    direction: Direction = "reverse",
    mask: Bool[Tensor, "*S"] | None = None,
) -> Float[Tensor, "*S"]:
    """Estimate of the KL divergence from each sampled token, in nats.

    With d the log-ratio of the sampling to the other distribution: "k1" is d (unbiased, of either sign);
    "abs" is its size; "k2" is d^2 / 2 (biased, never negative); "k3" is exp(-d) + d - 1 (unbiased, never
    negative). As a loss for samples of the policy, "k1" has no expected gradient and "k3" that of the
    other direction; "k1+" and "k3+" have the value of "k1" and "k3" and the gradient of "k2", which is
    the right one.

    Args:
        logprobs: log-probability of each sampled token under the policy, in nats; carries the gradient.
        reference_logprobs: the same tokens under the reference; constant.
        estimator: see above.
        direction: "reverse" for samples of the policy, "forward" for samples of the reference.
        mask: True on the tokens that count; what stands elsewhere has no effect and the result is 0
            there. By default all count.

    Raises:
        ValueError: for an unknown name, and for "k1+" or "k3+" in the forward direction, where "k1" and
            "k3" have the right gradient themselves.

    Source: J. Schulman 2020, "Approximating KL divergence".
    """
    if estimator not in _ESTIMATORS:
        raise ValueError(f"KL estimator is {estimator!r}; it can be {', '.join(map(repr, _ESTIMATORS))}")
    if direction not in ("reverse", "forward"):
        raise ValueError(f"KL direction is {direction!r}; it can be 'reverse' or 'forward'")
    if direction == "forward" and estimator.endswith("+"):
        raise ValueError(f"KL estimator {estimator!r} is for the reverse direction; use {estimator[:-1]!r}")
    if mask is not None:
        logprobs, reference_logprobs = zero_outside(logprobs, mask), zero_outside(reference_logprobs, mask)
    log_ratio = logprobs - reference_logprobs
    return _ESTIMATORS[estimator](log_ratio if direction == "reverse" else -log_ratio)


def _k1(log_ratio: Tensor) -> Tensor:
    return log_ratio


def _k2(log_ratio: Tensor) -> Tensor:
    return log_ratio**2 / 2


def _k3(log_ratio: Tensor) -> Tensor:
    return torch.exp((-log_ratio).clamp(max=MAX_LOG_RATIO)) + log_ratio - 1


def _with_gradient_of_k2(estimate: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def straight_through(log_ratio: Tensor) -> Tensor:
        carrier = _k2(log_ratio)
        return carrier + (estimate(log_ratio) - carrier).detach()

    return straight_through


_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": _k1,
    "abs": torch.abs,
    "k2": _k2,
    "k3": _k3,
    "k1+": _with_gradient_of_k2(_k1),
    "k3+": _with_gradient_of_k2(_k3),
}


def importance_weights(
    target_logprobs: Float[Tensor, "*S"], behaviour_logprobs: Float[Tensor, "*S"]
) -> Float[Tensor, "*S"]:
    """Weight of each sampled token that turns a mean under the behaviour policy into one under the target.

    It corrects for the token itself and not for the tokens before it. No gradient passes through it.
    """
    return torch.exp((target_logprobs - behaviour_logprobs).clamp(max=MAX_LOG_RATIO)).detach()


def exact_kl(logprobs_p: Float[Tensor, "*S V"], logprobs_q: Float[Tensor, "*S V"]) -> Float[Tensor, "*S"]:
    """KL(p || q) in nats of whole distributions over V tokens; infinite where q lacks a token of p.

    Args:
        logprobs_p: normalised log-probabilities; minus infinity for an impossible token.
        logprobs_q: likewise.
    """
    possible = logprobs_p > -torch.inf
    log_ratio = zero_outside(logprobs_p - logprobs_q, possible | logprobs_p.isnan())
    return (logprobs_p.exp() * log_ratio).sum(-1)


def adaptive_kl_coef(
    kl_coef: float, kl: float, kl_target: float, gain: float = 0.1, max_error: float = 0.2
) -> float:
    """The next coefficient of the KL penalty: larger when the measured KL was above its target.

    Args:
        kl_coef: the present coefficient, in reward per nat.
        kl: measured KL in nats (per token or per response, as the target).
        kl_target: the KL to aim at, above 0.
        gain: how strongly the coefficient reacts; conversations in a step over a horizon, in the form with
            a horizon.
        max_error: the relative error is clipped to this size.

    Raises:
        ValueError: if `kl_target` is not above 0.

    Source: Ziegler et al. 2019 (arXiv:1909.08593).
    """
    if kl_target <= 0:
        raise ValueError(f"kl_target is {kl_target}, but it divides and must be above 0")
    error = min(max(kl / kl_target - 1, -max_error), max_error)
    return kl_coef * (1 + gain * error)
