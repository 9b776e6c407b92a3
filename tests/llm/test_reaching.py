"""A server is asked for its models before anything depends on it, in a time of its own."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from loopback import answering

from lightning_mtrl.errors import UserError
from lightning_mtrl.llm import reaching
from lightning_mtrl.llm.failures import Attempt, LLMFailure
from lightning_mtrl.llm.reaching import reach
from lightning_mtrl.llm.server import Server

pytest.importorskip("openai")
SECRET = "sk-very-secret-0123456789"


def reached(address: str, **changes: Any) -> list[object]:
    """The lists that were looked at."""
    seen: list[object] = []
    server = Server("m", address, **{"retries": 2, "backoff_seconds": 0.01, **changes})
    asyncio.run(reach(server, "some.server", seen.append))
    return seen


def reached_anyhow(address: str, **changes: Any) -> None:
    asyncio.run(reach(Server("m", address, **{"retries": 0, **changes}), "some.server"))


def test_a_silent_server_is_asked_once_for_a_short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaching, "REACH_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        told = f"some.server.base_url is '{address}', but .* accepted the connection .* answer in 0.3 seconds"
        with pytest.raises(UserError, match=told):
            reached_anyhow(address, retries=4)
        silent.setblocking(False)
        silent.accept()
        with pytest.raises(BlockingIOError):
            silent.accept()
        with pytest.raises(UserError, match=r"did not answer in 0\.1 seconds"):
            reached_anyhow(address, timeout_seconds=0.2)


def test_the_time_is_well_below_that_of_a_request_and_enough_for_a_busy_server() -> None:
    assert 10 <= reaching.REACH_SECONDS <= Server("m").timeout_seconds / 2
    with answering(200, '{"data": []}', seconds=0.5) as address:
        assert reached(address) == [{"data": []}]


def test_who_says_nothing_before_there_is_a_connection_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TLS handshake that never ends, as a packet that a firewall swallows."""
    monkeypatch.setattr(reaching, "REACH_SECONDS", 0.4)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"https://127.0.0.1:{silent.getsockname()[1]}/v1"
        with pytest.raises(LLMFailure, match=r"^no connection in 0.2 seconds$"):
            reached_anyhow(address, retries=4)


@pytest.mark.parametrize("status", [200, 400, 403, 404, 429, 500, 501, 503])
@pytest.mark.parametrize("body", ["{}", "no JSON"])
def test_any_other_answer_will_do_where_no_list_is_needed(status: int, body: str) -> None:
    with answering(status, body, retry_after="3600") as address:
        reached_anyhow(address)


def test_where_a_list_is_needed_it_must_come_unless_the_server_is_too_busy() -> None:
    def refuse(listed: object) -> None:
        raise Attempt("no list of models in the reply")

    with answering(429, retry_after="3600") as address:
        assert reached(address) == []
    with answering(404) as address, pytest.raises(UserError, match="no such model or address"):
        reached(address)
    with answering(500) as address, pytest.raises(LLMFailure, match="HTTP 500, 3 attempts"):
        reached(address)
    with answering(200) as address, pytest.raises(LLMFailure, match="no list of models in the reply, 1 att"):
        asyncio.run(reach(Server("m", address, retries=0), "some.server", refuse))


@pytest.mark.parametrize("key", [None, SECRET])
def test_a_refused_key_is_told_with_the_variable_that_is_read(
    key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("MY_KEY", key)
    with answering(401, f'{{"error": "{SECRET}"}}') as address, pytest.raises(UserError) as refusal:
        reached_anyhow(address, api_key_variable="MY_KEY")
    told = str(refusal.value)
    assert f"some.server.base_url is {address!r}, but the server there refused the key" in told
    assert "(HTTP 401)" in told
    state = "is not set" if key is None else "is set"
    assert f"variable MY_KEY (some.server.api_key_variable), which {state}." in told
    assert SECRET not in told
