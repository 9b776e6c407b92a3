"""Weights that were stored, put back into a model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_mtrl.errors import UserError


@torch.no_grad()
def copy_stored(role: str, state: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Write stored weights into those of a role, name by name.

    Raises:
        UserError: if names or shapes do not fit, as for an adapter of another base.
    """
    faults = {
        "are missing": sorted(set(target) - set(state)),
        "are not expected": sorted(set(state) - set(target)),
        "have another shape": sorted(n for n in {*target} & {*state} if target[n].shape != state[n].shape),
    }
    found = [f"{len(names)} {fault} (the first is {names[0]!r})" for fault, names in faults.items() if names]
    if found:
        raise UserError(
            f"the stored weights of {role!r} do not fit this model: of their tensors {', '.join(found)}. "
            f"They were made for another base model, another model.lora_rank or another head."
        )
    for name, parameter in target.items():
        parameter.copy_(state[name])
