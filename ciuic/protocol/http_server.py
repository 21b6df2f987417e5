"""HTTP/1.1 (h11) under trio on a socket that is bound already: what the daemon's control socket and the page of `ciuic web` share.

Guarantees: whatever callers do, no connection takes more than some memory and time, and an error in one ends that one alone. At the end
requests in flight get a few seconds, then their connections close, also those whose callers do not read.

References:
    RFC 9112 (HTTP/1.1)
"""

from __future__ import annotations

import math
import socket
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from typing import Final, NamedTuple, Protocol, cast
from urllib.parse import unquote

import h11
import msgspec
import structlog
import trio

from ciuic.errors import BY_EXIT_CODE, Busy, CiuicError, NotPermitted, UsageError
from ciuic.protocol.control_types import ErrorDocument
from ciuic.protocol.peer_socket import Caller, caller_of

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

# Far more than a request needs, so that no caller fills the memory.
MAX_BODY_BYTES = 64 * 1024
_STATUS_OF_EXIT_CODE = {1: 500, 2: 400, 3: 404, 4: 500, 5: 503, 6: 409, 7: 403, 8: 500, 75: 503}
# Time for requests in flight at a stop, after which their connections close.
GRACEFUL_SECONDS = 3.0
# Longest wait for the head of a request. Commands close their connection after one request.
_KEEP_ALIVE_SECONDS = 5.0
# Longest wait for a body: one that stops in the middle occupies a connection.
BODY_SECONDS = 10.0
# Far below the limit of descriptors, so that callers cannot keep captures from starting.
MAX_CONNECTIONS = 512
# Divisor: one connection of so many is reserved for root, so that a program of a group member that opens too
# many does not keep root out.
_ROOT_SHARE = 8
_MAX_HEAD_BYTES: Final = 64 * 1024
_PIECE_BYTES: Final = 64 * 1024
# Errors that a caller may cause by closing its connection at any time.
_HUNG_UP = (trio.BrokenResourceError, trio.BusyResourceError, trio.ClosedResourceError)
log = structlog.get_logger(__name__)

# A new exit code without a status would be answered as an internal error.
assert set(_STATUS_OF_EXIT_CODE) == set(BY_EXIT_CODE)
_REVOKED = NotPermitted(
    "the group that may use the daemon's control socket was changed while this connection was open",
    hint="connect again, as root or as a member of the present [control] group",
)


class Request(NamedTuple):
    """An HTTP request that has arrived whole."""

    method: str
    path: str
    """Path, decoded."""
    query: str = ""
    """Query string, undecoded."""
    body: bytes = b""
    headers: Mapping[str, str] = {}
    """Values by name in small letters; those of a name that came several times are joined (RFC 9110, section 5.3)."""
    caller: Caller | None = None
    """Process that has connected; None over TCP."""


class Reply(NamedTuple):
    """An HTTP reply."""

    status: int
    body: bytes = b""
    media_type: str = "application/json"
    lines: AsyncGenerator[bytes, None] | None = None
    """Body that is sent in pieces as they come, in place of `body`; the sender closes it."""
    headers: tuple[tuple[str, str], ...] = ()
    """Headers beside those of the body."""
    is_known: bool = False
    """The caller is somebody, whose connection does not yield to strangers'."""


class Resources(Protocol):
    """Resources that a server offers."""

    async def answer(self, request: Request) -> Reply:
        """Answer a request. Raises nothing but cancellation."""


def document(value: object, status: int = 200) -> Reply:
    """Return a reply with a value as JSON."""
    return Reply(status, msgspec.json.encode(value))


def refusal(error: CiuicError) -> Reply:
    """Return a reply with an error's document, which has the exit code for the command that called."""
    return document(ErrorDocument.of(error), status_of(error))


def status_of(error: CiuicError) -> int:
    """Return the HTTP status that fits an error."""
    return _STATUS_OF_EXIT_CODE.get(error.exit_code, 500)


