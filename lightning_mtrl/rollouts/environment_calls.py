"""Calling many environments at once, plain ones and coroutines, without one failure hurting another."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar, cast

from lightning_mtrl.rollouts.heard import plain

Answer = TypeVar("Answer")
Key = TypeVar("Key")


@dataclass(frozen=True)
class Failure(Generic[Answer]):
    """An environment that raised instead of answering."""

    error: BaseException

    @property
    def cause(self) -> str:
        """Kind and first line of the error, by which failures are counted."""
        lines = str(self.error).splitlines()
        name = type(self.error).__name__
        return f"{name}: {lines[0][:120]}" if lines and lines[0] else name


def ask(calls: Sequence[Callable[[], Any]], expected: type[Answer]) -> list[Answer | Failure[Answer]]:
    """Make all calls, and await together those that return coroutines.

    All coroutines of a process run in one event loop in a thread of its own: clients that keep
    connections go on from turn to turn, and a notebook, which runs a loop already, can collect too.

    Args:
        calls: `reset` or `step` of one environment each, with the arguments bound.
        expected: class of a right answer.

    Returns:
        In order, the answers as plain data (`lightning_mtrl.rollouts.heard`), or a `Failure` where a call
        raised or returned something else.
    """
    answers = [_call(call) for call in calls]
    waiting = [index for index, answer in enumerate(answers) if inspect.isawaitable(answer)]
    if waiting:
        for index, answer in zip(waiting, _await_all([answers[i] for i in waiting]), strict=True):
            answers[index] = answer
    return [_checked(answer, expected) for answer in answers]


class PendingCalls(Generic[Key]):
    """Calls whose answers are taken when they are there: coroutines run while others go on.

    A plain call is made, and answered, at once.
    """

    def __init__(self) -> None:
        self._ready: list[tuple[Key, Any]] = []
        self._waiting: dict[Future[Any], tuple[Key, type[Any]]] = {}

    def start(self, key: Key, call: Callable[[], Any], expected: type[Answer]) -> None:
        """Make a call.

        Args:
            key: what its answer is known by.
            call: `reset` or `step` of one environment, with the arguments bound.
            expected: class of a right answer.
        """
        answer = _call(call)
        if inspect.isawaitable(answer):
            future = asyncio.run_coroutine_threadsafe(_settled(answer), _event_loop())
            self._waiting[future] = (key, expected)
        else:
            self._ready.append((key, _checked(answer, expected)))

    def ready(self) -> int:
        """How many answers are there."""
        return len(self._ready) + sum(future.done() for future in self._waiting)

    def take(self, wait: bool = False) -> list[tuple[Key, Any]]:
        """The answers that are there, each with its key: right ones, and a `Failure` for others.

        Args:
            wait: for one at least, if any call was made.
        """
        if wait and not self._ready and self._waiting:
            futures.wait(self._waiting, return_when=futures.FIRST_COMPLETED)
        found, self._ready = self._ready, []
        for future in [each for each in self._waiting if each.done()]:
            key, expected = self._waiting.pop(future)
            found.append((key, _checked(_call(future.result), expected)))
        return found

    def wait(self, seconds: float) -> None:
        """Wait for an answer, so long at most; not at all where one is there, or no call was made."""
        if not self._ready and self._waiting:
            futures.wait(self._waiting, seconds, return_when=futures.FIRST_COMPLETED)

    def cancel(self) -> None:
        """Give up what has not been answered."""
        for future in self._waiting:
            future.cancel()
        self._waiting.clear()


def _call(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Whatever a simulator raises, also to end a process or a task, costs one conversation; it is counted
        # and shown.
        return error


def _checked(answer: Any, expected: type[Answer]) -> Answer | Failure[Answer]:
    if isinstance(answer, KeyboardInterrupt):
        raise answer
    if isinstance(answer, BaseException):
        return Failure(answer)
    if not isinstance(answer, expected):
        return Failure(
            TypeError(f"the environment returned {type(answer).__name__}, not {expected.__name__}")
        )
    kept = _call(lambda: plain(answer))
    return Failure(kept) if isinstance(kept, BaseException) else kept


async def _settled(waiting: Awaitable[Any]) -> Any:
    """The answer or the error, of any kind: one that left a task could end the thread of all environments.

    Calls that were given up end here too; nobody waits for their answers.
    """
    try:
        return await waiting
    except BaseException as error:
        return error


def _await_all(waiting: Sequence[Awaitable[Any]]) -> list[Any]:
    future = asyncio.run_coroutine_threadsafe(_gathered(waiting), _event_loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _gathered(waiting: Sequence[Awaitable[Any]]) -> Coroutine[Any, Any, list[Any]]:
    async def gather() -> list[Any]:
        settled = asyncio.gather(*map(_settled, waiting), return_exceptions=True)
        return cast("list[Any]", await settled)

    return gather()


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="environments", daemon=True).start()
    return loop
