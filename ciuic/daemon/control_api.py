"""The control API (architecture.md, section 8): HTTP/1.1 (h11) under trio, on a socket that runtime.py has bound.

Requests become calls, values and errors become JSON. Guarantees: a body is decoded against its type, and
unknown fields in it are refused; every CiuicError becomes its document and a fitting status, in one place;
nothing else leaks but "internal error" (the log has the rest). Leaves the work to ``Operations`` (service.py).

The mode and group of the socket admit root and the members of `control.group`, who are administrators
(runtime.py). At the end requests in flight get a few seconds, then their connections close, also those whose
callers do not read. Removing the socket file is left to the daemon that created it.

References:
    RFC 9112 (HTTP/1.1)
"""

from __future__ import annotations

import socket
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from typing import Final, NamedTuple, Protocol, TypeVar, cast
from urllib.parse import parse_qs, unquote

import h11
import msgspec
import structlog
import trio

from ciuic import __version__
from ciuic.daemon.base.events import EventBus
from ciuic.errors import BY_EXIT_CODE, Busy, CiuicError, NotPermitted, UsageError
from ciuic.protocol.control_types import (
    ErrorDocument,
    ForgetRequest,
    Index,
    PruneReport,
    PruneRequest,
    ReloadReport,
    Resource,
    RootRequest,
    RootStatus,
    SnapshotRequest,
    SnapshotState,
    StatusDocument,
)
from ciuic.protocol.peer_socket import caller_of
from ciuic.structs import decode_json

# Far more than a request needs, so that no caller fills the daemon's memory.
MAX_BODY_BYTES = 64 * 1024
_STATUS_OF_EXIT_CODE = {1: 500, 2: 400, 3: 404, 4: 500, 5: 503, 6: 409, 7: 403, 8: 500, 75: 503}
_T = TypeVar("_T")
# Time for requests in flight at a stop, after which their connections close.
GRACEFUL_SECONDS = 3.0
# Longest wait for the head of a request. Commands close their connection after one request.
_KEEP_ALIVE_SECONDS = 5.0
# Longest wait for a body: callers are processes of this host, and one that stops in the middle occupies a
# connection.
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
_REVOKED = NotPermitted(
    "the group that may use the daemon's control socket was changed while this connection was open",
    hint="connect again, as root or as a member of the present [control] group",
)
log = structlog.get_logger(__name__)

# A new exit code without a status would be answered as an internal error.
assert set(_STATUS_OF_EXIT_CODE) == set(BY_EXIT_CODE)


class Operations(Protocol):
    """Operations that the API offers. A method raises CiuicError with a message for the caller."""

    events: EventBus

    async def status(self) -> StatusDocument:
        """Return the status document."""

    async def take_snapshot(self, request: SnapshotRequest) -> SnapshotState:
        """Cut a snapshot, and return its state when the id is final."""

    async def snapshot_state(self, snapshot_id: str, *, wait: bool) -> SnapshotState:
        """Return the state of a snapshot; with `wait`, when it is committed or has failed."""

    async def add_root(self, path: str) -> RootStatus:
        """Mount a root that the configuration has, and return its status."""

    async def remove_root(self, path: str) -> None:
        """Unmount a root."""

    async def prune(self, *, dry_run: bool) -> PruneReport:
        """Apply retention and free space now."""

    async def forget_trainer(self, trainer: str) -> None:
        """Stop watching a trainer, by name or pid."""

    async def reload(self) -> ReloadReport:
        """Take up the changed configuration."""

    def request_stop(self) -> None:
        """Stop the daemon. Returns at once."""

    async def metrics(self) -> bytes:
        """Return the metrics in Prometheus text format."""


class Request(NamedTuple):
    """An HTTP request that has arrived whole."""

    method: str
    path: str
    """Path, decoded."""
    query: str = ""
    """Query string, undecoded."""
    body: bytes = b""


class Reply(NamedTuple):
    """An HTTP reply."""

    status: int
    body: bytes = b""
    media_type: str = "application/json"
    lines: AsyncGenerator[bytes, None] | None = None
    """Body that is sent in pieces as they come, in place of `body`; the sender closes it."""


