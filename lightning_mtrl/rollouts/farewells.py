"""Letting environments clean up behind conversations that are over, however they ended."""

from __future__ import annotations

import logging
import time
from collections import Counter
from functools import partial

from lightning_mtrl.counting import counted
from lightning_mtrl.environments.protocol import Environment, close
from lightning_mtrl.rollouts.environment_calls import Failure, PendingCalls

_logger = logging.getLogger(__name__)

LATE = "not done in time"


class Farewells:
    """Closes environments, plain ones at once and coroutines while others go on.

    What fails there, or takes too long, costs no conversation: it is counted, and logged once at the end.

    Args:
        patience_seconds: how long those that are not done at the end are waited for, all together.

    Attributes:
        failed: how many environments could not be closed, by cause.
    """

    def __init__(self, patience_seconds: float = 10.0) -> None:
        self._patience_seconds = patience_seconds
        self._calls: PendingCalls[None] = PendingCalls()
        self._waiting = 0
        self.failed: Counter[str] = Counter()

    def say(self, environment: Environment) -> None:
        """Close the environment of a conversation that is over."""
        self._calls.start(None, partial(close, environment), object)
        self._waiting += 1
        self._take()

    def finish(self) -> None:
        """Wait for those that are not done, and tell what went wrong."""
        until = time.monotonic() + self._patience_seconds
        while self._waiting and (left := until - time.monotonic()) > 0:
            self._calls.wait(left)
            self._take()
        self._calls.cancel()
        self.failed += Counter({LATE: self._waiting})
        self._waiting = 0
        if self.failed:
            causes = "; ".join(
                f"{cause} ({counted(number, 'time')})" for cause, number in self.failed.items()
            )
            _logger.warning("Environments did not clean up behind conversations: %s", causes)

    def _take(self) -> None:
        for _, answer in self._calls.take():
            self._waiting -= 1
            if isinstance(answer, Failure):
                self.failed[answer.cause] += 1
