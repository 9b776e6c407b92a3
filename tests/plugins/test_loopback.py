"""What a test's server says on the terminal, where tests read what a program said."""

from __future__ import annotations

import socket
import struct
import time
from urllib.parse import urlsplit

import pytest
from loopback import QuietHandler, answering, listening


def _leave_early(address: str, request: bytes) -> None:
    """Sends a request and resets the connection, as a client killed in the middle of one."""
    place = urlsplit(address)
    client = socket.create_connection((str(place.hostname), int(place.port or 0)))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.sendall(request)
    client.close()


@pytest.mark.parametrize("request_sent", [b"GET /v1/models HTTP/1.1\r\n\r\n", b"GET /v1"])
def test_a_server_says_nothing_of_clients_that_leave_early(
    request_sent: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(200, "x" * 2_000_000, seconds=0.05) as address:
        _leave_early(address, request_sent)
        time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_a_server_tells_of_a_fault_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(QuietHandler):
        def do_GET(self) -> None:
            raise LookupError("no such answer")

    with listening(Broken) as address:
        _leave_early(address, b"GET / HTTP/1.1\r\n\r\n")
        time.sleep(0.2)
    assert "no such answer" in capsys.readouterr().err
