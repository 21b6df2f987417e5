"""Assembly of the status document from the parts of the daemon."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import structlog
import trio

import ciuic
from ciuic.daemon.base.alerts import Alerts
from ciuic.daemon.base.repository_store import LastSnapshot, Store, summary
from ciuic.daemon.base.settings import Settings
from ciuic.daemon.served_roots import ServedRoots
from ciuic.daemon.snapshots.requests import Snapshots
from ciuic.daemon.snapshots.schedule import FirstSnapshots, Schedule
from ciuic.daemon.snapshots.space import SpaceWatch
from ciuic.daemon.trainers.watch import TrainerWatch
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

SHOWN_INCIDENTS = 20
log = structlog.get_logger(__name__)


class StatusSource(Protocol):
    """The parts of the daemon that its status document is made from."""

    @property
    def settings(self) -> Settings: ...
    @property
    def store(self) -> Store: ...
    @property
    def space(self) -> SpaceWatch: ...
    @property
    def roots(self) -> ServedRoots: ...
    @property
    def snapshots(self) -> Snapshots: ...
    @property
    def first_snapshots(self) -> FirstSnapshots: ...
    @property
    def schedule(self) -> Schedule: ...
    @property
    def alerts(self) -> Alerts: ...
    @property
    def watch(self) -> TrainerWatch: ...
    @property
    def started_ns(self) -> int: ...
    @property
    def slice(self) -> str: ...
    @property
    def stopping(self) -> bool: ...
    def now_ns(self) -> int: ...


async def status_document(daemon: StatusSource) -> StatusDocument:
    """Return the status document.

    All workers and the store are asked at once; one that does not answer is shown as such.
    """
    supervisors = dict(daemon.roots.supervisors)
    # The control socket answers before the daemon has looked at its roots, and a root that is missing here
    # would look unprotected.
    roots = {
        root.path: RootStatus(path=root.path, driver=root.driver, state="starting")
        for root in daemon.settings.roots
        if root.path not in supervisors
    }
    protected = [*supervisors, *roots]
    supervisors = {**daemon.roots.departing, **supervisors}
    paths = list(dict.fromkeys([*protected, *supervisors]))

    async def ask(path: str) -> None:
        roots[path] = await supervisors[path].status()

    async with trio.open_nursery() as nursery:
        for path in supervisors:
            nursery.start_soon(ask, path)
        now_ns = daemon.now_ns()
        remotes = daemon.settings.remotes
        facts = await trio.to_thread.run_sync(_ask_store, daemon.store, daemon.space, paths, remotes, now_ns)
    now_ns = daemon.now_ns()
    due = daemon.schedule.next_due()
    next_snapshot = due.astimezone().isoformat(timespec="seconds") if due is not None else None
    for path, root in roots.items():
        newest = facts.by_root[path]
        root.last_snapshot = summary(newest) if newest is not None else None
        root.seconds_since_last = _age_seconds(newest, now_ns)
        if path in protected:
            root.next_snapshot = rfc3339(now_ns) if path in daemon.first_snapshots.waiting else next_snapshot
    return StatusDocument(
        version=ciuic.__version__,
        pid=os.getpid(),
        since=rfc3339(daemon.started_ns),
        now=rfc3339(now_ns),
        roots=[roots[path] for path in paths],
        repository=facts.repository,
        remotes=facts.remotes,
        last_snapshot=summary(facts.newest) if facts.newest is not None else None,
        next_snapshot=next_snapshot,
        seconds_since_last=_risk_seconds(
            [roots[path] for path in protected], _age_seconds(facts.newest, now_ns)
        ),
        interval_seconds=daemon.settings.interval_seconds,
        undo_limit_bytes=daemon.settings.undo_limit_bytes,
        captures=daemon.snapshots.unfinished(),
        beside=_beside(daemon),
        alerts=daemon.alerts.standing(),
        trainers=daemon.watch.statuses(),
        incidents=daemon.watch.incidents()[:SHOWN_INCIDENTS],
        stopping=daemon.stopping,
        config_path=daemon.settings.config_path,
    )


def _beside(daemon: StatusSource) -> BesideStatus:
    settings = daemon.settings
    return BesideStatus(
        io_priority=settings.io_priority,
        slice=daemon.slice,
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
