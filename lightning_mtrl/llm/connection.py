"""Requests to a server, many at once: its limit, time-outs and retries, whatever is asked."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from lightning_mtrl.counting import counted
from lightning_mtrl.llm.failures import Attempt, LLMFailure, attempt_of
from lightning_mtrl.llm.server import Server
from lightning_mtrl.llm.usage import Usage

Reply = TypeVar("Reply")
Read = TypeVar("Read")
_NO_KEY = "none"  # the library wants one; servers without keys do not look at it


@dataclass
class _Library:
    """What belongs to one event loop."""

    client: Any
    slots: asyncio.Semaphore = field(repr=False)


class Connection:
    """Sends requests to a `Server`, at most `concurrency` at a time, with time-outs and retries.

    Args:
        server: where and how.

    Attributes:
        usage: what was sent so far.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.usage = Usage()
        self._libraries: WeakKeyDictionary[asyncio.AbstractEventLoop, _Library] = WeakKeyDictionary()

    async def ask(
        self,
        call: Callable[[Any], Awaitable[Reply]],
        read: Callable[[Reply], Read],
        model: str | None = None,
    ) -> Read:
        """What there is to read in the reply to a request.

        Args:
            call: makes the request with an `openai.AsyncOpenAI`.
            read: takes what is needed out of the reply; it raises `Attempt` for one that cannot be used.
            model: name to tell when it is refused; by default the server's.

        Raises:
            LLMFailure: if there is no usable reply after all attempts.
            UserError: if key, model or address are wrong.
        """
        server, library = self.server, self._library()
        for number in range(server.retries + 1):
            try:
                async with library.slots:
                    return read(await self._once(library.client, call, model or server.model))
            except Attempt as failed:
                if number == server.retries:
                    raise LLMFailure(f"{failed}, {counted(number + 1, 'attempt')}") from None
                if failed.wait is not None and failed.wait > server.longest_wait_seconds:
                    raise LLMFailure(f"{failed}, and it asks to wait too long") from None
                backoff = min(server.backoff_seconds * 2**number, server.longest_wait_seconds)
                self.usage.retries += 1
                await asyncio.sleep(max(backoff, failed.wait or 0.0))
        raise AssertionError("the last attempt returns or raises")

    async def _once(self, client: Any, call: Callable[[Any], Awaitable[Reply]], model: str) -> Reply:
        """One attempt.

        Raises:
            Attempt: if another one may succeed.
        """
        import openai

        server = self.server
        self.usage.requests += 1
        try:
            async with asyncio.timeout(server.timeout_seconds):
                return await call(client)
        except TimeoutError:
            raise Attempt("no reply in time") from None
        except (openai.OpenAIError, ValueError) as error:
            raise attempt_of(error, model, server.base_url, server.api_key_variable) from None

    def _library(self) -> _Library:
        """Connections and limits of this event loop; the library's own retries are off, ours count them."""
        loop = asyncio.get_running_loop()
        if loop not in self._libraries:
            from openai import AsyncOpenAI

            client = AsyncOpenAI(
                api_key=os.environ.get(self.server.api_key_variable) or _NO_KEY,
                base_url=self.server.base_url,
                timeout=self.server.timeout_seconds,
                max_retries=0,
            )
            self._libraries[loop] = _Library(client, asyncio.Semaphore(self.server.concurrency))
        return self._libraries[loop]
