"""The control API (architecture.md, section 8): HTTP requests become calls, values and errors become JSON.

Guarantees: a body is limited, in bytes and seconds, decoded against its type, and unknown fields in it are
refused; every CiuicError becomes its document and a fitting status, in one place; nothing else leaks but
"internal error" (the log has the rest). Leaves the work to ``Operations`` (service.py) and the socket's
permissions to runtime.py.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Protocol, TypeVar

import msgspec
import structlog
import trio
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ciuic import __version__
from ciuic.daemon.base.events import EventBus
from ciuic.errors import BY_EXIT_CODE, CiuicError, UsageError
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

# Far more than a request needs, so that no caller fills the daemon's memory.
MAX_BODY_BYTES = 64 * 1024
# Time limit for a body: callers are processes of this host, and one that stops in the middle occupies a
# connection.
BODY_SECONDS = 10.0
STATUS_OF_EXIT_CODE = {1: 500, 2: 400, 3: 404, 4: 500, 5: 503, 6: 409, 7: 403, 8: 500, 75: 503}
T = TypeVar("T")
log = structlog.get_logger(__name__)

# A new exit code without a status would be answered as an internal error.
assert set(STATUS_OF_EXIT_CODE) == set(BY_EXIT_CODE)


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


def make_app(operations: Operations) -> Starlette:
    """Return the ASGI application."""
    handlers = _Handlers(operations)
    return Starlette(
        routes=[
            Route("/", _index, methods=["GET"]),
            Route("/v1", _index, methods=["GET"]),
            Route("/v1/status", handlers.status, methods=["GET"]),
            Route("/v1/snapshots", handlers.take_snapshot, methods=["POST"]),
            Route("/v1/snapshots/{id}", handlers.snapshot_state, methods=["GET"]),
            Route("/v1/roots", handlers.add_root, methods=["POST"]),
            Route("/v1/roots", handlers.remove_root, methods=["DELETE"]),
            Route("/v1/trainers", handlers.forget_trainer, methods=["DELETE"]),
            Route("/v1/prune", handlers.prune, methods=["POST"]),
            Route("/v1/reload", handlers.reload, methods=["POST"]),
            Route("/v1/stop", handlers.stop, methods=["POST"]),
            Route("/v1/events", handlers.events, methods=["GET"]),
            Route("/metrics", handlers.metrics, methods=["GET"]),
        ],
        exception_handlers={404: _not_found, 405: _not_allowed},
    )


Handler = Callable[["_Handlers", Request], Awaitable[Response]]


def _answering(handler: Handler) -> Handler:
    """Wrap a handler so that errors become documents, here and nowhere else."""

    async def answered(self: _Handlers, request: Request) -> Response:
        try:
            return await handler(self, request)
        except CiuicError as error:
            return refusal(error)
        # No caller is left that could read an answer.
        except ClientDisconnect:
            raise
        except Exception:
            log.exception("request_failed", method=request.method, path=request.url.path)
            return refusal(CiuicError("internal error in the daemon", hint="its log has the details"))

    return answered


class _Handlers:
    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    @_answering
    async def status(self, request: Request) -> Response:
        return document(await self._operations.status())

    @_answering
    async def take_snapshot(self, request: Request) -> Response:
        wanted = await _decode(request, SnapshotRequest)
        state = await self._operations.take_snapshot(wanted)
        if not wanted.wait:
            return document(state, 202)
        return document(await self._operations.snapshot_state(state.id, wait=True))

    @_answering
    async def snapshot_state(self, request: Request) -> Response:
        wait = request.query_params.get("wait", "") not in ("", "0")
        return document(await self._operations.snapshot_state(request.path_params["id"], wait=wait))

    @_answering
    async def add_root(self, request: Request) -> Response:
        return document(await self._operations.add_root((await _decode(request, RootRequest)).path))

    @_answering
    async def remove_root(self, request: Request) -> Response:
        await self._operations.remove_root((await _decode(request, RootRequest)).path)
        return document({})

    @_answering
    async def forget_trainer(self, request: Request) -> Response:
        await self._operations.forget_trainer((await _decode(request, ForgetRequest)).trainer)
        return document({})

    @_answering
    async def prune(self, request: Request) -> Response:
        return document(await self._operations.prune(dry_run=(await _decode(request, PruneRequest)).dry_run))

    @_answering
    async def reload(self, request: Request) -> Response:
        return document(await self._operations.reload())

    @_answering
    async def stop(self, request: Request) -> Response:
        # Sets an event only, so that the answer goes out before the connections are closed.
        self._operations.request_stop()
        return document({}, 202)

    @_answering
    async def metrics(self, request: Request) -> Response:
        return Response(
            await self._operations.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    @_answering
    async def events(self, request: Request) -> Response:
        return _EventStream(_event_lines(self._operations.events))


class _EventStream(StreamingResponse):
    """Response that ends its subscription when the listener has gone."""

    def __init__(self, lines: AsyncGenerator[bytes, None]) -> None:
        super().__init__(lines, media_type="text/event-stream")
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Otherwise the subscription would last until garbage collection.
        async with aclosing(self._lines):
            await super().__call__(scope, receive, send)


async def _event_lines(bus: EventBus) -> AsyncGenerator[bytes, None]:
    with bus.subscribe() as subscription:
        yield b": listening\n\n"  # a listener misses no event after this line
        async with aclosing(subscription.events()) as events:
            async for event in events:
                yield b"data:" + msgspec.json.encode(event) + b"\n\n"


async def _decode(request: Request, kind: type[T]) -> T:
    body = await _body(request)
    try:
        # No body is a request in which no field is set, as `curl -X POST` sends it.
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # msgspec lets two errors through as they are: for text that is not UTF-8, and for nesting without
        # end.
        raise UsageError(f"the request cannot be read: {error}") from error


async def _body(request: Request) -> bytes:
    body = bytearray()
    with trio.move_on_after(BODY_SECONDS) as patience:
        async with aclosing(request.stream()) as parts:
            async for part in parts:
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise UsageError(f"the request is longer than {MAX_BODY_BYTES} bytes")
    if patience.cancelled_caught:
        raise UsageError(f"the request did not arrive within {BODY_SECONDS:.0f} s")
    return bytes(body)


def document(value: object, status: int = 200) -> Response:
    """Return a response with a value as JSON."""
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def refusal(error: CiuicError) -> Response:
    """Return a response with an error's document, which has the exit code for the command that called."""
    body = ErrorDocument(error=error.message, hint=error.hint, code=error.exit_code)
    return document(body, STATUS_OF_EXIT_CODE.get(error.exit_code, 500))


async def _index(request: Request) -> Response:
    """Answer with the version and the resources of this daemon, for operators and other versions."""
    resources = [
        Resource(method=method, path=route.path)
        for route in request.app.routes
        if isinstance(route, Route)
        # Starlette adds HEAD to every route with GET.
        for method in sorted((route.methods or set()) - {"HEAD"})
    ]
    return document(Index(version=__version__, resources=resources))


async def _not_found(request: Request, error: Exception) -> Response:
    body = ErrorDocument(
        error=f"no such resource: {request.url.path}",
        hint=f"GET / lists the resources of this daemon, which is version {__version__}; a command of another version"
        " may ask for others",
        code=2,
    )
    return document(body, 404)


async def _not_allowed(request: Request, error: Exception) -> Response:
    return document(
        ErrorDocument(error=f"{request.method} is not possible on {request.url.path}", code=2), 405
    )