async def serve_http(
    resources: Resources,
    listener: socket.socket | trio.abc.Listener[trio.SocketStream],
    stopped: Callable[[], Awaitable[None]],
    revocations: Callable[[], int] = lambda: 0,
    *,
    max_connections: int = MAX_CONNECTIONS,
    send_seconds: float = math.inf,
    strangers_yield: bool = False,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve resources until `stopped` returns. Takes over `listener`.

    Args:
        resources: what is served.
        listener: listening socket, or what else has connections.
        stopped: returns when the server is to end.
        revocations: returns how often the socket was taken back from a group. Connections from before take no
            request any more, except root's.
        max_connections: most connections at once.
        send_seconds: longest wait until a caller has taken 64 KiB of an answer; its connection ends then.
        strangers_yield: where there are too many connections, a new one takes the place of the oldest of the user or
            address with the most of those of nobody who is known; and these get one answer each.
        task_status: told when the socket is served.
    """
    connections = _Connections(
        resources, revocations, max_connections, send_seconds, strangers_yield=strangers_yield
    )
    if isinstance(listener, socket.socket):
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(listener))
    async with trio.open_nursery() as handling:
        async with trio.open_nursery() as accepting:
            accepting.start_soon(
                partial(trio.serve_listeners, connections.handle, [listener], handler_nursery=handling)
            )
            task_status.started()
            await stopped()
            accepting.cancel_scope.cancel()
        connections.wind_down()
        handling.cancel_scope.deadline = trio.current_time() + GRACEFUL_SECONDS


class _Connections:
    """All connections of the socket.

    Guarantees: an error in one connection ends that connection and nothing else, whatever its caller does; no more
    than `MAX_CONNECTIONS` are served at once, some of them reserved for root, and a caller beyond that gets an
    error. A GET ends when its caller hangs up; what changes something is carried out to its end.
    """

    def __init__(
        self,
        resources: Resources,
        revocations: Callable[[], int],
        max_connections: int,
        send_seconds: float,
        *,
        strangers_yield: bool,
    ) -> None:
        self._resources = resources
        self._revocations = revocations
        self._max_connections = max_connections
        self._max_of_others = max_connections - max_connections // _ROOT_SHARE
        self._send_seconds = send_seconds
        self._count = 0
        # Connections of users other than root.
        self._others = 0
        # Waits for the next request of a connection; all are cancelled at the end.
        self._idle: set[trio.CancelScope] = set()
        self._strangers_yield = strangers_yield
        # Connections of nobody who is known, the oldest first, with their users or addresses.
        self._strangers: dict[trio.CancelScope, int | str] = {}
        self._is_ending = False

    async def handle(self, stream: trio.SocketStream) -> None:
        """Serve one connection; trio closes it.

        Raises nothing but cancellation and other BaseExceptions that are no Exception.
        """
        caller = _caller(stream)
        of_others = int(caller is None or caller.uid != 0)
        if self._count >= self._max_connections or (of_others and self._others >= self._max_of_others):
            if not (self._strangers_yield and self._strangers):
                await _turn_away(stream)
                return
            # Of the peer with the most, so that each peer has a place. It ends at its next turn, and is one too many
            # until then.
            ((crowd, _),) = Counter(self._strangers.values()).most_common(1)
            oldest = next(scope for scope, peer in self._strangers.items() if peer == crowd)
            del self._strangers[oldest]
            oldest.cancel()
        self._count += 1
        self._others += of_others
        scope = trio.CancelScope()
        if of_others:
            self._strangers[scope] = _peer(stream) if caller is None else caller.uid
        try:
            with scope:
                connection = _Connection(stream, self._send_seconds)
                await self._serve(connection, caller, bool(of_others), scope)
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
            self._strangers.pop(scope, None)

    async def _serve(
        self, connection: _Connection, caller: Caller | None, is_revocable: bool, scope: trio.CancelScope
    ) -> None:
        """Answer the requests of one connection, one after the other."""
        # The mode of the socket keeps new connections out and not those that are open: one with a request
        # every few seconds would stay an administrator's for ever. What is being answered is answered, such
        # as the reload that revokes.
        before = self._revocations()
        while not self._is_ending:
            with trio.move_on_after(_KEEP_ALIVE_SECONDS) as idle:
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
            await self._answer(connection, caller, head, body, scope)
            if not connection.is_reusable():
                return

    async def _answer(
        self,
        connection: _Connection,
        caller: Caller | None,
        head: h11.Request,
        body: bytes,
        scope: trio.CancelScope,
    ) -> None:
        target, _, query = head.target.decode("latin-1").partition("?")
        method = head.method.decode("latin-1")
        headers: dict[str, str] = {}
        for raw_name, raw_value in head.headers:
            name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
            joint = "; " if name == "cookie" else ", "
            headers[name] = f"{headers[name]}{joint}{value}" if name in headers else value
        request = Request(method, unquote(target), query, body, headers, caller)

        async def answer() -> None:
            reply = await self._resources.answer(request)
            if reply.is_known:
                self._strangers.pop(scope, None)
            elif self._strangers_yield and scope in self._strangers:
                # Strangers ask once: requests in a row would all be answered before the first one of who comes later.
                reply = reply._replace(headers=(*reply.headers, ("connection", "close")))
            await connection.send(reply)

        if method not in ("GET", "HEAD"):
            await answer()
            return
        async with trio.open_nursery() as nursery:

            async def until_hung_up() -> None:
                await connection.hung_up()
                nursery.cancel_scope.cancel()

            nursery.start_soon(until_hung_up)
            await answer()
            nursery.cancel_scope.cancel()

    def wind_down(self) -> None:
        """Close the connections in which no request is being served."""
        self._is_ending = True
        for idle in self._idle:
            idle.cancel()


class _Connection:
    """HTTP on one stream."""

    def __init__(self, stream: trio.SocketStream, send_seconds: float = math.inf) -> None:
        self._stream = stream
        self._send_seconds = send_seconds
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
        headers = [("date", formatdate(usegmt=True)), ("content-type", reply.media_type), *reply.headers]
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
                if self._wants_body:
                    async for line in reply.lines:
                        await self._send(h11.Data(data=line))
        elif self._wants_body:
            await self._send(h11.Data(data=reply.body))
        await self._send(h11.EndOfMessage())

    async def _send(self, event: h11.Event) -> None:
        data = memoryview(self._http.send(event) or b"")
        for at in range(0, len(data), _PIECE_BYTES):
            with trio.move_on_after(self._send_seconds) as sending:
                await self._stream.send_all(data[at : at + _PIECE_BYTES])
            if sending.cancelled_caught:
                raise trio.BrokenResourceError("the caller does not read its answer")

    def is_reusable(self) -> bool:
        """Prepare for a further request; return False where there can be none."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True


def _caller(stream: trio.SocketStream) -> Caller | None:
    peer = cast(socket.socket, stream.socket)
    if peer.family != socket.AF_UNIX:
        return None
    try:
        return caller_of(peer)
    except OSError:
        return None


def _peer(stream: trio.SocketStream) -> str:
    """Return the address of who has connected over TCP; empty where it is gone."""
    try:
        return str(stream.socket.getpeername()[0])
    except (OSError, IndexError):
        return ""


async def _turn_away(stream: trio.SocketStream) -> None:
    """Refuse a caller beyond the limit, in so few bytes that the send need not wait for them to be read."""
    answer = refusal(
        Busy(
            "there are too many callers at once",
            hint="close other connections to this socket, or try again later",
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
