"""The documents of the control socket, served by a small HTTP server."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import msgspec

Answer = Callable[[Any], tuple[int, Any]]


def hang_up(_: object) -> tuple[int, Any]:
    """Close the connection in the middle of an answer, as a killed daemon does."""
    raise ConnectionResetError


class FakeDaemon:
    """Server on a unix socket that returns the test's ``answers`` and keeps the ``requests``."""

    def __init__(self, socket: Path) -> None:
        self.answers: dict[str, Answer] = {}
        self.requests: list[tuple[str, Any]] = []
        daemon = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle(self) -> None:
                # The caller, or `hang_up`, has closed the connection.
                with suppress(ConnectionError):
                    super().handle()

            def do(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(length)) if length else None
                key = f"{self.command} {self.path}"
                daemon.requests.append((key, body))
                code, document = daemon.answers[key](body)
                payload = msgspec.json.encode(document)
                self.send_response(code)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            do_GET = do_POST = do_DELETE = do  # noqa: N815 - the names that http.server looks for

            def address_string(self) -> str:
                return "unix"

            def log_message(self, format: str, *args: object) -> None:
                """Drop the access log, which tests do not need."""

        class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
            daemon_threads = True

        self.server = Server(str(socket), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
