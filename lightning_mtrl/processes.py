"""The processes that run one program together, and what they have to tell each other.

Every process runs the same program on the same plain data, and so decides everything in the same way. What
differs is the share of the work that each does; whoever shares work out does it through the few methods here,
which a single process goes through too. Nobody else asks how many processes there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, distributed, nn

from lightning_mtrl.errors import AnotherFailed, UserError

T = TypeVar("T")
R = TypeVar("R")

BUCKET = 2**24  # numbers that are summed over the processes at once; 64 MiB of float32


class Processes:
    """The processes of a run, seen from one of them; without arguments a process that is alone.

    Work between two agreements is done apart, and an error in it on one process is an error on all of them,
    so none waits for ever. A `UserError` is the same `UserError` on all; anything else is `AnotherFailed`
    where nothing failed.

    Args:
        rank: number of this process, from 0.
        size: number of all.
        device: where tensors have to be to be sent.
    """

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | str = "cpu") -> None:
        self.rank, self.size, self.device = rank, size, torch.device(device)
        self._agreeing = False

    @classmethod
    def launched(cls, device: torch.device | str) -> Self:
        """The processes that were launched, or this one where none were."""
        if not distributed.is_initialized():
            return cls()
        return cls(distributed.get_rank(), distributed.get_world_size(), device)

    @property
    def is_first(self) -> bool:
        """Whether this one writes files and talks to people."""
        return self.rank == 0

    def share(self, number: int) -> range:
        """This process's part of `range(number)`, in one piece; all parts together are the whole."""
        return range(number * self.rank // self.size, number * (self.rank + 1) // self.size)

    def dealt(self, items: Sequence[T]) -> Sequence[T]:
        """Every `size`-th item, as cards are dealt: good for items in the order of their costs."""
        return items if self.size == 1 else items[self.rank :: self.size]

    def over(self, items: Sequence[T], work: Callable[[Sequence[T]], Sequence[R]]) -> list[R]:
        """Deal items out and let every process work on its own ones; returns all results, item by item.

        Args:
            items: the same on all processes.
            work: gives one result an item, which can be sent: tensors have to be on the CPU.
        """
        shares = self.each(lambda: work(self.dealt(items)))
        return [shares[place % self.size][place // self.size] for place in range(len(items))]

    def each(self, work: Callable[[], T]) -> list[T]:
        """Let every process do its part of something; returns all results by rank, on every process.

        Args:
            work: gives something plain that can be sent; it must not wait for the other processes itself.

        Raises:
            UserError: if it raised one on any process.
            AnotherFailed: if anything else was raised on another process.
        """
        with self._apart():
            if self.size == 1:
                return [work()]
            return self._gathered(work)

    def together(self, work: Callable[[], T]) -> T:
        """Let every process do the same, or nothing at all if one fails; returns this process's own result.

        Raises:
            UserError: if `work` raised one on any process.
            AnotherFailed: if anything else was raised on another process.
        """
        own: list[T] = []
        self.each(lambda: own.append(work()))
        return own[0]

    def first(self, work: Callable[[], T]) -> T:
        """Let the first process do something alone; the others wait for the result and get it too.

        Raises:
            UserError: if `work` raised one.
            AnotherFailed: on the other processes, if it raised anything else.
        """
        alone: Callable[[], Any] = work if self.is_first else _nothing
        found: T = self.each(alone)[0]
        return found

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the processes, the same bits on all of them."""
        if self.size == 1:
            return values
        sent = values.detach().to(self.device, copy=True)
        distributed.all_reduce(sent)
        return sent.to(values.device)

    def joined(self, part: Float[Tensor, " P"]) -> Float[Tensor, " N"]:
        """The parts of all processes, one behind the other in their order; all are of one length."""
        sent = part.contiguous().to(self.device)
        found = sent.new_empty(self.size * len(sent))
        distributed.all_gather(list(found.chunk(self.size)), sent)
        return found.to(part.device)

    def own_sum(self, values: Float[Tensor, " N"]) -> Float[Tensor, " P"]:
        """This process's part of the sum over the processes, if it is cut into equal parts in their order."""
        sent = values.contiguous().to(self.device)
        found = sent.new_empty(len(sent) // self.size)
        distributed.reduce_scatter(found, list(sent.chunk(self.size)))
        return found.to(values.device)

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Put the sum over the processes into every gradient; one that a process lacks counts as 0 there.

        A parameter without a gradient on any process still has none.
        """
        if self.size == 1:
            return
        present = self.sum(torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32))
        used = [p for p, number in zip(parameters, present.tolist(), strict=True) if number]
        for bucket in _buckets(used):
            summed = self.sum(torch.cat([_gradient(p).flatten() for p in bucket]))
            parts = summed.split([p.numel() for p in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                parameter.grad = part.view_as(parameter).clone()

    @torch.no_grad()
    def make_alike(self, parameters: Sequence[nn.Parameter]) -> None:
        """Give all processes the first one's weights."""
        if self.size == 1:
            return
        for parameter in parameters:
            sent = parameter.detach().to(self.device)
            distributed.broadcast(sent, src=0)
            parameter.data.copy_(sent)  # no change that autograd would count: they were meant to be alike

    def _gathered(self, work: Callable[[], T]) -> list[T]:
        result, error = None, None
        try:
            result = work()
        except Exception as failure:  # whatever it is, the others must not wait for ever
            error = failure
        told: list[Any] = [None] * self.size
        distributed.all_gather_object(told, (result, _described(error)))
        if error is not None:
            raise error
        for rank, (_, message) in enumerate(told):
            if isinstance(message, UserError):
                raise message
            if message is not None:
                raise AnotherFailed(f"process {rank} failed: {message}")
        return [found for found, _ in told]

    @contextmanager
    def _apart(self) -> Iterator[None]:
        if self._agreeing:
            raise ValueError("work that one process does for all must not wait for the others")
        self._agreeing = True
        try:
            yield
        finally:
            self._agreeing = False


def _nothing() -> None:
    return None


def _described(error: Exception | None) -> UserError | str | None:
    """What the other processes are told; an exception of a library may not even be sendable."""
    if error is None:
        return None
    return UserError(str(error)) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of one type, as many as `BUCKET` allows, and at least one."""
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        numbers = sum(p.numel() for p in bucket) + parameter.numel()
        if bucket and (numbers > BUCKET or bucket[0].dtype != parameter.dtype):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket
