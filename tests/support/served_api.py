"""Control API over a real socket, in front of operations that only record their requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio

from ciuic.daemon.api.api import Api
from ciuic.daemon.api.server import MAX_CONNECTIONS, serve_api
from ciuic.daemon.base.events import EventBus
from ciuic.daemon.base.runtime import bind_control_socket
from ciuic.protocol.control_types import (
    PruneReport,
    ReloadReport,
    RootStatus,
    SnapshotRequest,
    SnapshotState,
    StatusDocument,
)


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
            serve = partial(serve_api, revocations=revocations, max_connections=max_connections)
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
