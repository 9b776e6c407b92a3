"""How an implicit PRM learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_mtrl.ranges import expect, expect_above_zero, expect_at_least

_KEY = "algorithm.init_args.prm"  # where a configuration file has them


@dataclass(frozen=True)
class PRMConfig:
    """How the implicit PRM learns.

    Attributes:
        beta: reward per nat of log-ratio, above 0. Published (table 2): 0.05 for PRIME and ITPO and 0.01 for
            Norm-ITPO in math tutoring; 0.005 in document writing; 0.005, for ITPO 0.01, in the medical task.
        loss: "ce" for outcomes in [0, 1]; "pairwise" compares conversations of a group, of any range.
        epochs: passes over the fresh conversations, before they are scored.
        minibatch_groups: groups in one optimizer step.
        micro_batch_size: conversations in one forward pass, at most; null for as many as are of similar
            length.
        learning_rate: of AdamW. Published: 1e-6, with full fine-tuning.
        weight_decay: of AdamW.
        max_norm: gradients are scaled down to this norm.
    """

    beta: float = 0.05
    loss: Literal["ce", "pairwise"] = "ce"
    epochs: int = 1
    minibatch_groups: int = 4
    micro_batch_size: int | None = None
    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    max_norm: float = 10.0

    def __post_init__(self) -> None:
        for name in ("beta", "max_norm"):
            expect_above_zero(f"{_KEY}.{name}", getattr(self, name), 0.05)
        for name in ("epochs", "minibatch_groups", "micro_batch_size"):
            expect_at_least(f"{_KEY}.{name}", getattr(self, name), 1, 4)
        for name in ("learning_rate", "weight_decay"):
            expect_at_least(f"{_KEY}.{name}", getattr(self, name), 0, 1e-5)
        whole = self.loss != "pairwise" or self.micro_batch_size is None
        kind = "null with the loss 'pairwise', which compares all conversations of a step"
        expect(whole, f"{_KEY}.micro_batch_size", self.micro_batch_size, kind, "null")
