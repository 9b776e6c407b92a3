"""Losses that compare two conversations, or two responses to one state: DPO over turns, and REFUEL.

Their log-ratios are log pi_theta - log pi_ref of whole turns, as `turn_sums` gives them, 0 where a
conversation has no such turn.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def discounted_turn_weights(turns: Int[Tensor, " N"], width: int, gamma: float) -> Float[Tensor, "N K"]:
    """phi(t, T) = gamma^t (1 - gamma^(T-t)) / (1 - gamma^T), and (T - t) / T at gamma 1; 0 from T on.

    The first turn weighs 1 and later ones less; with gamma towards 0 only the first one is left.

    Args:
        turns: T, number of turns of each conversation.
        width: K, number of turns to give weights for.
        gamma: in (0, 1].

    Raises:
        ValueError: if gamma is not in (0, 1].

    Source: DMPO (arXiv:2406.14868), with the factor gamma^t of its code, which its stated limit needs.
    """
    if not 0.0 < gamma <= 1.0:
        raise ValueError(f"gamma must be in (0, 1], got {gamma}")
    # In double precision on the CPU, since some devices (Apple's) have none.
    total = turns.cpu().double()[:, None]
    place = torch.arange(width, dtype=torch.float64)
    left = (total - place).clamp(min=0.0)
    if gamma == 1.0:
        weights = left / total.clamp(min=1.0)
    else:
        weights = gamma**place * (1.0 - gamma**left) / (1.0 - gamma ** total.clamp(min=1.0))
    return weights.float().to(turns.device)


def multi_turn_dpo_loss(
    better: Float[Tensor, "N K"],
    worse: Float[Tensor, "N K"],
    beta: float,
    better_weights: Float[Tensor, "N K"] | None = None,
    worse_weights: Float[Tensor, "N K"] | None = None,
) -> Float[Tensor, ""]:
    """Mean over pairs of -log sigmoid(beta (sum_t phi_t l_t of the better - the same of the worse)), in nats.

    Args:
        better: log-ratio l_t of each turn of the preferred conversation; it carries the gradient.
        worse: of the other one.
        beta: above 0.
        better_weights: phi, as of `discounted_turn_weights` for DMPO; None for 1, which is M-DPO.
            With one turn both are DPO.
        worse_weights: the same for the other conversation.

    Source: DMPO (arXiv:2406.14868); M-DPO (arXiv:2409.02392); DPO (arXiv:2305.18290), Eq. 7.
    """
    scores = [
        (ratios if weights is None else weights * ratios).sum(1)
        for ratios, weights in ((better, better_weights), (worse, worse_weights))
    ]
    return torch.nn.functional.softplus(-beta * (scores[0] - scores[1])).mean()


def refuel_loss(
    first: Float[Tensor, " N"], second: Float[Tensor, " N"], returns: Float[Tensor, "N 2"], eta: float
) -> Float[Tensor, ""]:
    """Mean squared error of the difference of two log-ratios against eta times that of the returns.

    Args:
        first: log-ratio of one response to a state against the policy that drew it; it carries the gradient.
        second: of another response to the same state.
        returns: what followed each of the two.
        eta: step size; the paper divides the log-ratios by it instead, with the same minimiser.

    Source: REFUEL (arXiv:2410.04612), with the scale of its code.
    """
    return (first - second - eta * (returns[:, 0] - returns[:, 1])).square().mean()
