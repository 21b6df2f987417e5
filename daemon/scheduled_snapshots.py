"""What the schedule's ticks lead to: a snapshot of all roots, without those that still wait for the one before.

Guarantees: a tick is answered by one snapshot at most; one that cannot be cut is an alert and is wanted again (``retry``); a root whose last
scheduled snapshot is under way keeps no other root from its turn. Belongs to the trio thread. Leaves when a tick comes to schedule.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping

import structlog
import trio

from ciuic.control_types import SnapshotRequest
from ciuic.daemon.alerts import Alerts
from ciuic.daemon.pending import PendingSnapshot
from ciuic.daemon.supervisor import RootSupervisor
from ciuic.errors import CiuicError

log = structlog.get_logger(__name__)


class ScheduledSnapshots:
    """``run`` is its task."""

    def __init__(
        self,
        ticks: trio.MemoryReceiveChannel[None],
        take: Callable[[SnapshotRequest], Awaitable[PendingSnapshot]],
        roots: Callable[[], Mapping[str, RootSupervisor]],
        under_way: Callable[[], Collection[str]],
        alerts: Alerts,
    ) -> None:
        """``under_way``: roots of which a scheduled snapshot is not captured yet."""
        self.retry = False
        """The last one failed: housekeeping asks for another one soon."""
        self._ticks = ticks
        self._take = take
        self._roots = roots
        self._under_way = under_way
        self._alerts = alerts

    async def run(self) -> None:
        """Until the schedule ends."""
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
            # Without names it is all of them, and says which are not mounted.
            await self._take(SnapshotRequest(roots=due if behind else []))
        except CiuicError as error:
            log.error("scheduled_snapshot_failed", error=str(error))
            self._alerts.report("schedule", f"the scheduled snapshot failed: {error}", hint=error.hint)
            self.retry = True
        except Exception as error:
            # A defect in one snapshot must not end the service that takes the next one.
            log.exception("scheduled_snapshot_failed")
            self._alerts.report("schedule", f"the scheduled snapshot failed by a defect: {error!r}")
            self.retry = True  # out of descriptors or memory is no defect, and passes
        else:
            self._alerts.clear("schedule")
            if not behind:
                self._alerts.clear("behind")

    def _tell_behind(self, paths: Collection[str]) -> None:
        log.warning("scheduled_snapshot_skipped", roots=sorted(paths))
        self._alerts.report(
            "behind",
            f"a scheduled snapshot of {', '.join(sorted(paths))} was left out: the one before it is not captured yet",
            hint="choose a longer interval, or look at what slows the store down",
            severity="warning",
        )
