"""Forward and backward passes that are only pretended: every shape is right, and no number is computed.

The weights become PyTorch's fake tensors, which have shapes, types and a device but no memory. The passes
are the real code of the model, so what they would keep alive, and for how long, comes out as it would.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")


class LiveBytes(TorchDispatchMode):
    """Counts the memory of tensors that are made while it is on, as they come and go.

    It sees what PyTorch's operations return, and not what a kernel needs inside.

    Attributes:
        now: bytes alive.
        peak: most bytes that were alive at a time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._alive: dict[int, int] = {}
        self._before: list[Any] = []  # storages that are there already; kept, so that their names stay theirs

    def ignore(self, tensors: Iterator[Tensor]) -> None:
        """Leave out tensors that exist already; an operation may return a view of one."""
        for storage in (tensor.untyped_storage() for tensor in tensors):
            self._before.append(storage)
            self._alive[storage._cdata] = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return found

    def _count(self, storage: Any) -> None:
        name = storage._cdata
        if name not in self._alive:
            self._alive[name] = size = storage.nbytes()
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, name)

    def _gone(self, name: int) -> None:
        self.now -= self._alive.pop(name, 0)


class Pretence:
    """A module without weights that can be run for its memory.

    Args:
        module: on the device "meta"; its weights are replaced.
        autocast: type of mixed precision; None for none.
    """

    def __init__(self, module: nn.Module, autocast: torch.dtype | None = None) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._module, self._autocast = module, autocast
        self._replace_weights()

    @contextmanager
    def counting(self) -> Iterator[LiveBytes]:
        """Count what is made inside, where all tensors are fake."""
        counted = LiveBytes()
        with ExitStack() as stack:
            stack.enter_context(self._mode)
            if self._autocast is not None:
                stack.enter_context(torch.autocast("cpu", dtype=self._autocast))
            counted.ignore(
                tensor for kept in (self._module.parameters, self._module.buffers) for tensor in kept()
            )
            stack.enter_context(counted)
            yield counted

    def _replace_weights(self) -> None:
        # By identity, since tied weights must stay one; the first is kept, so that no other gets its id.
        made: dict[int, tuple[Tensor, Tensor]] = {}
        for module in self._module.modules():
            for kept in (module._parameters, module._buffers):
                self._replace(kept, made)

    def _replace(self, kept: dict[str, Any], made: dict[int, tuple[Tensor, Tensor]]) -> None:
        for name, tensor in kept.items():
            if tensor is not None:
                kept[name] = made.setdefault(id(tensor), (tensor, self._fake(tensor)))[1]

    def _fake(self, tensor: Tensor) -> Tensor:
        fake: Tensor = FakeTensor(self._mode, tensor.detach(), CPU)
        is_weight = isinstance(tensor, nn.Parameter)
        return nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_weight else fake
