"""One optimizer step from micro-batches, which never lets a number that is not finite into the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from lightning_mtrl.algorithms.base import Context
from lightning_mtrl.batch import TokenBatch, TurnFeatures
from lightning_mtrl.errors import UserError
from lightning_mtrl.modules.base import RoleModule


class Stepper:
    """Steps one module.

    The losses of the micro-batches are summed, and each carries weights that sum to 1 over the step, so the
    gradient does not depend on how the step was cut; nor do the numbers that the module logs, once a step.

    Args:
        context: devices, precision, and how many steps in a row may be skipped.
        module: the module to train.
        max_norm: gradients are scaled down to this norm.
        micro_batch_size: rows in one forward pass; None for all rows of the step.
    """

    def __init__(
        self, context: Context, module: RoleModule, max_norm: float, micro_batch_size: int | None
    ) -> None:
        self.context, self.fabric = context, context.fabric
        self.max_norm, self.micro_batch_size = max_norm, micro_batch_size
        self.skipped, self.skipped_in_row = 0, 0
        self.parameters = module.own_parameters()
        with module.backbone.only_trainable(module.role):
            self.module: Any
            self.optimizer: Any
            self.module, self.optimizer = self.fabric.setup(module, module.configure_optimizers())

    def begin(self) -> None:
        """Put the module into training mode, before a series of steps."""
        self.module.train()

    def step(self, batch: TokenBatch | TurnFeatures) -> float:
        """Take one step on a batch whose weights sum to 1; returns the loss (NaN if it was skipped).

        Raises:
            UserError: after `max_skipped_steps` steps in a row whose loss or gradient was not finite.
        """
        return self.step_parts(self._parts(batch))

    def step_parts(self, parts: Iterable[TokenBatch | TurnFeatures]) -> float:
        """Take one step on parts of a batch, each for one forward pass, whose weights together sum to 1."""
        total = 0.0
        with self.module.module.one_step():
            for part in parts:
                with self.fabric.autocast():
                    loss = self.module.training_step(part.to(self.fabric.device), 0)
                self.fabric.backward(loss)
                total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.max_norm)
        finite = bool(torch.isfinite(norm)) and math.isfinite(total)
        if finite:
            self.optimizer.step()
            self.skipped_in_row = 0
        else:
            self._skip()
        self.optimizer.zero_grad()
        self.context.on_step()
        return total if finite else float("nan")

    def _parts(self, batch: TokenBatch | TurnFeatures) -> Iterable[TokenBatch | TurnFeatures]:
        size = self.micro_batch_size or len(batch)
        return (batch.rows(slice(start, start + size)) for start in range(0, len(batch), size))

    def _skip(self) -> None:
        self.skipped += 1
        self.skipped_in_row += 1
        self.context.say(
            f"A step of {self.module.role!r} was skipped: its loss or gradient was not finite "
            f"({self.skipped} skipped so far, {self.skipped_in_row} in a row)."
        )
        if self.skipped_in_row >= self.context.max_skipped_steps:
            raise UserError(
                f"loss or gradient of {self.module.role!r} was not finite in {self.skipped_in_row} "
                f"steps in a row "
                f"(loop.max_skipped_steps). The last checkpoint is usable; lower the learning rate "
                f"and resume."
            )
