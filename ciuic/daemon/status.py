"""Assembly of the status document from the parts of the daemon."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import structlog
import trio

import ciuic
from ciuic.daemon.base.repository_store import LastSnapshot, Store, summary
from ciuic.daemon.parts import DaemonParts
from ciuic.daemon.snapshots.space import SpaceWatch
from ciuic.errors import CiuicError
from ciuic.protocol.control_types import (
    BesideStatus,
    RemoteStatus,
    RepositoryStatus,
    RootStatus,
    StatusDocument,
    rfc3339,
)
from ciuic.system.io_throttle import audible, waits_files

_SHOWN_INCIDENTS = 20
log = structlog.get_logger(__name__)


async def status_document(parts: DaemonParts) -> StatusDocument:
    """Return the status document.

    All workers and the store are asked at once; one that does not answer is shown as such.
    """
    supervisors = dict(parts.roots.supervisors)
    # The control socket answers before the daemon has looked at its roots, and a root that is missing here
    # would look unprotected.
    roots = {
        root.path: RootStatus(path=root.path, driver=root.driver, state="starting")
        for root in parts.settings.roots
        if root.path not in supervisors
    }
    protected = [*supervisors, *roots]
    supervisors = {**parts.roots.departing, **supervisors}
    paths = list(dict.fromkeys([*protected, *supervisors]))

    async def ask(path: str) -> None:
        roots[path] = await supervisors[path].status()

    async with trio.open_nursery() as nursery:
        for path in supervisors:
            nursery.start_soon(ask, path)
        now_ns = parts.now_ns()
        remotes = parts.settings.remotes
        facts = await trio.to_thread.run_sync(_ask_store, parts.store, parts.space, paths, remotes, now_ns)
    now_ns = parts.now_ns()
    due = parts.schedule.next_due()
    next_snapshot = due.astimezone().isoformat(timespec="seconds") if due is not None else None
    for path, root in roots.items():
        newest = facts.by_root[path]
        root.last_snapshot = summary(newest) if newest is not None else None
        root.seconds_since_last = _age_seconds(newest, now_ns)
        if path in protected:
            root.next_snapshot = rfc3339(now_ns) if path in parts.first_snapshots.waiting else next_snapshot
    return StatusDocument(
        version=ciuic.__version__,
        pid=os.getpid(),
        since=rfc3339(parts.started_ns),
        now=rfc3339(now_ns),
        roots=[roots[path] for path in paths],
        repository=facts.repository,
        remotes=facts.remotes,
        last_snapshot=summary(facts.newest) if facts.newest is not None else None,
        next_snapshot=next_snapshot,
        seconds_since_last=_risk_seconds(
            [roots[path] for path in protected], _age_seconds(facts.newest, now_ns)
        ),
        interval_seconds=parts.settings.interval_seconds,
        undo_limit_bytes=parts.settings.undo_limit_bytes,
        captures=parts.snapshots.unfinished(),
        beside=_beside(parts),
        alerts=parts.alerts.standing(),
        trainers=parts.watch.statuses(),
        incidents=parts.watch.incidents()[:_SHOWN_INCIDENTS],
        stopping=parts.stopping,
        config_path=parts.settings.config_path,
    )


def _beside(parts: DaemonParts) -> BesideStatus:
    settings = parts.settings
    return BesideStatus(
        io_priority=settings.io_priority,
        slice=parts.slice,
        min_share=settings.min_share,
        finish_within_seconds=settings.finish_within_seconds,
        hears=audible(waits_files(str(settings.runtime_dir))),
    )


class _StoreFacts(NamedTuple):
    """The part of the status that the repository knows."""

    repository: RepositoryStatus
    newest: LastSnapshot | None
    by_root: Mapping[str, LastSnapshot | None]
    remotes: list[RemoteStatus]


def _ask_store(
    store: Store, space: SpaceWatch, roots: Sequence[str], remotes: Sequence[str], now_ns: int
) -> _StoreFacts:
    # Every root has an entry, also where the repository cannot be read.
    by_root: dict[str, LastSnapshot | None] = dict.fromkeys(roots)
    lags: list[RemoteStatus] = []
    try:
        newest = store.latest() if store.path is not None else None
        by_root = store.latest_of(roots)
        lags = store.remotes(remotes, now_ns=now_ns)
    except CiuicError as error:
        log.warning("store_unreadable", error=str(error))
        newest = None
    return _StoreFacts(space.measure(), newest, by_root, lags)


def _age_seconds(snapshot: LastSnapshot | None, now_ns: int) -> float | None:
    """Return the age of a snapshot; 0 for a cut in the future (the clock was put back)."""
    return None if snapshot is None else max(0.0, (now_ns - snapshot.time_ns) / 1e9)


def _risk_seconds(roots: Sequence[RootStatus], without_roots: float | None) -> float | None:
    """Return the age of the newest snapshot of the root that is longest without one."""
    if not roots:
        return without_roots
    ages = [root.seconds_since_last for root in roots if root.seconds_since_last is not None]
    return max(ages) if len(ages) == len(roots) else None
