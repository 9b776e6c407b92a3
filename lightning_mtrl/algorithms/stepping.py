"""One optimizer step from micro-batches, which never lets a number that is not finite into the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mtrl.algorithms.base import Context
from lightning_mtrl.algorithms.memory_limit import MemoryLimit, is_out_of_memory
from lightning_mtrl.batch import TokenBatch, TurnFeatures
from lightning_mtrl.errors import UserError
from lightning_mtrl.modules.base import RoleModule
from lightning_mtrl.modules.step_metrics import StepMetrics

Batch = Any  # a TokenBatch or TurnFeatures; a step's parts are of the same kind as the step
Rows = slice | Tensor
Cut = Callable[[Batch, int | None], Iterable[Rows]]


@dataclass(frozen=True)
class Learned:
    """What a module has learned until some moment, to go back to; on the CPU.

    Attributes:
        weights: the module's own.
        optimizer: state of its optimizer, without which the next step would follow what was given up.
    """

    weights: dict[str, Tensor]
    optimizer: dict[str, Any]


class Stepper:
    """Steps one module.

    The losses of the micro-batches are summed, and each carries weights that sum to 1 over the step, so the
    gradient does not depend on how the step was cut; nor do the numbers that the module logs, once a step.

    Several processes do a share of a step's rows each, and agree once: on losses, numbers and errors, and on
    the sum of their gradients. Between that they need nothing from each other, so one may have fewer rows
    than another, or none. What does not fit into memory is done again in smaller parts.

    Args:
        context: devices, precision, processes, and how many steps in a row may be skipped.
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
        self.limit = MemoryLimit(module.role)
        self.parameters, self.backbone = module.own_parameters(), module.backbone
        self.sharding = module.backbone.sharding
        with module.backbone.only_trainable(module.role):
            self.module: Any
            self.optimizer: Any
            optimizer = self.sharding.over_parts(module.configure_optimizers())
            self.module, self.optimizer = self.fabric.setup(module, optimizer)
        context.processes.make_alike(self.sharding.unshared(self.parameters))
        self.followers: list[Stepper] = []

    def joined_by(self, other: Stepper | None) -> list[Stepper]:
        """The steppers to call, in order, where another module is trained on the same batches.

        A module that only reads the hidden states of this one's role is trained in the passes that are made
        for this one, and steps with it.

        Args:
            other: of the other module; None for no other.
        """
        if other is None:
            return [self]
        module, reader = self.module.module, other.module.module
        if reader.owns_role or reader.role != module.role:
            return [self, other]
        self.followers.append(other)
        module.readers = (*module.readers, reader)
        return [self]

    def begin(self) -> None:
        """Put the module into training mode, before a series of steps."""
        # Its own mode comes last, since they share a backbone, and a policy must be without dropout.
        for each in (*self.followers, self):
            each.module.train()

    def learned(self) -> Learned:
        """Weights and optimizer as they are now; all processes together."""
        return Learned(self.module.module.state(), _copied(self.optimizer.state_dict()))

    def go_back(self, learned: Learned) -> None:
        """Go on from `learned` as if nothing had come after it; all processes together."""
        self.module.module.load_state(learned.weights)
        # The optimizer goes on with the very tensors that it is given, and this may not be the last return.
        self.optimizer.load_state_dict(_copied(learned.optimizer))

    def step(self, batch: TokenBatch | TurnFeatures, cut: Cut | None = None) -> float:
        """Take one step on a batch whose weights sum to 1; returns the loss (NaN if it was skipped).

        Args:
            batch: all rows of the step, the same on all processes.
            cut: which rows go through the module together, given the rows and the micro-batch size; in the
                order in which they stand by default.

        Raises:
            UserError: after `max_skipped_steps` steps in a row whose loss or gradient was not finite, or when
                a single row does not fit into memory.
        """
        mine, cut = self._share(batch), cut or _in_order

        def parts() -> Iterator[Batch]:
            if len(mine):
                yield from (mine.rows(rows) for rows in cut(mine, self.micro_batch_size))

        return self._step(batch, parts)

    def step_whole(self, batch: TokenBatch | TurnFeatures) -> float:
        """The same on a batch that must not be cut, because its loss compares rows with each other.

        The first process does it.
        """
        alone = [batch] if self.context.processes.is_first else []
        return self._step(batch, lambda: alone, smallest=len(batch))

    def _step(self, batch: Batch, parts: Callable[[], Iterable[Batch]], smallest: int = 1) -> float:
        with self._weights_for(batch):
            shares = self.context.processes.each(lambda: self._accumulated(parts, smallest))
            trained = self._trained()
            # Processes may be several without sharing weights out, so what is whole is summed by them.
            self.context.processes.sum_gradients(self.sharding.unshared(trained))
            self.sharding.sum_gradients(trained)
        total = sum(loss for loss, _, _ in shares)
        self.module.module.log_step(StepMetrics.joined([metrics for _, metrics, _ in shares]))
        for text in (text for _, _, said in shares for text in said):
            self.context.say(text)
        together = (self, *self.followers)
        norms = [self.sharding.clip_gradients(each.parameters, each.max_norm) for each in together]
        finite = all(bool(torch.isfinite(norm)) for norm in norms) and math.isfinite(total)
        if finite:
            for each in together:
                each.optimizer.step()
            self.skipped_in_row = 0
        else:
            self._skip()
        for each in together:
            each.optimizer.zero_grad()
        self.context.on_step()
        return total if finite else float("nan")

    def _trained(self) -> list[nn.Parameter]:
        return [weight for each in (self, *self.followers) for weight in each.parameters]

    def _weights_for(self, batch: Batch) -> AbstractContextManager[None]:
        # Features are what the role has computed already.
        return nullcontext() if isinstance(batch, TurnFeatures) else self.backbone.whole(self.module.role)

    def _accumulated(
        self, parts: Callable[[], Iterable[Batch]], smallest: int
    ) -> tuple[float, StepMetrics, list[str]]:
        """Loss, numbers and remarks of this process's share; its gradients are on the weights."""
        said: list[str] = []
        while True:
            try:
                return *self._once(parts), said
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                # A pass may have left some of its gradients, so the share begins anew.
                said.append(self.limit.lower(smallest, error))
            for parameter in self._trained():
                parameter.grad = None
            self.limit.release()

    def _once(self, parts: Callable[[], Iterable[Batch]]) -> tuple[float, StepMetrics]:
        total = 0.0
        with self.module.module.one_step() as metrics:
            for part in self.limit.kept(parts()):
                with self.fabric.autocast():
                    loss = self.module.training_step(part.to(self.fabric.device), 0)
                self.fabric.backward(loss)
                total += float(loss.detach())
        return total, metrics.cpu()

    def _share(self, batch: TokenBatch | TurnFeatures) -> TokenBatch | TurnFeatures:
        """This process's rows: all have about the same number of tokens."""
        processes = self.context.processes
        if processes.size == 1:
            return batch
        mask = batch.turn_mask if isinstance(batch, TurnFeatures) else batch.attention_mask
        order = mask.flatten(1).sum(1).argsort(descending=True, stable=True)
        mine = torch.tensor(sorted(processes.dealt(order.tolist())), dtype=torch.int64)
        return batch.rows(mine.to(mask.device))

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


def begin(steppers: Sequence[Stepper]) -> None:
    """Put modules into training mode together, before a series of steps."""
    # The first one's mode comes last, for the same reason as there.
    for stepper in reversed(steppers):
        stepper.begin()


def _in_order(batch: Batch, size: int | None) -> Iterator[slice]:
    size = size or len(batch)
    return (slice(start, start + size) for start in range(0, len(batch), size))


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an optimizer, with tensors of its own on the CPU."""
    moments = {
        number: {name: _own(value) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": moments, "param_groups": [dict(group) for group in state["param_groups"]]}


def _own(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
