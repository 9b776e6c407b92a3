"""Whether a server answers, found out before anything depends on it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_mtrl.errors import UserError
from lightning_mtrl.llm.connection import Connection
from lightning_mtrl.llm.failures import LLMFailure
from lightning_mtrl.llm.server import Server

# A list of models takes milliseconds. Servers that work on long prompts in the process that answers, or look
# through their disk for models, take some seconds; what is silent for longer is mostly stuck, or no server.
REACH_SECONDS = 20.0
_ANYTHING = object()  # an answer that says no more than that a server is there


async def reach(server: Server, place: str, check: Callable[[object], None] | None = None) -> None:
    """Ask a server for its models, which no provider takes money for, in a short time of its own.

    Where nobody takes the connection, it is tried again as for any request. Whoever takes it has
    `REACH_SECONDS` to answer, or half of `timeout_seconds` where that is less, and is not asked again.

    Args:
        server: where and how.
        place: key of the server in the configuration, to be told.
        check: looks at the list, and raises what is wrong with it (`Attempt`, `UserError`). None lets any
            answer do, since a server need not have a list, and a key that may chat (HTTP 403) need not see
            it. "Too many requests" (HTTP 429) always does.

    Raises:
        LLMFailure: if there is no connection, or (with `check`) no list.
        UserError: if the server takes the connection and is silent, or refuses the key.
    """
    seconds = min(REACH_SECONDS, server.timeout_seconds / 2)
    asked = partial(_answer, server=server, place=place, seconds=seconds, lists=check is not None)
    await Connection(server).ask(asked, lambda answer: _looked_at(answer, check))


def _looked_at(answer: object, check: Callable[[object], None] | None) -> None:
    if check is not None and answer is not _ANYTHING:
        check(answer)


async def _answer(library: Any, *, server: Server, place: str, seconds: float, lists: bool) -> object:
    """The list of models; `_ANYTHING` for an answer that will do without one."""
    import openai

    connecting = seconds / 2  # so that who is out of time has a connection
    try:
        async with asyncio.timeout(seconds):
            limits = openai.Timeout(None, connect=connecting)
            return await library.get("/models", cast_to=object, options={"timeout": limits})
    except TimeoutError:
        raise UserError(_silent(server, place, seconds)) from None
    except openai.APITimeoutError:
        raise LLMFailure(f"no connection in {connecting:g} seconds") from None
    except openai.AuthenticationError:
        raise UserError(_refused(server, place)) from None
    except openai.RateLimitError:
        return _ANYTHING
    except (openai.OpenAIError, ValueError) as error:
        if lists or isinstance(error, openai.APIConnectionError):
            raise
        return _ANYTHING


def _silent(server: Server, place: str, seconds: float) -> str:
    return (
        f"{place}.base_url is {server.base_url!r}, but the server there accepted the connection and did not "
        f"answer in {seconds:g} seconds when it was asked for its models. Wait if it is still starting or "
        f"very busy; else start it anew, or mend the address."
    )


def _refused(server: Server, place: str) -> str:
    variable = server.api_key_variable
    state = "which is set" if os.environ.get(variable) else "which is not set"
    return (
        f"{place}.base_url is {server.base_url!r}, but the server there refused the key when it was asked "
        f"for its models (HTTP 401). The key is read from the environment variable {variable} "
        f"({place}.api_key_variable), {state}. Put the server's key there."
    )
