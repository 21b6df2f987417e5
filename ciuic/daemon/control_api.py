"""The control API (architecture.md, section 8): requests become calls, values and errors become JSON.

Guarantees: a body is decoded against its type, and unknown fields in it are refused; every CiuicError becomes its document and a
fitting status, in one place; nothing else leaks but "internal error" (the log has the rest). Leaves the work to ``Operations``
(service.py), and HTTP to `ciuic.protocol.http_server`, on a socket that runtime.py has bound.

The mode and group of the socket admit root and the members of `control.group`, who are administrators (runtime.py). Removing the
socket file is left to the daemon that created it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Final, Protocol, TypeVar
from urllib.parse import parse_qs

import msgspec
import structlog

from ciuic import __version__
from ciuic.daemon.base.events import EventBus
from ciuic.errors import CiuicError, UsageError
from ciuic.protocol.control_types import (
    ErrorDocument,
    FlushReport,
    FlushRequest,
    ForgetRequest,
    HoldDecision,
    HoldRequest,
    HoldState,
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
from ciuic.protocol.http_server import Reply, Request, document, refusal
from ciuic.structs import decode_json

_T = TypeVar("_T")
log = structlog.get_logger(__name__)


class Operations(Protocol):
    """Operations that the API offers. A method raises CiuicError with a message for the caller."""

    events: EventBus

    async def status(self) -> StatusDocument:
        """Return the status document."""

    async def take_snapshot(self, request: SnapshotRequest) -> SnapshotState:
        """Cut a snapshot, and return its state when the id is final."""

    async def snapshot_state(self, snapshot_id: str, *, wait: bool) -> SnapshotState:
        """Return the state of a snapshot; with `wait`, when it is committed or has failed."""

    async def flush(self, roots: Sequence[str]) -> FlushReport:
        """Write back what the kernel has cached of these roots; of all for none."""

    async def hold(self, request: HoldRequest) -> HoldState:
        """Hold the roots of a snapshot, and return when all are held."""

    async def decide_hold(self, token: str, *, cut: bool) -> SnapshotState | None:
        """Cut what is held, and return the state when the id is final; or release it."""

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
            ("POST", "/v1/flush"): self._flush,
            ("POST", "/v1/holds"): self._hold,
            ("POST", "/v1/holds/{id}"): self._decide_hold,
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
        pattern = f"{above}/{{id}}" if last and above in ("/v1/snapshots", "/v1/holds") else request.path
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
        return document(Index(version=__version__, resources=resources))

    async def _status(self, request: Request) -> Reply:
        return document(await self._operations.status())

    async def _take_snapshot(self, request: Request) -> Reply:
        wanted = _decode(request, SnapshotRequest)
        state = await self._operations.take_snapshot(wanted)
        if not wanted.wait:
            return document(state, 202)
        return document(await self._operations.snapshot_state(state.id, wait=True))

    async def _snapshot_state(self, request: Request) -> Reply:
        wait = parse_qs(request.query).get("wait", ["0"])[-1] != "0"
        snapshot_id = request.path.rpartition("/")[2]
        return document(await self._operations.snapshot_state(snapshot_id, wait=wait))

    async def _flush(self, request: Request) -> Reply:
        return document(await self._operations.flush(_decode(request, FlushRequest).roots))

    async def _hold(self, request: Request) -> Reply:
        return document(await self._operations.hold(_decode(request, HoldRequest)))

    async def _decide_hold(self, request: Request) -> Reply:
        token, wanted = request.path.rpartition("/")[2], _decode(request, HoldDecision)
        state = await self._operations.decide_hold(token, cut=wanted.cut)
        return document({}) if state is None else document(state, 202)

    async def _add_root(self, request: Request) -> Reply:
        return document(await self._operations.add_root(_decode(request, RootRequest).path))

    async def _remove_root(self, request: Request) -> Reply:
        await self._operations.remove_root(_decode(request, RootRequest).path)
        return document({})

    async def _forget_trainer(self, request: Request) -> Reply:
        await self._operations.forget_trainer(_decode(request, ForgetRequest).trainer)
        return document({})

    async def _prune(self, request: Request) -> Reply:
        return document(await self._operations.prune(dry_run=_decode(request, PruneRequest).dry_run))

    async def _reload(self, request: Request) -> Reply:
        return document(await self._operations.reload())

    async def _stop(self, request: Request) -> Reply:
        # Sets an event only, so that the answer goes out before the connections are closed.
        self._operations.request_stop()
        return document({}, 202)

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


def _not_found(request: Request) -> Reply:
    body = ErrorDocument(
        error=f"no such resource: {request.path}",
        hint=f"GET / lists the resources of this daemon, which is version {__version__}; a command of another version"
        " may ask for others",
        code=2,
    )
    return document(body, 404)


def _not_allowed(request: Request) -> Reply:
    return document(ErrorDocument(error=f"{request.method} is not possible on {request.path}", code=2), 405)
