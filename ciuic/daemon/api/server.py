"""Server of the control API: HTTP/1.1 (h11) under trio, on a socket that runtime.py has bound.

The mode and group of the socket admit root and the members of `control.group`, who are administrators.
Guarantees: an error in one connection ends that connection and nothing else, whatever its caller does; no
more than `MAX_CONNECTIONS` are served at once, some of them reserved for root, and a caller beyond that gets
an error; at the end requests in flight get a few seconds, then their connections close, also those whose
callers do not read. A GET ends when its caller hangs up; what changes something is carried out to its end.
Removing the socket file is left to the daemon that created it.

References:
    RFC 9112 (HTTP/1.1)
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from typing import Final, cast
from urllib.parse import unquote

import h11
import structlog
import trio

from ciuic.daemon.api.api import MAX_BODY_BYTES, Api, Reply, Request, refusal
from ciuic.errors import Busy, NotPermitted, UsageError
from ciuic.protocol.peer_socket import caller_of

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

# Time for requests in flight at a stop, after which their connections close.
GRACEFUL_SECONDS = 3.0
# Longest wait for the head of a request. Commands close their connection after one request.
KEEP_ALIVE_SECONDS = 5.0
# Longest wait for a body: callers are processes of this host, and one that stops in the middle occupies a
# connection.
BODY_SECONDS = 10.0
# Far below the limit of descriptors, so that callers cannot keep captures from starting.
MAX_CONNECTIONS = 512
# Divisor: one connection of so many is reserved for root, so that a program of a group member that opens too
# many does not keep root out.
ROOT_SHARE = 8
_MAX_HEAD_BYTES: Final = 64 * 1024
_PIECE_BYTES: Final = 64 * 1024
# Errors that a caller may cause by closing its connection at any time.
_HUNG_UP = (trio.BrokenResourceError, trio.BusyResourceError, trio.ClosedResourceError)
_REVOKED = NotPermitted(
    "the group that may use the daemon's control socket was changed while this connection was open",
    hint="connect again, as root or as a member of the present [control] group",
)
log = structlog.get_logger(__name__)


async def serve_api(
    api: Api,
    listener: socket.socket,
    stopped: Callable[[], Awaitable[None]],
    revocations: Callable[[], int] = lambda: 0,
    *,
    max_connections: int = MAX_CONNECTIONS,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve the API until `stopped` returns. Takes over `listener`.

    Args:
        api: the control API.
        listener: listening socket.
        stopped: returns when the daemon ends.
        revocations: returns how often the socket was taken back from a group. Connections from before take no
            request any more, except root's.
        max_connections: most connections at once.
        task_status: told when the socket is served.
    """
    connections = _Connections(api, revocations, max_connections)
    listening = trio.SocketListener(trio.socket.from_stdlib_socket(listener))
    async with trio.open_nursery() as handling:
        async with trio.open_nursery() as accepting:
            accepting.start_soon(
                partial(trio.serve_listeners, connections.handle, [listening], handler_nursery=handling)
            )
            task_status.started()
            await stopped()
            accepting.cancel_scope.cancel()
        connections.wind_down()
        handling.cancel_scope.deadline = trio.current_time() + GRACEFUL_SECONDS


class _Connections:
    """All connections of the socket."""

    def __init__(self, api: Api, revocations: Callable[[], int], max_connections: int) -> None:
        self._api = api
        self._revocations = revocations
        self._max_connections = max_connections
        self._max_of_others = max_connections - max_connections // ROOT_SHARE
        self._count = 0
        # Connections of users other than root.
        self._others = 0
        # Waits for the next request of a connection; all are cancelled at the end.
        self._idle: set[trio.CancelScope] = set()
        self._is_ending = False

    async def handle(self, stream: trio.SocketStream) -> None:
        """Serve one connection; trio closes it.

        Raises nothing but cancellation and other BaseExceptions that are no Exception.
        """
        of_others = int(not _is_root(stream))
        if self._count >= self._max_connections or (of_others and self._others >= self._max_of_others):
            await _turn_away(stream)
            return
        self._count += 1
        self._others += of_others
        try:
            await self._serve(_Connection(stream), bool(of_others))
        except BaseExceptionGroup as group:
            failed, others = group.split(Exception)
            if failed is not None:
                _note(failed)
            if others is not None:
                raise others from None
        except Exception as error:
            _note(error)
        finally:
            self._count -= 1
            self._others -= of_others

    async def _serve(self, connection: _Connection, is_revocable: bool) -> None:
        """Answer the requests of one connection, one after the other."""
        # The mode of the socket keeps new connections out and not those that are open: one with a request
        # every few seconds would stay an administrator's for ever. What is being answered is answered, such
        # as the reload that revokes.
        before = self._revocations()
        while not self._is_ending:
            with trio.move_on_after(KEEP_ALIVE_SECONDS) as idle:
                self._idle.add(idle)
                try:
                    head = await connection.next_head()
                finally:
                    self._idle.discard(idle)
            if idle.cancelled_caught or head is None:
                return
            if isinstance(head, Reply):
                await connection.send(head)
                return
            if is_revocable and self._revocations() != before:
                await connection.send(refusal(_REVOKED))
                return
            body = await connection.body()
            if isinstance(body, Reply):
                await connection.send(body)
                return
            await self._answer(connection, head, body)
            if not connection.is_reusable():
                return

    async def _answer(self, connection: _Connection, head: h11.Request, body: bytes) -> None:
        target, _, query = head.target.decode("latin-1").partition("?")
        method = head.method.decode("latin-1")
        request = Request(method, unquote(target), query, body)
        if method not in ("GET", "HEAD"):
            await connection.send(await self._api.answer(request))
            return
        async with trio.open_nursery() as nursery:

            async def until_hung_up() -> None:
                await connection.hung_up()
                nursery.cancel_scope.cancel()

            nursery.start_soon(until_hung_up)
            await connection.send(await self._api.answer(request))
            nursery.cancel_scope.cancel()

    def wind_down(self) -> None:
        """Close the connections in which no request is being served."""
        self._is_ending = True
        for idle in self._idle:
            idle.cancel()


