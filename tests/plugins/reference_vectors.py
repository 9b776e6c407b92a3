"""Numbers that published implementations compute in float64, and how ours are compared with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).resolve().parent.parent / "reference_vectors"
TOLERANCE = 1e-6
CASES = ("s1", "s2")


class Reference:
    """One file: `params`, `expected`, and the inputs as tensors."""

    def __init__(self, function: str, case: str) -> None:
        content = json.loads((FOLDER / f"{function}__{case}.json").read_text(encoding="utf-8"))
        self.inputs: dict[str, Any] = content["inputs"]
        self.params: dict[str, Any] = content["params"]
        self.expected: dict[str, Any] = content["expected"]

    def values(self, name: str) -> Tensor:
        return torch.tensor(self.inputs[name], dtype=torch.float64)

    def leaf(self, name: str) -> Tensor:
        return self.values(name).requires_grad_()

    def mask(self, name: str = "response_mask") -> Tensor:
        return torch.tensor(self.inputs[name]) != 0

    def index(self, name: str = "group") -> Tensor:
        return torch.tensor(self.inputs[name])


def assert_equal(got: Tensor | float, expected: Any, mask: Tensor | None = None) -> None:
    """Equal to 1e-6; only inside `mask` when there is one."""
    wanted = torch.as_tensor(expected, dtype=torch.float64)
    ours = torch.as_tensor(got, dtype=torch.float64).detach()
    assert ours.shape == wanted.shape
    if mask is not None:
        assert mask.any()
        ours, wanted = ours[mask], wanted[mask]
    assert ours.isfinite().all()
    assert (ours - wanted).abs().max() <= TOLERANCE


def padded(rows: list[list[float]]) -> tuple[Tensor, Tensor]:
    """Ragged rows as a tensor and the mask of what they hold; the rest is NaN."""
    width = max(len(row) for row in rows)
    full = [row + [float("nan")] * (width - len(row)) for row in rows]
    values = torch.tensor(full, dtype=torch.float64)
    return values, torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]
