"""Fully sharded weights: each process keeps a part of a model's numbers, and all of them while it is in use.

A whole model is one unit of sharding, because that is what its users need: sampling and scoring go over it
for a long time, its output head is read apart from its layers, and processes make unequal numbers of training
passes. So weights, gradients and optimizer state take 1/N of their memory on each of N processes, and one
model at a time takes all of its own (and while it is trained, its gradients).

Source: ZeRO, stage 3 (arXiv:1910.02054); FSDP (arXiv:2304.11277).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from lightning_mtrl.processes import Processes


@dataclass(frozen=True)
class _Part:
    """This process's numbers of a tensor that is cut into equal parts, with zeros behind its end.

    Attributes:
        shape: of the whole tensor.
        weights: [P], what the optimizer steps.
    """

    shape: torch.Size
    weights: nn.Parameter


class Sharding:
    """The models whose weights are shared out; none in a process that is alone.

    A parameter is empty while nobody uses its model. It stays the same object, so that whoever holds it need
    not know; only the optimizer gets the parts in its place.

    Args:
        processes: those that share the weights; without them nothing is ever shared out.
    """

    def __init__(self, processes: Processes | None = None) -> None:
        self.processes = processes or Processes()
        self._parts: dict[nn.Parameter, _Part] = {}
        self._in_use: set[nn.Parameter] = set()

    @torch.no_grad()
    def put(self, model: nn.Module) -> None:
        """Share a model's weights out, as the first process has them; all processes together."""
        if self.processes.size == 1:
            return
        for parameter in model.parameters():
            self.processes.make_alike([parameter])
            weights = nn.Parameter(self._own(parameter).clone(), parameter.requires_grad)
            self._parts[parameter] = _Part(parameter.shape, weights)
            parameter.data = parameter.new_empty(0)

    @contextmanager
    def whole(self, model: nn.Module) -> Iterator[None]:
        """All weights of a model, for as long as it is used; all processes together."""
        missing = [p for p in model.parameters() if p in self._parts and p not in self._in_use]
        for parameter in missing:
            part = self._parts[parameter]
            parameter.data = self._joined(part.weights, part.shape)
        self._in_use.update(missing)
        try:
            yield
        finally:
            self._in_use.difference_update(missing)
            for parameter in missing:
                parameter.data = parameter.new_empty(0)

    def is_ready(self, model: nn.Module) -> bool:
        """Whether a model's weights are here."""
        return all(p in self._in_use for p in model.parameters() if p in self._parts)

    @torch.no_grad()
    def keep(self, model: nn.Module) -> None:
        """Take over what was written into the weights of a model that is whole."""
        for parameter in model.parameters():
            if parameter in self._parts:
                self._parts[parameter].weights.copy_(self._own(parameter))

    def unshared(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Those that every process has, such as heads."""
        return [p for p in parameters if p not in self._parts]

    def changes(self, model: nn.Module) -> int:
        """How often weights were written to, as autograd counts it."""
        kept = (self._parts[p].weights if p in self._parts else p for p in model.parameters())
        return sum(weights._version for weights in kept)

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Put this process's part of the sum over the processes into the gradients of what is shared out.

        A parameter without a gradient on any process still has none.
        """
        shared = [p for p in parameters if p in self._parts]
        if not shared:
            return
        present = self.processes.sum(torch.tensor([p.grad is not None for p in shared], dtype=torch.int32))
        for parameter, number in zip(shared, present.tolist(), strict=True):
            if number:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = None
                self._parts[parameter].weights.grad = self.processes.own_sum(self._padded(gradient))

    def clip_gradients(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Scale gradients down to a norm, as of all weights together; returns the norm that they had."""
        shared = [self._parts[p].weights for p in parameters if p in self._parts]
        if not shared:
            return nn.utils.clip_grad_norm_(parameters, max_norm)
        whole = self.unshared(parameters)
        squares = self.processes.sum(_norm(shared).square())
        norm = (squares + _norm(whole).square().to(squares)).sqrt()
        nn.utils.clip_grads_with_norm_([*whole, *shared], max_norm, norm)
        return norm

    def over_parts(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let an optimizer step this process's parts; its `state_dict` has whole tensors all the same.

        All processes ask for the state together, and only the first one gets it whole.

        Args:
            optimizer: fresh, and one that treats every number apart, as AdamW does.
        """
        for group in optimizer.param_groups:
            group["params"] = [self._parts[p].weights if p in self._parts else p for p in group["params"]]
        if self._parts:
            optimizer.register_state_dict_post_hook(self._whole_state)
            optimizer.register_load_state_dict_pre_hook(self._own_state)
        return optimizer

    def _whole_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        def whole(part: _Part, value: Tensor) -> Tensor:
            if value.shape != part.weights.shape:
                return value
            joined = self._joined(value, part.shape)
            return joined.cpu() if self.processes.is_first else value

        return self._mapped(optimizer, state, whole)

    def _own_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        def own(part: _Part, value: Tensor) -> Tensor:
            return self._own(value).clone() if value.shape == part.shape else value

        return self._mapped(optimizer, state, own)

    def _mapped(
        self,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        change: Callable[[_Part, Tensor], Tensor],
    ) -> dict[str, Any]:
        """The state of an optimizer, with the tensors changed that belong to what is shared out."""
        part_of = {part.weights: part for part in self._parts.values()}
        order = [weights for group in optimizer.param_groups for weights in group["params"]]
        found: dict[int, dict[str, Any]] = {}
        for number, values in state["state"].items():
            part = part_of.get(order[number])
            found[number] = {
                # The number of steps is a tensor too, and nothing of the parameter's.
                name: change(part, value) if part and name != "step" and torch.is_tensor(value) else value
                for name, value in values.items()
            }
        return {**state, "state": found}

    def _padded(self, whole: Tensor) -> Float[Tensor, " N"]:
        flat = whole.detach().flatten()
        return functional.pad(flat, (0, -len(flat) % self.processes.size))

    def _own(self, whole: Tensor) -> Float[Tensor, " P"]:
        return self._padded(whole).chunk(self.processes.size)[self.processes.rank]

    def _joined(self, part: Float[Tensor, " P"], shape: torch.Size) -> Tensor:
        return self.processes.joined(part.detach())[: shape.numel()].view(shape)


def _norm(weights: Sequence[nn.Parameter]) -> Tensor:
    return nn.utils.get_total_norm([w.grad for w in weights if w.grad is not None]).float()
