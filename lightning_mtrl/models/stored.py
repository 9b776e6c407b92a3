"""Weights that were stored: whether their files are whole, and how they are put back into a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_mtrl.errors import UserError


def expect_whole(folder: Path) -> None:
    """Refuse a model or an adapter whose file of weights was cut off or is none; headers are read alone.

    Raises:
        UserError: if it has such a file; it names the file.
    """
    for file in sorted(folder.glob("*model*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError, ValueError) as error:
            raise UserError(
                f"{file} is broken ({error}), but a whole safetensors file was expected. Download, copy or "
                f"save it again."
            ) from error


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
