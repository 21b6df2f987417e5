"""Minimal HTTP client for one request over a Unix socket.

No library (httpx, http.client) is used: their imports take 140 and 30 ms of processor time, more than the daemon takes for a
snapshot. The client understands what the daemon's server sends: bodies with a Content-Length, and chunked streams.

Guarantees: an incomplete answer raises; nothing is retried. The module imports so little that a command may use it alone to start
fast (cli/fast_snapshot.py). control.py defines the requests.
"""

from __future__ import annotations

# `socket` makes enumerations of all numbers and imports selectors (2 ms, as much as the request takes).
import _socket
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from ciuic.errors import NotPermitted, Unreachable
from ciuic.system.unix_sockets import connect

_PIECE_BYTES = 65536
_MAX_HEAD_BYTES = 65536


class Answer(NamedTuple):
    """A complete HTTP response."""

    status: int
    body: bytes


class _Incomplete(Exception):
    """The connection ended before the answer was complete, or the answer is not HTTP."""


class Connection:
    """A connection for one request to the daemon behind ``path``, as a context manager.

    Raises:
        Unreachable: no daemon listens.
        NotPermitted: the socket may not be opened.
    """

    def __init__(self, path: str, *, connect_seconds: float) -> None:
        self._path = path
        self._buffer = b""
        self._socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            connect(self._socket, path, connect_seconds)
        except PermissionError as error:
            self._socket.close()
            raise NotPermitted(
                f"not permitted to open the daemon's control socket {path}",
                hint="run as root, or let the daemon's [control] group include you",
            ) from error
        except OSError as error:
            self._socket.close()
            # Imported for hints alone, here and in `_silent`.
            from ciuic.system import service_manager

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
        """Send the request and return the complete answer.

        Args:
            method: HTTP method.
            target: path and query.
            body: JSON document.
            answer_seconds: timeout of each receive; None waits for ever.

        Raises:
            Unreachable: the answer did not arrive completely.
        """
        try:
            status, length = self._begin(method, target, body, answer_seconds)
            return Answer(status, self._take(length) if length is not None else b"".join(self._chunks()))
        except (OSError, _Incomplete) as error:
            raise self._silent(error) from error

    def lines(self, target: str) -> tuple[int, Iterator[bytes]]:
        """Send a GET request; return the status and an iterator of the body's lines as they arrive, without line ends.

        Raises:
            Unreachable: the answer did not arrive; raised by the iterator, too.
        """
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
        """Send the request and read the head of the answer.

        Returns:
            The status, and the length of the body; None for a chunked body.
        """
        # One request a connection, so that no state is left behind.
        head = f"{method} {target} HTTP/1.1\r\nHost: ciuic\r\nConnection: close\r\n"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        # A daemon that has too many callers answers and hangs up without reading what they ask.
        with suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(head.encode("ascii") + b"\r\n" + (body or b""))
        # After the request, which has the timeout of the connection: an answer may take as long as a first
        # capture.
        self._socket.settimeout(answer_seconds)
        return _read_head(self._until(b"\r\n\r\n"))

    def _chunks(self) -> Iterator[bytes]:
        while True:
            # RFC 9112, section 7.1: a hexadecimal size, extensions after a semicolon, and a last chunk of size 0.
            size = self._until(b"\r\n").partition(b";")[0].strip()
            # Checked by hand, because int() accepts signs and underscores as well.
            if not size or size.strip(b"0123456789abcdefABCDEF"):
                raise _Incomplete("the answer is not HTTP")
            if not int(size, 16):
                return
            yield self._take(int(size, 16))
            self._until(b"\r\n")

    def _until(self, end: bytes) -> bytes:
        """Receive up to ``end``; return what comes before it."""
        while end not in self._buffer:
            # Bounded memory, also for a peer that is no HTTP server.
            if len(self._buffer) > _MAX_HEAD_BYTES:
                raise _Incomplete("the answer is not HTTP")
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
        """Return the error for a daemon that accepted the connection and did not answer."""
        from ciuic.system import service_manager

        return Unreachable(
            f"the daemon behind {self._path} did not answer: {str(error) or type(error).__name__}",
            hint=service_manager.log_hint(),
        )


def _read_head(text: bytes) -> tuple[int, int | None]:
    first, *fields = text.split(b"\r\n")
    protocol, _, rest = first.partition(b" ")
    if not protocol.startswith(b"HTTP/1.") or not rest[:3].isdigit():
        raise _Incomplete("the answer is not HTTP")
    lengths = [
        value.strip() for name, _, value in (field.partition(b":") for field in fields)
        if name.strip().lower() == b"content-length"
    ]  # fmt: skip
    return int(rest[:3]), int(lengths[0]) if lengths and lengths[0].isdigit() else None
