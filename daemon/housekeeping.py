"""What is looked at every half minute, whether or not anything happened.

Guarantees: an epoch that a worker was not told about is settled; an epoch that a worker gave up, a store short of space,
a clock that was set and processes that go round the overlay are alerts; `systemctl status` shows one true line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
import trio

from ciuic.control_types import rfc3339
from ciuic.daemon.alerts import KEY_MISSING
from ciuic.daemon.clock import ClockWatch
from ciuic.errors import CiuicError
from ciuic.units import human_duration, human_size, plural

if TYPE_CHECKING:
    from ciuic.daemon.service import Daemon
    from ciuic.daemon.worker_process import Worker

PERIOD_SECONDS = 30.0
LOW_SPACE_BYTES = 1 << 30
"""Without a configured floor: below this even the smallest checkpoint may not fit."""
LOW_SPACE_SHARE = 0.05
"""A file system of less than 20 GiB is not short of space as long as it has this."""
log = structlog.get_logger(__name__)


class Housekeeping:
    """One task of the daemon."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._clock = ClockWatch(daemon.now_ns)

    async def run(self) -> None:
        """For ever."""
        while True:
            await trio.sleep(PERIOD_SECONDS)
            try:
                await self.once()
            except Exception:
                log.exception("housekeeping_failed")  # the next round may do better; the service goes on

    async def once(self) -> None:
        """One round."""
        for path, supervisor in list(self._daemon.roots.supervisors.items()):
            worker = supervisor.worker
            if worker is not None:
                await self._look_at_worker(path, worker)
                await self._daemon.snapshots.reconcile(path, worker)
                await supervisor.refresh_bypassing()
        self._daemon.snapshots.capturing.trust.note()
        self._look_at_clock()
        if self._daemon.scheduled.retry:
            self._daemon.scheduled.retry = False
            self._daemon.schedule.post()
        self._daemon.first_snapshots.look()
        await self._look_at_space()
        self._daemon.tell_service_manager(self.status_line())

    async def _look_at_worker(self, path: str, worker: Worker) -> None:
        key = f"abandoned:{path}"
        try:
            status = await worker.ask(lambda client: client.status())
        except CiuicError as error:
            log.warning("worker_not_asked", root=path, error=str(error))
            self._daemon.alerts.report(
                f"silent:{path}",
                f"the overlay worker of {path} (pid {worker.pid}) does not answer",
                hint="a disk below the root may hang; a worker that hangs itself is replaced where its session outlives it",
                root=path,
            )
            return
        self._daemon.alerts.clear(f"silent:{path}")
        # One that a later commit has overtaken is history: its changes are in that snapshot.
        standing = [one for one in status.abandoned if one.epoch > status.since]
        if not standing:
            self._daemon.alerts.clear(key)
            return
        newest = standing[-1]
        when = f" at {rfc3339(newest.time_ns)}" if newest.time_ns else ""
        self._daemon.alerts.report(
            key,
            f"{path}: the snapshot of epoch {newest.epoch} was given up{when}: {newest.reason}",
            hint="its changes will be in the next snapshot; raise [capture] undo_limit if this repeats",
            root=path,
            severity="warning",
        )

    def _look_at_clock(self) -> None:
        moved_seconds = self._clock.moved_seconds()
        if moved_seconds:
            way = "forward" if moved_seconds > 0 else "back"
            log.warning("clock_set", moved_seconds=round(moved_seconds))
            self._daemon.alerts.report(
                "clock",
                f"the clock was put {way} by {human_duration(abs(moved_seconds))}",
                hint="times of snapshots may be wrong; none is removed for it (docs/configuration.md, keep_within)",
                severity="warning",
            )
        self._daemon.schedule.heed_clock()

    async def _look_at_space(self) -> None:
        settings, alerts = self._daemon.settings, self._daemon.alerts
        if settings.repository is None:
            return
        facts = await trio.to_thread.run_sync(self._daemon.space.look)
        if facts.missing:
            alerts.report(KEY_MISSING, f"no snapshot can be taken: {facts.missing}", hint=facts.missing_hint)
        elif facts.exists:
            alerts.clear(KEY_MISSING)
        if settings.min_free is not None:
            floor = settings.min_free.floor_bytes(facts.total_bytes)
        else:
            floor = min(LOW_SPACE_BYTES, int(LOW_SPACE_SHARE * facts.total_bytes))
        if facts.total_bytes and facts.free_bytes < floor:
            alerts.report(
                "space",
                f"the store's file system has {human_size(facts.free_bytes)} free, less than {human_size(floor)}",
                hint="shorten [retention], move the repository, or free space: ciuic prune",
            )
            self._daemon.upkeep.suggest()
        else:
            alerts.clear("space")

    def status_line(self) -> str:
        """One line for a person."""
        supervisors = self._daemon.roots.supervisors.values()
        mounted = sum(supervisor.state == "mounted" for supervisor in supervisors)
        parts = [f"{mounted} of {plural(len(supervisors), 'root')} protected"]
        last = self._daemon.snapshots.capturing.last_cut_ns
        if last:
            age_seconds = max(0.0, (self._daemon.now_ns() - last) / 1e9)
            parts.append(f"last snapshot {human_duration(age_seconds)} ago")
        alerts = len(self._daemon.alerts.standing())
        if alerts:
            parts.append(f"{plural(alerts, 'alert')}: ciuic status")
        return ", ".join(parts)
