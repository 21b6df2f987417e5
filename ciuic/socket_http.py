"""One HTTP request over a unix socket, and its answer: all that a command needs to ask the daemon something.

Not a library (httpx, http.client): their import takes 140 and 30 ms of processor time, more than the daemon takes for a
snapshot. Understands what the daemon's server sends: documents of a length that is told before, and streams in chunks.

Guarantees: an answer that did not arrive whole raises; nothing is retried. Leaves to control.py what is asked. Imports so
little that whoever counts milliseconds may use it alone.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import NamedTuple

from ciuic import service_manager
from ciuic.errors import NotPermitted, Unreachable

_PIECE_BYTES = 65536
_MOST_HEAD_BYTES = 65536


class Answer(NamedTuple):
    """What came back."""

    status: int
    body: bytes


class _Incomplete(Exception):
    """The connection ended before the answer did."""


class Connection:
    """One request to the daemon behind ``path``. A context manager."""

    def __init__(self, path: str, *, connect_seconds: float) -> None:
        """Connects. Unreachable when nobody listens; NotPermitted when the socket may not be opened."""
        self._path = path
        self._buffer = b""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(connect_seconds)
        try:
            self._socket.connect(path)
        except PermissionError as error:
            self._socket.close()
            raise NotPermitted(
                f"not permitted to open the daemon's control socket {path}",
                hint="run as root, or let the daemon's [control] group include you",
            ) from error
        except OSError as error:
            self._socket.close()
            raise Unreachable(
                f"no daemon answers on {path}",
                hint=service_manager.start_hint(),
            ) from error

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(
        self, method: str, target: str, body: bytes | None = None, *, answer_seconds: float | None
    ) -> Answer:
        """Sends the request and returns the whole answer. Unreachable when it does not come; None waits for ever."""
        try:
            status, length = self._begin(method, target, body, answer_seconds)
            return Answer(status, self._take(length) if length is not None else self._chunked())
        except (OSError, _Incomplete) as error:
            raise self._silent(error) from error

    def lines(self, target: str) -> tuple[int, Iterator[bytes]]:
        """(status, the lines of the answer as they come, without their ends). Unreachable while they are read, too."""
        try:
            status, length = self._begin("GET", target, None, None)
            if length is not None:
                return status, iter(self._take(length).splitlines())
        except (OSError, _Incomplete) as error:
            raise self._silent(error) from error
        return status, self._lines()

    def _lines(self) -> Iterator[bytes]:
        rest = b""
        try:
            for chunk in self._chunks():
                *whole, rest = (rest + chunk).split(b"\n")
                yield from whole
        except (OSError, _Incomplete) as error:
            raise self._silent(error) from error

    def _begin(
        self, method: str, target: str, body: bytes | None, answer_seconds: float | None
    ) -> tuple[int, int | None]:
        """Sends the request, reads the head of the answer: its status, and how long the body is; None: it comes in chunks."""
        head = f"{method} {target} HTTP/1.1\r\nHost: ciuic\r\nConnection: close\r\n"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self._socket.sendall(head.encode("ascii") + b"\r\n" + (body or b""))
        self._socket.settimeout(answer_seconds)
        return _read_head(self._until(b"\r\n\r\n"))

    def _chunked(self) -> bytes:
        return b"".join(self._chunks())

    def _chunks(self) -> Iterator[bytes]:
        while True:
            size = self._until(b"\r\n").partition(b";")[0].strip()
            if not size or size.strip(b"0123456789abcdefABCDEF"):
                raise _Incomplete("what came is no answer")
            if not int(size, 16):
                return
            yield self._take(int(size, 16))
            self._until(b"\r\n")

    def _until(self, end: bytes) -> bytes:
        """What comes before ``end``, which is passed over."""
        while end not in self._buffer:
            if len(self._buffer) > _MOST_HEAD_BYTES:
                raise _Incomplete("what came is no answer")
            self._receive()
        found, _, self._buffer = self._buffer.partition(end)
        return found

    def _take(self, size_bytes: int) -> bytes:
        while len(self._buffer) < size_bytes:
            self._receive()
        taken, self._buffer = self._buffer[:size_bytes], self._buffer[size_bytes:]
        return taken

    def _receive(self) -> None:
        piece = self._socket.recv(_PIECE_BYTES)
        if not piece:
            raise _Incomplete("the connection ended")
        self._buffer += piece

    def _silent(self, error: Exception) -> Unreachable:
        """The daemon was there, and went away or fell silent."""
        return Unreachable(
            f"the daemon behind {self._path} did not answer: {str(error) or type(error).__name__}",
            hint=service_manager.log_hint(),
        )


def _read_head(text: bytes) -> tuple[int, int | None]:
    first, *fields = text.split(b"\r\n")
    protocol, _, rest = first.partition(b" ")
    if not protocol.startswith(b"HTTP/1.") or not rest[:3].isdigit():
        raise _Incomplete("what came is no answer")
    lengths = [
        value.strip() for name, _, value in (field.partition(b":") for field in fields)
        if name.strip().lower() == b"content-length"
    ]  # fmt: skip
    return int(rest[:3]), int(lengths[0]) if lengths and lengths[0].isdigit() else None
