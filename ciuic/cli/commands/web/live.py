"""Client of a Unix socket that speaks HTTP, and the daemon's events, numbered, for pages that are open.

Guarantees: a page that comes back within the last `MAX_EVENTS` events gets those that it missed, each once; one that was away longer, or
from before the page's server was started, is told to load itself again.

References: HTML Living Standard, section 9.2 (server-sent events).
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

import h11
import msgspec
import trio

from ciuic.errors import CiuicError, Unreachable
from ciuic.protocol.control_types import ErrorDocument
from ciuic.structs import decode_json

MAX_EVENTS: Final = 1000
_HEARTBEAT_SECONDS: Final = 15.0
_RETRY_SECONDS: Final = 1.0
_MAX_RETRY_SECONDS: Final = 15.0
_MAX_LINE_BYTES: Final = 1 << 24
_GONE = (OSError, trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError)


class SocketClient:
    """Client of an HTTP server of ours behind a Unix socket: the broker, or the daemon's control socket."""

    def __init__(self, path: str) -> None:
        self._path = path

    async def ask(self, path: str, body: bytes | None = None) -> bytes:
        """Return the body of the answer; with a body, the request is a POST. Raises the CiuicError that the server refuses with."""
        found = bytearray()
        async with aclosing(self.stream(path, body)) as pieces:
            async for piece in pieces:
                found += piece
        return bytes(found)

    async def stream(self, path: str, body: bytes | None = None) -> AsyncGenerator[bytes, None]:
        """Yield the pieces of the answer. Raises CiuicError."""
        try:
            stream = await trio.open_unix_socket(self._path)
            async with stream:
                http = h11.Connection(h11.CLIENT)
                headers = [("Host", "ciuic"), ("Content-Length", str(len(body or b"")))]
                method = "GET" if body is None else "POST"
                sent = http.send(h11.Request(method=method, target=path, headers=headers)) or b""
                if body:
                    sent += http.send(h11.Data(data=body)) or b""
                await stream.send_all(sent + (http.send(h11.EndOfMessage()) or b""))
                status, refused = 200, bytearray()
                while True:
                    event = http.next_event()
                    if event is h11.NEED_DATA:
                        http.receive_data(await stream.receive_some())
                    elif isinstance(event, h11.Response):
                        status = event.status_code
                    elif isinstance(event, h11.Data):
                        if status < 300:
                            yield bytes(event.data)
                        else:
                            refused += event.data
                    else:
                        break
        except _GONE as error:
            raise Unreachable("nobody answers behind the page's own socket") from error
        if status >= 300:
            raise _refused(bytes(refused))


def _refused(body: bytes) -> CiuicError:
    try:
        return decode_json(body, ErrorDocument).raised()
    except msgspec.DecodeError:
        return Unreachable("the answer behind the page's own socket cannot be read")


class Live:
    """Events since the server was started. Belongs to the trio thread."""

    def __init__(self) -> None:
        self._start = secrets.token_hex(4)
        self._events: deque[tuple[int, str, bytes]] = deque(maxlen=MAX_EVENTS)
        self._count = 0
        self._more = trio.Event()

    def push(self, kind: str, data: bytes) -> None:
        """Number an event and tell it to all pages."""
        self._count += 1
        self._events.append((self._count, kind, data))
        self._more.set()
        self._more = trio.Event()

    async def follow(self, broker: SocketClient) -> None:
        """Push the daemon's events, again and again; never returns. A daemon that comes or goes is an event, too."""
        wait = _RETRY_SECONDS
        while True:
            was_there = False
            try:
                rest = b""
                async with aclosing(broker.stream("/events")) as pieces:
                    async for piece in pieces:
                        if not was_there:
                            was_there, wait = True, _RETRY_SECONDS
                            self.push("daemon", b'{"kind":"daemon_there"}')
                        *lines, rest = (rest + piece).split(b"\n")
                        for line in lines:
                            if line.startswith(b"data:"):
                                self._take(line[5:])
                        rest = rest[-_MAX_LINE_BYTES:]
            except CiuicError:
                pass
            if was_there:
                self.push("daemon", b'{"kind":"daemon_gone"}')
            await trio.sleep(wait)
            wait = min(2 * wait, _MAX_RETRY_SECONDS)

    def _take(self, data: bytes) -> None:
        try:
            event = decode_json(data, dict[str, Any])
        except msgspec.DecodeError:
            return
        # Without line ends, which would end the field.
        self.push("ciuic", msgspec.json.encode(event))

    async def lines(self, last_id: str) -> AsyncGenerator[bytes, None]:
        """Yield the stream for a page, whose last event was ``last_id`` (empty: none)."""
        start, _, number = last_id.partition("-")
        seen = self._count
        if last_id:
            oldest = self._events[0][0] if self._events else self._count + 1
            known = int(number) if number.isascii() and number.isdigit() and len(number) < 16 else -1
            if start == self._start and oldest - 1 <= known <= self._count:
                seen = known
            else:
                yield b"event: reset\ndata: {}\n\n"
        yield f"retry: 2000\nid: {self._start}-{seen}\nevent: hello\ndata: {{}}\n\n".encode()
        while True:
            more = self._more
            if self._events and self._events[0][0] > seen + 1:
                yield b"event: reset\ndata: {}\n\n"
                seen = self._events[0][0] - 1
            for count, kind, data in [one for one in self._events if one[0] > seen]:
                seen = count
                yield b"id: %s-%d\nevent: %s\ndata: %s\n\n" % (
                    self._start.encode(),
                    count,
                    kind.encode(),
                    data,
                )
            if more is not self._more:
                continue
            with trio.move_on_after(_HEARTBEAT_SECONDS) as waiting:
                await more.wait()
            if waiting.cancelled_caught:
                yield b": still here\n\n"
