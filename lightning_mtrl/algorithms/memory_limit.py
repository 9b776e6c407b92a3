"""How many rows fit into one pass, found out when too many do not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from lightning_mtrl.errors import UserError


class MemoryLimit:
    """The most rows that a training pass of a module may have, as far as it is known.

    It is halved each time that memory runs out, and stays so: what did not fit once will not fit again.

    Args:
        role: of the module, for messages.
    """

    def __init__(self, role: str) -> None:
        self.role = role
        self.rows: int | None = None
        self._latest = 0

    def kept(self, parts: Iterable[Any]) -> Iterator[Any]:
        """The parts of a step, those of too many rows cut in several; weights keep their values."""
        for part in parts:
            size = min(len(part), self.rows or len(part))
            for start in range(0, len(part), size):
                piece = part if size == len(part) else part.rows(slice(start, start + size))
                self._latest = len(piece)
                yield piece

    def lower(self, smallest: int, error: Exception) -> str:
        """Halve the rows of a pass, after the latest one ran out of memory; returns what to tell.

        Raises:
            UserError: if fewer than `smallest` rows would be left.
        """
        tried, half = self._latest, self._latest // 2
        if half < smallest:
            rows = "one row" if tried == 1 else f"{tried} rows that belong together"
            raise UserError(
                f"a training pass of {self.role!r} over {rows} does not fit into memory. Pass "
                f"--model.gradient_checkpointing true, or lower model.context_length, data.max_turns or "
                f"data.max_response_tokens."
            ) from error
        self.rows = half
        return (
            f"Out of memory in a training pass of {self.role!r} over {tried} rows; from now on a pass has at "
            f"most {half}, which changes no result."
        )

    @staticmethod
    def release() -> None:
        """Give cached memory of the failed pass back, so that pieces of other sizes find room."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an accelerator or the CPU had no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
