"""Bytes of weights, and of what optimizers keep of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lightning_mtrl.modules.base import RoleModule


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors that share none, whether they have memory or not."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def head_bytes(module: RoleModule) -> int:
    """Bytes of a module's heads."""
    return bytes_of(p for name, p in module.named_parameters() if not name.startswith("backbone."))


def optimizer_bytes(optimizer: Any) -> int:
    """Bytes of the state that an optimizer keeps after its first step, found by taking one without numbers.

    Args:
        optimizer: of weights on the device "meta"; may be wrapped by Fabric.
    """
    plain: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    groups: list[dict[str, Any]] = []
    for group in plain.param_groups:
        weights = [nn.Parameter(weight.detach()) for weight in group["params"]]
        for weight in weights:
            weight.grad = torch.empty_like(weight)
        groups.append({**group, "params": weights})
    kind: Any = type(plain)
    twin = kind(groups)
    twin.step()
    kept = [value for state in twin.state.values() for value in state.values()]
    return bytes_of(value for value in kept if isinstance(value, torch.Tensor))
