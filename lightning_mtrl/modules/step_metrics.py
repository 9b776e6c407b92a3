"""The numbers of an optimizer step that is done in parts, as if it had been done in one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

import torch
from torch import Tensor

Combine = Literal["mean", "max"]


class StepMetrics:
    """Puts the numbers of a step's parts together.

    Attributes:
        values: the numbers of the parts so far, by name.
    """

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._combine: dict[str, Combine] = {}

    @classmethod
    def joined(cls, shares: Sequence[Self]) -> Self:
        """The numbers of a whole step from those of the processes that did a share of it each."""
        if len(shares) == 1:
            return shares[0]
        whole = cls()
        for share in shares:
            for name, value in share.values.items():
                whole.add(name, value, share._weights[name], share._combine[name])
        return whole

    def cpu(self) -> Self:
        """The same on the CPU, from where they can be sent."""
        self.values = {name: value.cpu() for name, value in self.values.items()}
        self._weights = {name: weight.cpu() for name, weight in self._weights.items()}
        return self

    def add(self, name: str, value: Tensor | float, weight: Tensor | float, combine: Combine) -> None:
        """Count a part's number.

        Args:
            name: of the number.
            value: of the part.
            weight: of the part in a mean; two parts without a weight have the mean of the first.
            combine: "mean" of the parts by their weights, or their "max".
        """
        value, weight = torch.as_tensor(value).detach(), torch.as_tensor(weight).detach().float()
        if name not in self.values:
            self.values[name], self._weights[name], self._combine[name] = value, weight, combine
        elif combine == "max":
            self.values[name] = torch.maximum(self.values[name], value)
        else:
            # In steps from the mean so far, so that a single part keeps its number to the bit.
            self._weights[name] = self._weights[name] + weight
            share = weight / self._weights[name].clamp(min=torch.finfo(torch.float32).tiny)
            self.values[name] = self.values[name] + share * (value - self.values[name])
