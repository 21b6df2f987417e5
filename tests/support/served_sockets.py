"""Sockets of the daemon, served as it does.

The control API stands in front of operations that only record their requests; trainers of the watch socket have no incidents.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import trio

from ciuic.daemon.base.events import Alerts, EventBus
from ciuic.daemon.base.runtime import bind_control_socket
from ciuic.daemon.roots.permission import WatchPermission
from ciuic.daemon.service import Api
from ciuic.daemon.trainers.registry import Emergencies, TrainerRegistry
from ciuic.daemon.trainers.watch import WatchSocket
from ciuic.protocol.control_types import (
    FlushReport,
    HoldRequest,
    HoldState,
    PruneReport,
    ReloadReport,
    RootStatus,
    SnapshotRequest,
    SnapshotState,
    StatusDocument,
)
from ciuic.protocol.http_server import MAX_CONNECTIONS, serve_http
from ciuic.protocol.watch_client import MAX_FDS, MAX_MESSAGE_BYTES, SOCKET_NAME, Hello, Welcome


class FakeOperations:
    """Operations that return prepared answers, or raise ``failure``."""

    def __init__(self) -> None:
        self.events = EventBus(lambda: 0)
        self.failure: Exception | None = None
        self.calls: list[tuple[Any, ...]] = []
        self.committed = trio.Event()
        self.stop_requested = threading.Event()

    async def _called(self, *call: Any) -> None:
        await trio.lowlevel.checkpoint()
        self.calls.append(call)
        if self.failure is not None:
            raise self.failure

    async def status(self) -> StatusDocument:
        await self._called("status")
        return StatusDocument(version="1", pid=2, since="s", now="n", roots=[RootStatus(path="/ä b")])

    async def take_snapshot(self, request: SnapshotRequest) -> SnapshotState:
        await self._called("take_snapshot", request)
        return SnapshotState(id="cs-123456", state="pending")

    async def snapshot_state(self, snapshot_id: str, *, wait: bool) -> SnapshotState:
        await self._called("snapshot_state", snapshot_id, wait)
        return SnapshotState(id=snapshot_id, state="committed")

    async def flush(self, roots: Sequence[str]) -> FlushReport:
        await self._called("flush", list(roots))
        return FlushReport(complete=True)

    async def hold(self, request: HoldRequest) -> HoldState:
        await self._called("hold", request)
        return HoldState(token="a1")

    async def decide_hold(self, token: str, *, cut: bool) -> SnapshotState | None:
        await self._called("decide_hold", token, cut)
        return SnapshotState(id="cs-123456", state="pending") if cut else None

    async def add_root(self, path: str) -> RootStatus:
        await self._called("add_root", path)
        return RootStatus(path=path, state="mounted")

    async def remove_root(self, path: str) -> None:
        await self._called("remove_root", path)

    async def prune(self, *, dry_run: bool) -> PruneReport:
        await self._called("prune", dry_run)
        return PruneReport(dry_run=dry_run, removed=["cs-000001"], freed_bytes=3)

    async def forget_trainer(self, trainer: str) -> None:
        await self._called("forget_trainer", trainer)

    async def reload(self) -> ReloadReport:
        await self._called("reload")
        return ReloadReport(config_path="/c.toml")

    def request_stop(self) -> None:
        self.calls.append(("stop",))

    async def metrics(self) -> bytes:
        await self._called("metrics")
        return b"ciuic_up 1\n"


@contextmanager
def served(
    path: Path,
    operations: FakeOperations,
    *,
    max_connections: int = MAX_CONNECTIONS,
    revocations: Callable[[], int] = lambda: 0,
) -> Iterator[Callable[[Callable[[], None]], None]]:
    """Serve ``operations`` in a thread; yield a function that runs another in its trio loop."""
    ready, tokens = threading.Event(), []
    stopped = trio.Event()

    async def main() -> None:
        tokens.append(trio.lowlevel.current_trio_token())
        async with trio.open_nursery() as nursery:
            serve = partial(serve_http, revocations=revocations, max_connections=max_connections)
            await nursery.start(serve, Api(operations), bind_control_socket(path, None), stopped.wait)
            ready.set()

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    try:
        assert ready.wait(10)
        yield tokens[0].run_sync_soon
    finally:
        tokens[0].run_sync_soon(stopped.set)
        thread.join(10)
        assert not thread.is_alive()


class ServedWatch:
    """Context manager of the socket. ``permission`` defaults to every user."""

    def __init__(self, directory: Path, permission: WatchPermission | None = None) -> None:
        self.path = directory / "watch.sock"
        self._directory = directory
        self._permission = permission or WatchPermission(everybody=True)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._main,))

    def __enter__(self) -> ServedWatch:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        trio.from_thread.run_sync(self._scope.cancel, trio_token=self._token)
        self._thread.join(60)

    def names(self) -> list[str]:
        """Return the names of watched trainers, from the event loop, which must be alive for it."""
        return [one.name for one in trio.from_thread.run_sync(self.trainers.statuses, trio_token=self._token)]

    def alerts(self) -> dict[str, str]:
        """Return active alerts: message by key."""
        return {
            alert.key: alert.message
            for alert in trio.from_thread.run_sync(self._alerts.standing, trio_token=self._token)
        }

    async def _main(self) -> None:
        events = EventBus(lambda: 0)
        self._alerts = Alerts(events, lambda: 0)

        async def take(request: object) -> object:
            await trio.sleep_forever()

        emergencies = Emergencies(
            take,  # type: ignore[arg-type]
            alerts=self._alerts,
            events=events,
            now_ns=lambda: 0,
            per_hour=lambda: 0,
            on_incident=lambda incident: None,
        )
        self.trainers = TrainerRegistry(
            alerts=self._alerts, emergencies=emergencies, now_ns=lambda: 0, on_change=lambda: None
        )
        watched = WatchSocket(self._directory, self.trainers, self._permission.__call__, alerts=self._alerts)
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as nursery:
            self._scope = nursery.cancel_scope
            self.trainers.nursery = nursery
            nursery.start_soon(watched.serve)
            await watched.server.ready.wait()
            self._ready.set()
        self.trainers.close()


class RegistrationListener:
    """Socket of a daemon that accepts trainers without watching them: for tests of what a trainer sends."""

    def __init__(self, directory: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(directory / SOCKET_NAME))
        self._listener.listen()
        self._listener.settimeout(60)

    def __enter__(self) -> RegistrationListener:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    @contextmanager
    def accept(self) -> Iterator[tuple[Hello, list[int]]]:
        """Accept one trainer; yield its message and descriptors, which are closed with the connection at the end."""
        with self._listener.accept()[0] as connection:
            data, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, MAX_FDS)
            try:
                connection.send(msgspec.msgpack.encode(Welcome()))
                yield msgspec.msgpack.decode(data, type=Hello), fds
            finally:
                for fd in fds:
                    os.close(fd)
