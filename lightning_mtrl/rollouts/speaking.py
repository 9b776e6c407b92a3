"""What collecting needs of whatever lets the policy respond, here or on a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from lightning_mtrl.rollouts.decoding import Draw, SampledResponse
from lightning_mtrl.rollouts.environment_calls import Failure


class Engine(Protocol):
    """Holds conversations in rows and lets the policy respond in any of them.

    `lightning_mtrl.rollouts.engine.ConversationEngine` samples here, and
    `lightning_mtrl.rollouts.served.ServedEngine` asks a server.
    """

    @property
    def responding(self) -> set[int]:
        """Rows in which a response was begun and is not finished."""

    def length(self, row: int) -> int:
        """Tokens that the row's conversation holds."""

    def release(self, row: int) -> None:
        """End the row's conversation; the next one in this row starts empty."""

    def begin(self, row: int, new_ids: Sequence[int], draw: Draw) -> None:
        """Append ids to a conversation and let a response follow; `advance` brings it."""

    def advance(
        self, others: Callable[[], int] = ...
    ) -> Mapping[int, SampledResponse | Failure[SampledResponse]]:
        """Go on until some responses are finished, or so many `others` could be begun that it stops.

        Returns:
            By row, what was said; perhaps nothing. A `Failure` ends a conversation and no other one.
        """

    def cancel(self) -> None:
        """Give up the responses that are not finished."""


EngineMaker = Callable[[int], Engine]  # for a number of rows
