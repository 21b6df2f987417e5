"""The first snapshot of a root, taken as soon as it is protected: everything in it is at risk until then.

Guarantees: every root that was reported by ``wanted`` gets a snapshot when it is mounted, whatever the schedule says; one that cannot
be taken is tried again at every ``look``. Belongs to the trio thread. Leaves roots that were protected while no daemon ran to the
schedule, whose first tick comes at once where a root has no snapshot.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import structlog
import trio

from ciuic.control_types import SnapshotRequest
from ciuic.daemon.alerts import Alerts
from ciuic.daemon.pending import PendingSnapshot
from ciuic.daemon.supervisor import RootSupervisor
from ciuic.errors import CiuicError

MESSAGE = "the first snapshot of "
log = structlog.get_logger(__name__)


class FirstSnapshots:
    """``run`` is its task."""

    def __init__(
        self,
        take: Callable[[SnapshotRequest], Awaitable[PendingSnapshot]],
        roots: Callable[[], Mapping[str, RootSupervisor]],
        alerts: Alerts,
    ) -> None:
        self.waiting: set[str] = set()
        """Roots that have not had theirs cut."""
        self._take = take
        self._roots = roots
        self._alerts = alerts
        self._wake = trio.Event()

    def wanted(self, path: str) -> None:
        """The root was protected just now."""
        self.waiting.add(path)
        self.look()

    def look(self) -> None:
        """A root was mounted, or time has passed since the last attempt."""
        if self.waiting:
            self._wake.set()

    async def run(self) -> None:
        """For ever."""
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
