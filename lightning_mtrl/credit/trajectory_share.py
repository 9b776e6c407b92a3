"""The outcome as the return of every token of its conversation."""

from __future__ import annotations

from lightning_mtrl.credit.outcome import Outcome


class TrajectoryShare(Outcome):
    """Every sampled token is credited with the whole outcome: the critic-free baseline of the paper.

    A reward at the end is the undiscounted return of every token before it, so the rewards are those of
    `Outcome`. The name tells what it is for: `RLOO`, `GRPO` and `REINFORCE`, which give all tokens of a
    conversation one advantage then.

    Source: the baseline "trajectory share" of ITPO (arXiv:2603.23550), table 1.
    """
