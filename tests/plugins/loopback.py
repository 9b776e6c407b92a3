"""An HTTP server of a test, on a free port of the loopback."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class QuietHandler(BaseHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        return


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Tells what failed, unless it is a client that went away, which its test may well mean to do."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def listening(handler: type[QuietHandler]) -> Iterator[str]:
    """The server's address, for as long as it listens."""
    server = QuietServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def answering(status: int, body: str = "{}", seconds: float = 0.0, **headers: str) -> Iterator[str]:
    """The address, up to "/v1", of a server that answers every GET so, after a while."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            time.sleep(seconds)
            self.send_response(status)
            for name, value in {"content-type": "application/json", **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

    with listening(Handler) as address:
        yield f"{address}/v1"
