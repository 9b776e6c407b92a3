"""The outcome in random shares."""

from __future__ import annotations

import numpy as np
import torch

from lightning_mtrl import objectives
from lightning_mtrl.algorithms.ranges import expect_above_zero
from lightning_mtrl.batch import ConversationBatch
from lightning_mtrl.conversation import Conversation
from lightning_mtrl.credit.base import Credit, CreditAssigner, share_outcome, turn_mask


class Dirichlet(CreditAssigner):
    """Turns get shares of the outcome that are drawn anew in each iteration and say nothing about them.

    What a method gains over this it gains by its credit, and not by rewarding turns at all.

    Source: one reading of the baseline "uniform decomposition" of ITPO (arXiv:2603.23550), table 1.

    Args:
        concentration: of the symmetric Dirichlet distribution, above 0; 1 draws all splits alike, more draws
            them closer to equal shares.
    """

    def __init__(self, concentration: float = 1.0) -> None:
        expect_above_zero("credit.init_args.concentration", concentration, 1.0)
        self.concentration = concentration

    def assign(self, batch: ConversationBatch, conversations: list[Conversation]) -> Credit:
        """Random shares at the ends of the responses; the seed of the phase decides them."""
        present = turn_mask(batch)
        draws = np.random.default_rng(self.context.seed).gamma(self.concentration, size=tuple(present.shape))
        weights = objectives.proportional_weights(torch.from_numpy(draws).float(), present)
        return share_outcome(weights, batch)
