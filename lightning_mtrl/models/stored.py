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
    wrong = sorted(set(target) ^ set(state)) or [n for n in target if target[n].shape != state[n].shape]
    if wrong:
        raise UserError(
            f"the stored weights of {role!r} do not fit this model: {len(wrong)} tensors "
            f"differ, the first is "
            f"{wrong[0]!r}. They were made for another base model or another model.lora_rank."
        )
    for name, parameter in target.items():
        parameter.copy_(state[name])
