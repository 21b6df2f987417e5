"""The status document, put together from everything that knows a part of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import structlog
import trio

import ciuic
from ciuic.control_types import (
    BesideStatus,
    RepositoryStatus,
    RootStatus,
    StatusDocument,
    rfc3339,
)
from ciuic.daemon.space import SpaceWatch
from ciuic.daemon.store import LastSnapshot, Store, summary
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
        facts = await trio.to_thread.run_sync(_ask_store, daemon.store, daemon.space, list(supervisors))
    now_ns = daemon.now_ns()
    due = daemon.schedule.next_due()
    next_snapshot = due.astimezone().isoformat(timespec="seconds") if due is not None else None
    for path, root in roots.items():
        newest = facts.by_root[path]
        root.last_snapshot = summary(newest) if newest is not None else None
        root.seconds_since_last = _age_seconds(newest, now_ns)
        root.next_snapshot = rfc3339(now_ns) if path in daemon.first_snapshots.waiting else next_snapshot
    return StatusDocument(
        version=ciuic.__version__,
        pid=os.getpid(),
        since=rfc3339(daemon.started_ns),
        now=rfc3339(now_ns),
        roots=[roots[path] for path in supervisors],
        repository=facts.repository,
        last_snapshot=summary(facts.newest) if facts.newest is not None else None,
        next_snapshot=next_snapshot,
        seconds_since_last=_risk_seconds(list(roots.values()), _age_seconds(facts.newest, now_ns)),
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


class _StoreFacts(NamedTuple):
    """What the repository says."""

    repository: RepositoryStatus
    newest: LastSnapshot | None
    by_root: Mapping[str, LastSnapshot | None]


def _ask_store(store: Store, space: SpaceWatch, roots: Sequence[str]) -> _StoreFacts:
    by_root: dict[str, LastSnapshot | None] = dict.fromkeys(roots)
    try:
        newest = store.latest() if store.path is not None else None
        by_root = store.latest_of(roots)
    except CiuicError as error:
        log.warning("store_unreadable", error=str(error))
        newest = None
    return _StoreFacts(space.look(), newest, by_root)


def _age_seconds(snapshot: LastSnapshot | None, now_ns: int) -> float | None:
    """A cut in the future (a clock that was put back) has no age."""
    return None if snapshot is None else max(0.0, (now_ns - snapshot.time_ns) / 1e9)


def _risk_seconds(roots: Sequence[RootStatus], without_roots: float | None) -> float | None:
    """Of the root that is longest without a snapshot: another one's must not hide it."""
    if not roots:
        return without_roots
    ages = [root.seconds_since_last for root in roots if root.seconds_since_last is not None]
    return max(ages) if len(ages) == len(roots) else None
