"""Servers on the loopback address for what ciuic sends: mail, and a server of any kind for the length of a block."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class MailServer(socketserver.ThreadingTCPServer):
    """SMTP server (RFC 5321) for a client without extensions; keeps the mails that it gets."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _MailHandler)
        self.mails: list[bytes] = []


class _MailHandler(socketserver.StreamRequestHandler):
    server: MailServer

    def handle(self) -> None:
        self.wfile.write(b"220 test\r\n")
        while line := self.rfile.readline():
            word = line[:4].upper().strip()
            if word == b"DATA":
                self.wfile.write(b"354 go on\r\n")
                lines = []
                while (text := self.rfile.readline()) not in (b".\r\n", b""):
                    lines.append(text)
                self.server.mails.append(b"".join(lines))
            self.wfile.write(b"221 bye\r\n" if word == b"QUIT" else b"250 ok\r\n")
            if word == b"QUIT":
                return


@contextmanager
def serving(server: Any) -> Iterator[Any]:
    """Serve in a thread, and close the server at the end."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
