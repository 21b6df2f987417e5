"""Snapshots that nobody asks for: when one is due, and taking it; the first one of each root.

APScheduler decides when a snapshot is due; its jobs only post to a bounded trio channel. Each tick takes one of
all roots that have none on its way. The first snapshot of a root is taken as soon as the root is protected:
everything in it is at risk until then.

Guarantees:

* Due times that were missed while the machine slept or the daemon was down are made up for by one snapshot in
  all. A tick is dropped while the one before is unanswered (the channel holds one), and answered by one snapshot
  at most. The scheduler's thread runs no code of ours that could fail or wait.
* A snapshot that cannot be cut is an alert and is tried again (`retry`). A root whose last scheduled snapshot is
  on its way keeps no other root from its turn.
* Every root that was reported by `FirstSnapshots.wanted` gets a snapshot when it is mounted, whatever the
  schedule says. Roots that were protected while no daemon ran are left to the schedule, whose first tick comes at
  once where a root has no snapshot.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from datetime import datetime, timedelta, timezone

import structlog
import trio
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.interval import IntervalTrigger

from ciuic.daemon.base.events import Alerts, Wakeup
from ciuic.daemon.base.repository_store import Store
from ciuic.daemon.roots.supervisor import RootSupervisor
from ciuic.daemon.snapshots.pending import PendingSnapshot
from ciuic.errors import CiuicError
from ciuic.protocol.control_types import SnapshotRequest

_JOB = "snapshot"
# Smallest step back that counts as setting the clock; less is clock discipline (NTP).
_STEP = timedelta(minutes=1)
_MESSAGE = "the first snapshot of "
log = structlog.get_logger(__name__)


def first_due(now: datetime, last_cut: datetime | None, interval: timedelta) -> datetime:
    """Return when the first snapshot of this daemon is due.

    It is due one interval after the last one, and at once if that has passed.

    A last cut in the future (the clock was put back) is not waited for.
    """
    if last_cut is None or last_cut > now:
        return now
    return max(now, last_cut + interval)


class Schedule:
    """Ticks, one for each interval. Call `start` and `stop` in the trio thread."""

    def __init__(
        self, interval_seconds: int, *, now: Callable[[], datetime] = lambda: datetime.now(timezone.utc)
    ):
        self._interval = timedelta(seconds=interval_seconds)
        self._now = now
        self._scheduler = BackgroundScheduler(timezone=timezone.utc, daemon=True)
        # Channel with one item for each snapshot that is due.
        # Room for one tick: a further one would only repeat it.
        self._send, self.ticks = trio.open_memory_channel[None](1)

    def start(self, last_cut_ns: int | None) -> None:
        """Begin to tick.

        Args:
            last_cut_ns: wall clock of the newest committed snapshot's cut; None where there is none.
        """
        token = trio.lowlevel.current_trio_token()
        last = datetime.fromtimestamp(last_cut_ns / 1e9, timezone.utc) if last_cut_ns else None
        due = first_due(self._now(), last, self._interval)

        def tick() -> None:
            # In the scheduler's thread, from which a trio channel must not be used directly.
            try:
                token.run_sync_soon(self.post)
            except trio.RunFinishedError:
                log.debug("tick_after_the_end")

        # misfire_grace_time=None: the job runs however late it is. coalesce: it runs once for all times that
        # were missed.
        self._scheduler.add_job(
            tick,
            IntervalTrigger(
                seconds=int(self._interval.total_seconds()), start_date=due, timezone=timezone.utc
            ),
            id=_JOB,
            coalesce=True,
            misfire_grace_time=None,
            max_instances=1,
        )
        self._scheduler.start()
        if due <= self._now():
            # The trigger's first time may already lie a moment in the past; the trigger would then wait a
            # whole interval.
            self.post()
        log.info(
            "schedule_started", interval_seconds=int(self._interval.total_seconds()), first=due.isoformat()
        )

    def post(self) -> None:
        """Tick now; dropped while the last tick still waits."""
        try:
            self._send.send_nowait(None)
        except (trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError):
            log.debug("tick_dropped")

    def change_interval(self, interval_seconds: int) -> None:
        """Change the interval. The next tick comes one new interval from now."""
        self._interval = timedelta(seconds=interval_seconds)
        self._scheduler.reschedule_job(
            _JOB,
            trigger=IntervalTrigger(
                seconds=interval_seconds, start_date=self._now() + self._interval, timezone=timezone.utc
            ),
        )

    def heed_clock(self) -> None:
        """Correct the schedule after the clock was set. Call it every half minute or so.

        With the clock put back by a day, the next due time would be a day and an interval away. With the
        clock put forward, the due time has passed while the scheduler's thread still sleeps for the time that
        once seemed to be left.
        """
        due = self.next_due()
        if due is None:
            return
        now = self._now()
        if due > now + self._interval + min(self._interval, _STEP):
            log.warning("clock_put_back", due=due.isoformat(), now=now.isoformat())
            self.change_interval(int(self._interval.total_seconds()))
            # The age of the last snapshot is no longer known, so the next one is due now.
            self.post()
        elif due < now:
            self._scheduler.wakeup()

    def next_due(self) -> datetime | None:
        """Return the time of the next tick; None before the start and after the end."""
        if not self._scheduler.running:
            return None
        job = self._scheduler.get_job(_JOB)
        return job.next_run_time if job is not None else None

    def stop(self) -> None:
        """End the ticks."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)
        self._send.close()


class ScheduledSnapshots:
    """Answers the schedule's ticks. `run` is its task; belongs to the trio thread."""

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


class FirstSnapshots:
    """Takes first snapshots. `run` is its task; belongs to the trio thread."""

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
        self._wakeup = Wakeup()

    def wanted(self, path: str) -> None:
        """Ask for the first snapshot of a root that was protected just now."""
        self.waiting.add(path)
        self.retry()

    def retry(self) -> None:
        """Try again: a root was mounted, or time has passed since the last attempt."""
        if self.waiting:
            self._wakeup.set()

    async def run(self) -> None:
        """Take first snapshots, until cancelled."""
        while True:
            await self._wakeup.wait()
            self.waiting &= self._roots().keys()  # some may not be protected any more
            ready = [path for path in sorted(self.waiting) if self._roots()[path].worker is not None]
            if ready:
                await self._take_first(ready)

    async def _take_first(self, paths: list[str]) -> None:
        try:
            pending = await self._take(SnapshotRequest(roots=paths, message=_MESSAGE + ", ".join(paths)))
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
