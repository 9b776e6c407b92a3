"""An OpenAI-compatible server that does what it is told, and misbehaves when it is told so."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from loopback import QuietHandler, listening


@dataclass(frozen=True)
class Answer:
    """What the server does with one request.

    Attributes:
        text: content of the reply; None leaves the choices empty.
        status: of HTTP.
        headers: more of them.
        body: the whole body, in place of a completion.
        seconds: wait before it.
        cut: whether the connection closes in the middle of the body.
        finish_reason: as OpenAI's; "length" for a reply that max_tokens cut off.
    """

    text: str | None = "ok"
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    body: str | None = None
    seconds: float = 0.0
    cut: bool = False
    finish_reason: str = "stop"


@dataclass
class FakeServer:
    """Attributes tell what came in: bodies, headers, and how many requests were there at once at most."""

    answer: Callable[[dict[str, Any]], Answer]
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    most_at_once: int = 0
    base_url: str = ""
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def handle(self, body: dict[str, Any], key: str | None) -> Answer:
        with self._lock:
            self.bodies.append(body)
            self.keys.append(key)
            self.times.append(time.monotonic())
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
            answer = self.answer(body)
        time.sleep(answer.seconds)
        with self._lock:
            self._now -= 1
        return answer


def in_turn(*answers: Answer) -> Callable[[dict[str, Any]], Answer]:
    """One answer after the other; the last one for ever."""
    left = list(answers)
    return lambda body: left.pop(0) if len(left) > 1 else left[0]


@contextmanager
def serving(answer: Callable[[dict[str, Any]], Answer] | Sequence[Answer]) -> Iterator[FakeServer]:
    """A server on a free port of the loopback."""
    fake = FakeServer(answer if callable(answer) else in_turn(*answer))

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            said = fake.handle(body, self.headers.get("authorization"))
            text = _completion(said) if said.body is None else said.body
            self.send_response(said.status)
            for name, value in said.headers:
                self.send_header(name, value)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode()[: len(text) // 2 if said.cut else None])
            self.close_connection = said.cut

    with listening(Handler) as address:
        fake.base_url = f"{address}/v1"
        yield fake


def _completion(said: Answer) -> str:
    choices = (
        []
        if said.text is None
        else [
            {
                "index": 0,
                "finish_reason": said.finish_reason,
                "message": {"role": "assistant", "content": said.text},
            }
        ]
    )
    return json.dumps(
        {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": "fake",
            "choices": choices,
            "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110},
        }
    )