class Api:
    """The resources of the daemon. `answer` raises nothing but cancellation."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._routes: Final[dict[tuple[str, str], Callable[[Request], Awaitable[Reply]]]] = {
            ("GET", "/"): self._index,
            ("GET", "/v1"): self._index,
            ("GET", "/v1/status"): self._status,
            ("POST", "/v1/snapshots"): self._take_snapshot,
            ("GET", "/v1/snapshots/{id}"): self._snapshot_state,
            ("POST", "/v1/roots"): self._add_root,
            ("DELETE", "/v1/roots"): self._remove_root,
            ("DELETE", "/v1/trainers"): self._forget_trainer,
            ("POST", "/v1/prune"): self._prune,
            ("POST", "/v1/reload"): self._reload,
            ("POST", "/v1/stop"): self._stop,
            ("GET", "/v1/events"): self._events,
            ("GET", "/metrics"): self._metrics,
        }

    async def answer(self, request: Request) -> Reply:
        """Carry out a request. Errors become documents here and nowhere else."""
        method = "GET" if request.method == "HEAD" else request.method
        above, _, last = request.path.rpartition("/")
        pattern = f"{above}/{{id}}" if last and above == "/v1/snapshots" else request.path
        handler = self._routes.get((method, pattern))
        if handler is None:
            known = any(path == pattern for _, path in self._routes)
            return _not_allowed(request) if known else _not_found(request)
        try:
            return await handler(request)
        except CiuicError as error:
            return refusal(error)
        except Exception:
            log.exception("request_failed", method=request.method, path=request.path)
            return refusal(CiuicError("internal error in the daemon", hint="its log has the details"))

    async def _index(self, request: Request) -> Reply:
        """Answer with the version and the resources of this daemon, for operators and other versions."""
        resources = [Resource(method=method, path=path) for method, path in self._routes]
        return _document(Index(version=__version__, resources=resources))

    async def _status(self, request: Request) -> Reply:
        return _document(await self._operations.status())

    async def _take_snapshot(self, request: Request) -> Reply:
        wanted = _decode(request, SnapshotRequest)
        state = await self._operations.take_snapshot(wanted)
        if not wanted.wait:
            return _document(state, 202)
        return _document(await self._operations.snapshot_state(state.id, wait=True))

    async def _snapshot_state(self, request: Request) -> Reply:
        wait = parse_qs(request.query).get("wait", ["0"])[-1] != "0"
        snapshot_id = request.path.rpartition("/")[2]
        return _document(await self._operations.snapshot_state(snapshot_id, wait=wait))

    async def _add_root(self, request: Request) -> Reply:
        return _document(await self._operations.add_root(_decode(request, RootRequest).path))

    async def _remove_root(self, request: Request) -> Reply:
        await self._operations.remove_root(_decode(request, RootRequest).path)
        return _document({})

    async def _forget_trainer(self, request: Request) -> Reply:
        await self._operations.forget_trainer(_decode(request, ForgetRequest).trainer)
        return _document({})

    async def _prune(self, request: Request) -> Reply:
        return _document(await self._operations.prune(dry_run=_decode(request, PruneRequest).dry_run))

    async def _reload(self, request: Request) -> Reply:
        return _document(await self._operations.reload())

    async def _stop(self, request: Request) -> Reply:
        # Sets an event only, so that the answer goes out before the connections are closed.
        self._operations.request_stop()
        return _document({}, 202)

    async def _metrics(self, request: Request) -> Reply:
        text = await self._operations.metrics()
        return Reply(200, text, "text/plain; version=0.0.4; charset=utf-8")

    async def _events(self, request: Request) -> Reply:
        lines = _event_lines(self._operations.events)
        return Reply(200, media_type="text/event-stream; charset=utf-8", lines=lines)


async def _event_lines(bus: EventBus) -> AsyncGenerator[bytes, None]:
    with bus.subscribe() as subscription:
        yield b": listening\n\n"  # a listener misses no event after this line
        async with aclosing(subscription.events()) as events:
            async for event in events:
                yield b"data:" + msgspec.json.encode(event) + b"\n\n"


def _decode(request: Request, kind: type[_T]) -> _T:
    try:
        # No body is a request in which no field is set, as `curl -X POST` sends it.
        return decode_json(request.body or b"{}", kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # msgspec lets two errors through as they are: for text that is not UTF-8, and for nesting without
        # end.
        raise UsageError(f"the request cannot be read: {error}") from error


def _document(value: object, status: int = 200) -> Reply:
    """Return a reply with a value as JSON."""
    return Reply(status, msgspec.json.encode(value))


def refusal(error: CiuicError) -> Reply:
    """Return a reply with an error's document, which has the exit code for the command that called."""
    body = ErrorDocument(error=error.message, hint=error.hint, code=error.exit_code)
    return _document(body, _STATUS_OF_EXIT_CODE.get(error.exit_code, 500))


def _not_found(request: Request) -> Reply:
    body = ErrorDocument(
        error=f"no such resource: {request.path}",
        hint=f"GET / lists the resources of this daemon, which is version {__version__}; a command of another version"
        " may ask for others",
        code=2,
    )
    return _document(body, 404)


def _not_allowed(request: Request) -> Reply:
    return _document(ErrorDocument(error=f"{request.method} is not possible on {request.path}", code=2), 405)


if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup


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
    """All connections of the socket.

    Guarantees: an error in one connection ends that connection and nothing else, whatever its caller does; no more
    than `MAX_CONNECTIONS` are served at once, some of them reserved for root, and a caller beyond that gets an
    error. A GET ends when its caller hangs up; what changes something is carried out to its end.
    """

    def __init__(self, api: Api, revocations: Callable[[], int], max_connections: int) -> None:
        self._api = api
        self._revocations = revocations
        self._max_connections = max_connections
        self._max_of_others = max_connections - max_connections // _ROOT_SHARE
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
