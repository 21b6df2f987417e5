"""Schedule of snapshots. APScheduler decides when one is due; its jobs only post to a bounded trio channel.

Guarantees: due times that were missed while the machine slept or the daemon was down are made up for by one
snapshot in all; a tick is dropped while the one before is unanswered (the channel holds one). The scheduler's
thread runs no code of ours that could fail or wait. Leaves taking the snapshot to scheduled_snapshots.py.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone

import structlog
import trio
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.interval import IntervalTrigger

_JOB = "snapshot"
# Smallest step back that counts as setting the clock; less is clock discipline (NTP).
_STEP = timedelta(minutes=1)
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