class _Connection:
    """HTTP on one stream."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self._wants_body = True

    async def next_head(self) -> h11.Request | Reply | None:
        """Return the head of the next request, a refusal of what is none, or None when the caller has gone."""
        event = await self._next_event()
        if isinstance(event, h11.Request):
            self._wants_body = event.method != b"HEAD"
            return event
        return event if isinstance(event, Reply) else None

    async def body(self) -> bytes | Reply:
        """Return the body of the request whose head came last, or a refusal of it."""
        if self._http.they_are_waiting_for_100_continue:
            await self._send(h11.InformationalResponse(status_code=100, headers=[]))
        body = bytearray()
        with trio.move_on_after(BODY_SECONDS):
            while not isinstance(event := await self._next_event(), h11.EndOfMessage):
                if isinstance(event, Reply):
                    return event
                if not isinstance(event, h11.Data):
                    raise trio.BrokenResourceError("the caller hung up in the middle of a request")
                body += event.data
                if len(body) > MAX_BODY_BYTES:
                    return refusal(UsageError(f"the request is longer than {MAX_BODY_BYTES} bytes"))
            return bytes(body)
        return refusal(UsageError(f"the request did not arrive within {BODY_SECONDS:.0f} s"))

    async def _next_event(self) -> h11.Event | type[h11.PAUSED] | Reply:
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(await self._stream.receive_some(_PIECE_BYTES))
        except h11.RemoteProtocolError as error:
            return refusal(UsageError(f"the request is not HTTP/1.1: {error}"))
        return cast("h11.Event | type[h11.PAUSED]", event)

    async def hung_up(self) -> None:
        """Return when the caller has closed its side. The beginning of a further request is kept."""
        while data := await self._stream.receive_some(_PIECE_BYTES):
            self._http.receive_data(data)
            if len(self._http.trailing_data[0]) > _MAX_HEAD_BYTES:
                await trio.sleep_forever()
        self._http.receive_data(b"")

    async def send(self, reply: Reply) -> None:
        """Send a reply to the end of its body."""
        headers = [("date", formatdate(usegmt=True)), ("content-type", reply.media_type)]
        if reply.lines is None:
            headers.append(("content-length", str(len(reply.body))))
        if self._http.their_state is not h11.DONE:
            # What is left of the request is not read.
            headers.append(("connection", "close"))
        reason = HTTPStatus(reply.status).phrase
        await self._send(h11.Response(status_code=reply.status, headers=headers, reason=reason))
        if reply.lines is not None:
            # Otherwise its subscription would last until garbage collection.
            async with aclosing(reply.lines):
                async for line in reply.lines:
                    await self._send(h11.Data(data=line))
        elif self._wants_body:
            await self._send(h11.Data(data=reply.body))
        await self._send(h11.EndOfMessage())

    async def _send(self, event: h11.Event) -> None:
        await self._stream.send_all(self._http.send(event) or b"")

    def is_reusable(self) -> bool:
        """Prepare for a further request; return False where there can be none."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True


def _is_root(stream: trio.SocketStream) -> bool:
    try:
        return caller_of(cast(socket.socket, stream.socket)).uid == 0
    except OSError:
        return False


async def _turn_away(stream: trio.SocketStream) -> None:
    """Refuse a caller beyond the limit, in so few bytes that the send need not wait for them to be read."""
    answer = refusal(
        Busy(
            "the daemon has too many callers at once",
            hint="close other connections to its control socket, or try again later",
        )
    )
    # The answer fits into the socket's buffer; the limit is for a caller whose buffer is full.
    with trio.move_on_after(1), suppress(*_HUNG_UP):
        await _Connection(stream).send(answer)


def _note(error: Exception) -> None:
    """Log the error of a connection: at debug level where the caller closed it, as an error otherwise."""
    causes = _leaves(error)
    if all(isinstance(cause, _HUNG_UP) for cause in causes):
        log.debug("caller_hung_up", error=repr(causes[0]))
    else:
        log.error("connection_failed", exc_info=error)


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for one in error.exceptions for leaf in _leaves(one)]
    return [error]
