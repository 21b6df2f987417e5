"""Scheduled snapshots: each tick takes one of all roots that have none on its way.

Guarantees: a tick is answered by one snapshot at most; a snapshot that cannot be cut is an alert and is tried
again (`retry`); a root whose last scheduled snapshot is on its way keeps no other root from its turn. Belongs
to the trio thread. Leaves to schedule.py when a tick comes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

import structlog
import trio

from ciuic.daemon.base.alerts import Alerts
from ciuic.daemon.base.repository_store import Store
from ciuic.daemon.roots.supervisor import RootSupervisor
from ciuic.daemon.snapshots.pending import PendingSnapshot
from ciuic.errors import CiuicError
from ciuic.protocol.control_types import SnapshotRequest

log = structlog.get_logger(__name__)


class ScheduledSnapshots:
    """Answers the schedule's ticks. `run` is its task."""

    def __init__(
        self,
        ticks: trio.MemoryReceiveChannel[None],
        take: Callable[[SnapshotRequest], Awaitable[PendingSnapshot]],
        roots: Callable[[], Mapping[str, RootSupervisor]],
        under_way: Callable[[], Collection[str]],
        alerts: Alerts,
    ) -> None:
        """Prepare to answer ticks.

        Args:
            ticks: channel with one item for each snapshot that is due.
            take: cuts a snapshot.
            roots: supervisors of the roots, by path.
            under_way: returns the roots with a scheduled snapshot that is not captured yet.
            alerts: where failures are reported.
        """
        self.retry = False
        """The last snapshot failed; housekeeping asks for another one soon."""
        self._ticks = ticks
        self._take = take
        self._roots = roots
        self._under_way = under_way
        self._alerts = alerts

    async def run(self) -> None:
        """Answer ticks until the schedule ends."""
        async for _ in self._ticks:
            await self._tick()

    async def _tick(self) -> None:
        roots = self._roots()
        behind = set(self._under_way()) & roots.keys()
        if behind:
            self._tell_behind(behind)
        due = [path for path, root in roots.items() if path not in behind and root.worker is not None]
        if not roots or (behind and not due):
            return
        try:
            # A request without roots is for all of them, and its snapshot says which are not mounted.
            await self._take(SnapshotRequest(roots=due if behind else []))
        except CiuicError as error:
            log.error("scheduled_snapshot_failed", error=str(error))
            self._alerts.report("schedule", f"the scheduled snapshot failed: {error}", hint=error.hint)
            self.retry = True
        except Exception as error:
            # A defect in one snapshot must not end the service that takes the next one. A lack of descriptors
            # or memory comes here too, and passes.
            log.exception("scheduled_snapshot_failed")
            self._alerts.report("schedule", f"the scheduled snapshot failed by a defect: {error!r}")
            self.retry = True
        else:
            self._alerts.clear("schedule")
            if not behind:
                self._alerts.clear("behind")

    def _tell_behind(self, paths: Collection[str]) -> None:
        log.warning("scheduled_snapshot_skipped", roots=sorted(paths))
        self._alerts.report(
            "behind",
            f"a scheduled snapshot of {', '.join(sorted(paths))} was skipped: the one before it is not captured yet",
            hint="choose a longer interval, or look at what slows the store down",
            severity="warning",
        )


def last_cut_ns(store: Store, roots: Iterable[str]) -> int | None:
    """Return the cut of the newest snapshot of the root that is longest without one. Blocks.

    Return None where a root has no snapshot, or the repository cannot be read: the schedule begins at once
    then.
    """
    try:
        latest = store.latest_of(roots)
    except CiuicError as error:
        log.error("store_unreadable", error=str(error))
        return None
    found = [info.time_ns for info in latest.values() if info is not None]
    return min(found) if found and len(found) == len(latest) else None
