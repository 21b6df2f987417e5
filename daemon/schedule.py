"""When the next snapshot is due. APScheduler decides; its jobs do nothing but post to a bounded trio channel.

Guarantees: a due time that was missed while the machine slept or the daemon was down is made up for by one snapshot, not
by one for each; a tick that finds the last one unanswered is dropped (the channel holds one). Leaves taking the snapshot
to the service. The scheduler's thread never runs code of ours that could fail or wait.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone

import structlog
import trio
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.interval import IntervalTrigger

_JOB = "snapshot"
_STEP = timedelta(minutes=1)
"""A clock put back by less is being disciplined, not set."""
log = structlog.get_logger(__name__)


def first_due(now: datetime, last_cut: datetime | None, interval: timedelta) -> datetime:
    """When the first snapshot of this daemon is due: one interval after the last one, at once if that has passed.

    A last cut in the future (a clock that was put back) is not waited for.
    """
    if last_cut is None or last_cut > now:
        return now
    return max(now, last_cut + interval)


class Schedule:
    """Ticks of the interval. ``start`` and ``stop`` in the trio thread."""

    def __init__(
        self, interval_seconds: int, *, now: Callable[[], datetime] = lambda: datetime.now(timezone.utc)
    ):
        self._interval = timedelta(seconds=interval_seconds)
        self._now = now
        self._scheduler = BackgroundScheduler(timezone=timezone.utc, daemon=True)
        self._send, self.ticks = trio.open_memory_channel[None](1)
        """``ticks``: receive one for each snapshot that is due."""

    def start(self, last_cut_ns: int | None) -> None:
        """Begins to tick; ``last_cut_ns`` is the wall clock of the newest committed snapshot's cut."""
        token = trio.lowlevel.current_trio_token()
        last = datetime.fromtimestamp(last_cut_ns / 1e9, timezone.utc) if last_cut_ns else None
        due = first_due(self._now(), last, self._interval)

        def tick() -> None:
            try:
                token.run_sync_soon(self.post)
            except trio.RunFinishedError:
                log.debug("tick_after_the_end")

        # misfire_grace_time None: however late, it runs; coalesce: and once, for all that were missed.
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
            # The trigger's first time may already lie a moment in the past, and then it would wait a whole interval.
            self.post()
        log.info(
            "schedule_started", interval_seconds=int(self._interval.total_seconds()), first=due.isoformat()
        )

    def post(self) -> None:
        """One tick now; dropped if the last one still waits."""
        try:
            self._send.send_nowait(None)
        except (trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError):
            log.debug("tick_dropped")

    def change_interval(self, interval_seconds: int) -> None:
        """From now on every ``interval_seconds``."""
        self._interval = timedelta(seconds=interval_seconds)
        self._scheduler.reschedule_job(
            _JOB,
            trigger=IntervalTrigger(
                seconds=interval_seconds, start_date=self._now() + self._interval, timezone=timezone.utc
            ),
        )

    def heed_clock(self) -> None:
        """Puts right what setting the clock does to a schedule; to be called now and then.

        Put back by a day, the next due time would be a day and an interval away. Put forward, it has passed while the
        scheduler's thread still sleeps for as long as it once seemed to be away.
        """
        due = self.next_due()
        if due is None:
            return
        now = self._now()
        if due > now + self._interval + min(self._interval, _STEP):
            log.warning("clock_put_back", due=due.isoformat(), now=now.isoformat())
            self.change_interval(int(self._interval.total_seconds()))
            self.post()  # how long ago the last one was can no longer be told
        elif due < now:
            self._scheduler.wakeup()

    def next_due(self) -> datetime | None:
        """The next tick; None before the start and after the end."""
        if not self._scheduler.running:
            return None
        job = self._scheduler.get_job(_JOB)
        return job.next_run_time if job is not None else None

    def stop(self) -> None:
        """No more ticks."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)
        self._send.close()
