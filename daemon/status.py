"""The status document, put together from everything that knows a part of it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import structlog
import trio

import ciuic
from ciuic.control_types import (
    BesideStatus,
    RepositoryStatus,
    RootStatus,
    SnapshotSummary,
    StatusDocument,
    rfc3339,
)
from ciuic.daemon.store import Store, summary
from ciuic.errors import CiuicError
from ciuic.pace import audible, waits_files

if TYPE_CHECKING:
    from ciuic.daemon.service import Daemon

SHOWN_INCIDENTS = 20
log = structlog.get_logger(__name__)


async def status_document(daemon: Daemon) -> StatusDocument:
    """Asks all workers and the store at once. What does not answer is shown so; nothing here fails for it."""
    roots: dict[str, RootStatus] = {}
    supervisors = dict(daemon.roots.supervisors)

    async def ask(path: str) -> None:
        roots[path] = await supervisors[path].status()

    async with trio.open_nursery() as nursery:
        for path in supervisors:
            nursery.start_soon(ask, path)
        repository, last, last_ns = await trio.to_thread.run_sync(_ask_store, daemon.store)
    now_ns = daemon.now_ns()
    due = daemon.schedule.next_due()
    return StatusDocument(
        version=ciuic.__version__,
        pid=os.getpid(),
        since=rfc3339(daemon.started_ns),
        now=rfc3339(now_ns),
        roots=[roots[path] for path in supervisors],
        repository=repository,
        last_snapshot=last,
        next_snapshot=due.astimezone().isoformat(timespec="seconds") if due is not None else None,
        seconds_since_last=max(0.0, (now_ns - last_ns) / 1e9) if last_ns is not None else None,
        interval_seconds=daemon.settings.interval_seconds,
        captures=daemon.snapshots.unfinished(),
        beside=_beside(daemon),
        alerts=daemon.alerts.standing(),
        trainers=daemon.watch.statuses(),
        incidents=daemon.watch.incidents()[:SHOWN_INCIDENTS],
        stopping=daemon.stopping,
        config_path=daemon.settings.config_path,
    )


def _beside(daemon: Daemon) -> BesideStatus:
    settings = daemon.settings
    return BesideStatus(
        io_priority=settings.io_priority,
        slice=daemon.slice,
        min_share=settings.min_share,
        finish_within_seconds=settings.finish_within_seconds,
        hears=audible(waits_files(str(settings.runtime_dir))),
    )


def _ask_store(store: Store) -> tuple[RepositoryStatus, SnapshotSummary | None, int | None]:
    try:
        latest = store.latest() if store.path is not None else None
    except CiuicError as error:
        log.warning("store_unreadable", error=str(error))
        latest = None
    return store.status(), summary(latest) if latest else None, latest.time_ns if latest else None
