"""First snapshot of a root, taken as soon as the root is protected: everything in it is at risk until then.

Guarantees: every root that was reported by `wanted` gets a snapshot when it is mounted, whatever the schedule
says; a failed attempt is repeated at every `retry`. Belongs to the trio thread. Leaves roots that were
protected while no daemon ran to the schedule, whose first tick comes at once where a root has no snapshot.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import structlog
import trio

from ciuic.daemon.base.alerts import Alerts
from ciuic.daemon.roots.supervisor import RootSupervisor
from ciuic.daemon.snapshots.pending import PendingSnapshot
from ciuic.errors import CiuicError
from ciuic.protocol.control_types import SnapshotRequest

MESSAGE = "the first snapshot of "
log = structlog.get_logger(__name__)


class FirstSnapshots:
    """Takes first snapshots. `run` is its task."""

    def __init__(
        self,
        take: Callable[[SnapshotRequest], Awaitable[PendingSnapshot]],
        roots: Callable[[], Mapping[str, RootSupervisor]],
        alerts: Alerts,
    ) -> None:
        self.waiting: set[str] = set()
        """Roots whose first snapshot was not cut yet."""
        self._take = take
        self._roots = roots
        self._alerts = alerts
        self._wake = trio.Event()

    def wanted(self, path: str) -> None:
        """Ask for the first snapshot of a root that was protected just now."""
        self.waiting.add(path)
        self.retry()

    def retry(self) -> None:
        """Try again: a root was mounted, or time has passed since the last attempt."""
        if self.waiting:
            self._wake.set()

    async def run(self) -> None:
        """Take first snapshots, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            self.waiting &= self._roots().keys()  # some may not be protected any more
            ready = [path for path in sorted(self.waiting) if self._roots()[path].worker is not None]
            if ready:
                await self._take_first(ready)

    async def _take_first(self, paths: list[str]) -> None:
        try:
            pending = await self._take(SnapshotRequest(roots=paths, message=MESSAGE + ", ".join(paths)))
        except CiuicError as error:
            log.error("first_snapshot_failed", roots=paths, error=str(error))
            self._alerts.report(
                "schedule", f"the first snapshot of {', '.join(paths)} failed: {error}", hint=error.hint
            )
        except Exception as error:  # a defect in one snapshot must not end the task
            log.exception("first_snapshot_failed", roots=paths)
            self._alerts.report(
                "schedule", f"the first snapshot of {', '.join(paths)} failed by a defect: {error!r}"
            )
        else:
            self.waiting -= set(pending.state.roots)
            self._alerts.clear("schedule")
