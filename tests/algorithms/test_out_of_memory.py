"""Memory that runs out in a micro-batch: it is halved, said, remembered, and the step is the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import improvement_batch, move, own_weights, small_backbone, small_context, some_talks
from torch import Tensor

from lightning_mtrl.algorithms.memory_limit import is_out_of_memory
from lightning_mtrl.algorithms.stepping import Stepper
from lightning_mtrl.errors import UserError
from lightning_mtrl.modules.implicit_prm import ImplicitPRM
from lightning_mtrl.modules.policy import KLTerm, Policy

BATCH = improvement_batch(some_talks(8))
CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
CPU = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 2147483648 bytes. Error code 12 (Cannot allocate memory)"
)


class Taken:
    """Steps of a policy with an adapter; what they did, and the sizes of the passes that were begun."""

    def __init__(self, size: int | None, fault: Callable[[Policy, Any], None], steps: int = 1) -> None:
        self.said: list[str] = []
        self.logged: list[tuple[str, float]] = []
        self.passes: list[int] = []
        module = self.module = Policy(small_backbone(["policy"]), kl=KLTerm(0.1), entropy_coef=0.01)
        move(module.own_parameters(), seed=9)
        self.before = own_weights(module)
        stepper = Stepper(small_context(module.backbone, say=self.said.append), module, 1.0, size)
        module.log = lambda name, value, **_: self.logged.append((name, float(value)))  # type: ignore[method-assign]
        training_step = module.training_step

        def watched(batch: Any, batch_idx: int = 0) -> Tensor:
            self.passes.append(len(batch))
            fault(module, batch)
            return training_step(batch, batch_idx)

        module.training_step = watched  # type: ignore[method-assign]
        self.losses = [stepper.step(BATCH) for _ in range(steps)]
        self.weights = own_weights(module)

    def is_like(self, other: Taken) -> bool:
        assert all(math.isfinite(loss) for loss in self.losses)
        assert dict(self.logged) == pytest.approx(dict(other.logged), rel=1e-5, abs=1e-5)
        assert len(self.logged) == len(other.logged) > 5
        assert self.losses == pytest.approx(other.losses, rel=1e-5)
        moved = [not torch.equal(a, b) for a, b in zip(self.weights, self.before, strict=True)]
        assert all(moved)
        return all(torch.allclose(a, b, atol=1e-7) for a, b in zip(self.weights, other.weights, strict=True))


def nothing(module: Policy, batch: Any) -> None:
    pass


def too_many(rows: int, error: Exception) -> Callable[[Policy, Any], None]:
    """Forward passes over more rows run out of memory."""

    def fault(module: Policy, batch: Any) -> None:
        if len(batch) > rows:
            raise error

    return fault


def in_the_backward_pass(number: int, error: Exception) -> Callable[[Policy, Any], None]:
    """The backward pass of pass `number` fails when some gradients have been added, and others have not."""
    begun: list[int] = []

    def fault(module: Policy, batch: Any) -> None:
        begun.append(len(batch))
        if len(begun) != number:
            return
        # Gradients come from the last layer to the first, so some are there when the first one's is due.
        first = module.own_parameters()[0]

        def out_of_memory(gradient: Tensor) -> Tensor:
            handle.remove()
            assert any(p.grad is not None for p in module.own_parameters())
            raise error

        handle = first.register_hook(out_of_memory)

    return fault


@pytest.mark.parametrize("error", [CUDA, CPU], ids=["accelerator", "cpu"])
@pytest.mark.parametrize(("size", "passes"), [(None, [8, 4, 2, 2, 2, 2]), (3, [3, 1, 1, 1, 1, 1, 1, 1, 1])])
def test_what_does_not_fit_is_halved_and_the_step_is_the_same(
    error: Exception, size: int | None, passes: list[int]
) -> None:
    taken = Taken(size, too_many(2, error))
    assert taken.passes == passes
    assert taken.is_like(Taken(None, nothing))


@pytest.mark.parametrize("error", [CUDA, CPU], ids=["accelerator", "cpu"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_gradients_of_a_failed_backward_pass_are_not_counted_twice(number: int, error: Exception) -> None:
    taken = Taken(4, in_the_backward_pass(number, error), steps=2)
    # The step begins anew, wherever it failed.
    first = {1: [4, 2, 2, 2, 2], 2: [4, 4, 2, 2, 2, 2], 3: [4, 4]}[number]
    assert taken.passes[: len(first)] == first
    assert taken.is_like(Taken(None, nothing, steps=2))


def test_the_halved_size_is_told_once_and_remembered() -> None:
    taken = Taken(None, too_many(2, CUDA), steps=3)
    assert taken.passes == [8, 4, *[2] * 12]
    assert taken.said == [
        "Out of memory in a training pass of 'policy' over 8 rows; from now on a pass has at most 4, which "
        "changes no result.",
        "Out of memory in a training pass of 'policy' over 4 rows; from now on a pass has at most 2, which "
        "changes no result.",
    ]


def test_a_row_that_does_not_fit_is_a_readable_mistake() -> None:
    with pytest.raises(
        UserError, match=r"pass of 'policy' over one row does not fit .*gradient_checkpointing"
    ):
        Taken(None, too_many(0, CPU))


def test_rows_that_are_compared_with_each_other_are_not_parted(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = small_backbone(["policy"])
    module = ImplicitPRM(backbone, loss="pairwise")
    stepper = Stepper(small_context(backbone), module, 1.0, None)
    monkeypatch.setattr(module, "training_step", lambda *_: (_ for _ in ()).throw(CUDA))
    with pytest.raises(UserError, match="over 8 rows that belong together does not fit"):
        stepper.step_whole(BATCH)


def test_other_errors_are_no_matter_of_memory() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Taken(None, too_many(2, RuntimeError("mat1 and mat2 shapes cannot be multiplied")))


def test_the_error_of_the_real_allocator_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**14)  # 400 TB, more than there are addresses
    assert is_out_of_memory(caught.value)
