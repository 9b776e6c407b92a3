"""What was asked and answered, in a file that also answers the same request again."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary


class RequestRecord:
    """One JSON object a line: the key of the request, the request, and the reply.

    Several processes may append to one file; a line that was cut off by a kill is passed over. Of several
    replies to equal requests, as of processes that ran at once, the first one holds.

    Args:
        path: of the file; None keeps nothing.
    """

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self._lock = threading.Lock()
        self._turns: WeakValueDictionary[tuple[asyncio.AbstractEventLoop, str], asyncio.Lock]
        self._turns = WeakValueDictionary()
        self._known = {} if self._path is None or not self._path.is_file() else _replies_in(self._path)

    def find(self, request: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The reply to an equal request, or None."""
        return self._known.get(key_of(request))

    @asynccontextmanager
    async def alone(self, request: Mapping[str, Any]) -> AsyncIterator[None]:
        """Let equal requests of this event loop wait until the block ends; without a file, none waits."""
        if self._path is None:
            yield
            return
        turn = self._turns.setdefault((asyncio.get_running_loop(), key_of(request)), asyncio.Lock())
        async with turn:
            yield

    def add(self, request: Mapping[str, Any], reply: Mapping[str, Any]) -> Mapping[str, Any]:
        """Keep a reply, unless there is one already; returns the one that is kept."""
        if self._path is None:
            return reply
        key = key_of(request)
        line = json.dumps({"key": key, "request": request, "reply": reply}, ensure_ascii=False) + "\n"
        with self._lock:
            if key in self._known:
                return self._known[key]
            self._known[key] = reply
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Opened for appending and written at once, so that lines of several processes do not mix.
            with self._path.open("ab", buffering=0) as file:
                file.write(line.encode("utf-8", errors="backslashreplace"))
        return reply


def _replies_in(path: Path) -> dict[str, Mapping[str, Any]]:
    known: dict[str, Mapping[str, Any]] = {}
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                known.setdefault(entry["key"], {**entry["reply"], "content": entry["reply"]["content"]})
    return known


def key_of(request: Mapping[str, Any]) -> str:
    """Equal for equal requests, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
