"""Whose log-probabilities serve as old ones in the clipped ratio: the rollouts' own, or the trainer's.

The policy that samples is the one that is trained, but not by the same computation: its adapter is merged and
its keys and values are remembered, so that the two differ by rounding, more in half precision or in 4 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_mtrl import objectives
from lightning_mtrl.algorithms.base import Context
from lightning_mtrl.algorithms.passes import training_logprobs
from lightning_mtrl.batch import TokenBatch
from lightning_mtrl.modules.policy import Policy

Batch = TypeVar("Batch", bound=TokenBatch)
Passes = Callable[[Batch], Iterable[slice] | Iterable[Tensor]]


class BehaviourCheck:
    """Compares the stored log-probabilities of a sample with the trainer's, before each use.

    It costs a forward pass over the sample. Where they disagree, all are computed anew, which is said once.

    Args:
        context: device, precision, and who is told.
        policy: that is trained, and sampled the rollouts.
        limit: largest difference of a token in nats at which the stored ones are used; None for any.
        rows: conversations or states in the sample, at most.
    """

    def __init__(self, context: Context, policy: Policy, limit: float | None, rows: int) -> None:
        self.context, self.policy, self.limit, self.rows = context, policy, limit, rows
        self._told = False

    @torch.no_grad()
    def agreed(self, batch: Batch, passes: Passes[Batch]) -> tuple[Batch, dict[str, float]]:
        """The batch with log-probabilities that agree with the trainer's, and how far the stored ones did.

        Args:
            batch: sampled by the policy as it is now.
            passes: cuts a batch into rows for one forward pass each.
        """
        spread = torch.linspace(0, len(batch) - 1, min(self.rows, len(batch))).round().long()
        sample = batch.rows(spread.to(batch.input_ids.device))
        measured = differences(sample, self._logprobs(sample, passes))
        agree = self.limit is None or measured["behaviour_difference_max"] <= self.limit
        if not agree:
            self._tell(measured["behaviour_difference_max"])
            batch = replace(batch, behaviour_logprobs=self._logprobs(batch, passes))
        return batch, {**measured, "behaviour_recomputed": float(not agree)}

    def _logprobs(self, batch: Batch, passes: Passes[Batch]) -> Float[Tensor, "B T"]:
        return training_logprobs(self.policy.role, batch, list(passes(batch)), self.context)

    def _tell(self, largest: float) -> None:
        if not self._told:
            self.context.say(
                f"The rollouts' log-probabilities differ from the trainer's by up to {largest:.3g} nats, "
                f"more than max_logprob_difference ({self.limit}), so the trainer computes them anew, now "
                f"and whenever this is so (policy/behaviour_recomputed). It costs one more forward pass."
            )
        self._told = True


def differences(batch: TokenBatch, logprobs: Float[Tensor, "B T"]) -> dict[str, float]:
    """How far stored log-probabilities are from these, over the sampled tokens, in nats.

    The KL divergence of the sampler from the trainer is estimated with "k3", per token.
    """
    mask, stored = batch.response_mask, batch.behaviour_logprobs
    off = (stored - logprobs)[mask].abs()
    kl = objectives.kl_penalty(stored, logprobs, "k3", mask=mask)[mask]
    return {
        "behaviour_difference_max": off.max().item(),
        "behaviour_difference_mean": off.mean().item(),
        "behaviour_kl": kl.mean().item(),
    }
