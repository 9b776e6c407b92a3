"""A device without float64, as Apple's, gets no float64 tensor.

No such device is at hand. What is on the CPU for good may have float64; the rest must do without.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from one_iteration import ITPO, PPO, one_iteration
from small_models import small_llama
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_mtrl.algorithms.critic_inputs import CriticInputs
from lightning_mtrl.algorithms.diagnostics import _features
from lightning_mtrl.objectives import discounted_turn_weights
from lightning_mtrl.rollouts.engine import ConversationEngine, Draw
from lightning_mtrl.rollouts.sampling import SamplingConfig

# Their tensors are made on the CPU, or brought there first, whatever the device.
ON_THE_CPU = ("algorithms/diagnostics.py", "credit/probe.py")


class NoDoubles(TorchDispatchMode):
    """Refuses float64 tensors, but for some devices or callers."""

    def __init__(self, device: str = "", but_in: tuple[str, ...] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._but_in = device, but_in

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, found)):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float64 and not self._allowed(tensor):
                raise TypeError(f"{func} has a float64 tensor, and the device has none")
        return found

    def _allowed(self, tensor: Tensor) -> bool:
        elsewhere = bool(self._device) and tensor.device.type != self._device
        return elsewhere or any(name.endswith(self._but_in) for name in _callers() if self._but_in)


def _callers() -> Iterator[str]:
    frame: Any = sys._getframe(2)
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back


@contextmanager
def _apple() -> Iterator[None]:
    """Tensors of the device "mps" have shapes and types, but no numbers."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with mode, NoDoubles("mps"):
        yield


def test_the_stand_in_refuses_what_the_device_refuses() -> None:
    with _apple():
        assert torch.empty(2, device="mps").cpu().double().dtype == torch.float64
        with pytest.raises(TypeError, match="the device has none"):
            torch.empty(2, device="mps").double()


def test_weights_of_turns_come_back_to_the_device_of_the_turns() -> None:
    with _apple():
        weights = discounted_turn_weights(torch.empty(3, dtype=torch.int64, device="mps"), 4, 0.9)
        assert (weights.device.type, weights.dtype) == ("mps", torch.float32)


def test_the_probe_of_features_computes_on_the_cpu() -> None:
    conversations: Any = [SimpleNamespace(outcome=1.0), SimpleNamespace(outcome=0.0)]
    with _apple():
        read = SimpleNamespace(
            features=torch.empty(2, 3, 5, device="mps"),
            turn_mask=torch.empty(2, 3, device="mps", dtype=torch.bool),
        )
        inputs = cast(CriticInputs, SimpleNamespace(features=lambda _: read))
        x, y = _features(conversations, inputs)
        assert (x.device.type, y.device.type) == ("cpu", "cpu")
        assert (x.dtype, y.dtype) == (torch.float64, torch.float64)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.5])
def test_responses_are_sampled_without_doubles(temperature: float) -> None:
    def respond() -> Any:
        sampling = SamplingConfig(temperature=temperature, max_response_tokens=6)
        engine = ConversationEngine(
            small_llama(), rows=3, context_length=64, end_ids={1}, sampling=sampling, pad_id=0
        )
        numbers = torch.rand(3, 6, generator=torch.Generator().manual_seed(0)).numpy()
        draws = [Draw(row, temperature, 0.0) for row in numbers]
        return engine.respond([0, 1, 2], [[2, 13, 1, 3], [2, 12, 3], [2, 5, 5, 5, 3]], draws)

    wanted = respond()
    with NoDoubles():
        assert respond() == wanted


@pytest.mark.timeout(600)
@pytest.mark.parametrize("algorithm", [PPO, ITPO], ids=["PPO", "ITPO"])
def test_an_iteration_makes_no_doubles_but_on_the_cpu(algorithm: list[str]) -> None:
    with NoDoubles(but_in=ON_THE_CPU):
        one_iteration(algorithm)
