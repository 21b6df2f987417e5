"""Tests of when a snapshot is due, and that being late costs one snapshot, not many."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from ciuic.daemon.base.alerts import Alerts
from ciuic.daemon.base.clock import ClockWatch
from ciuic.daemon.base.events import EventBus
from ciuic.daemon.housekeeping import DaemonHousekeeping
from ciuic.daemon.snapshots.schedule import Schedule, first_due

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)
HOUR = timedelta(hours=1)


@pytest.mark.parametrize(
    ("last", "due"),
    [
        (None, NOW),
        (NOW - 5 * HOUR, NOW),
        (NOW - HOUR, NOW),
        (NOW - HOUR / 2, NOW + HOUR / 2),
        (NOW, NOW + HOUR),
        (NOW + 9 * HOUR, NOW),
    ],
)
def test_the_first_snapshot(last: datetime | None, due: datetime) -> None:
    """The first snapshot is due one interval after the last, and not later when the clock was put back."""
    assert first_due(NOW, last, HOUR) == due


@given(st.integers(-(10**6), 10**6))
def test_never_later_than_an_interval_from_now(seconds: int) -> None:
    """The next snapshot is due within an interval and not in the past, whatever time the last cut has."""
    assert NOW <= first_due(NOW, NOW + timedelta(seconds=seconds), HOUR) <= NOW + HOUR


def test_a_late_daemon_ticks_once_at_once() -> None:
    """A downtime of many intervals is made up for by one tick, not one for each."""

    async def main() -> None:
        schedule = Schedule(3600)
        schedule.start(1)
        with trio.fail_after(10):
            await schedule.ticks.receive()
        due = schedule.next_due()
        assert due is not None
        assert 3500 < (due - datetime.now(timezone.utc)).total_seconds() <= 3600
        with pytest.raises(trio.WouldBlock):
            schedule.ticks.receive_nowait()
        schedule.stop()
        assert schedule.next_due() is None

    trio.run(main)


def test_ticks_come_by_themselves_and_end_with_the_schedule() -> None:
    """The scheduler's thread delivers ticks to the event loop, and the iteration ends after stop."""

    async def main() -> None:
        schedule = Schedule(1)
        schedule.start(None)
        with trio.fail_after(20):
            for _ in range(2):
                await schedule.ticks.receive()
            schedule.stop()
            assert [tick async for tick in schedule.ticks] in ([], [None])

    trio.run(main)


def test_unanswered_ticks_do_not_pile_up() -> None:
    """A busy service finds one waiting tick, however many were due."""

    async def main() -> None:
        schedule = Schedule(3600)
        for _ in range(5):
            schedule.post()
        schedule.ticks.receive_nowait()
        with pytest.raises(trio.WouldBlock):
            schedule.ticks.receive_nowait()

    trio.run(main)


def test_a_changed_interval_is_in_force_at_once() -> None:
    """A changed interval applies at once: the next snapshot is one new interval away."""

    async def main() -> None:
        schedule = Schedule(3600)
        schedule.start(None)
        schedule.change_interval(60)
        due = schedule.next_due()
        assert due is not None
        assert 50 < (due - datetime.now(timezone.utc)).total_seconds() <= 60
        schedule.stop()

    trio.run(main)


def _running(offset: list[timedelta]) -> Schedule:
    schedule = Schedule(3600, now=lambda: datetime.now(timezone.utc) + offset[0])
    schedule.start(int(datetime.now(timezone.utc).timestamp() * 1e9))
    return schedule


def test_a_clock_put_back_does_not_stop_the_snapshots() -> None:
    """The next snapshot after a clock is put back by a day is due at once, the following in an interval."""

    async def main() -> None:
        offset = [timedelta()]
        schedule = _running(offset)
        schedule.heed_clock()
        with pytest.raises(trio.WouldBlock):
            schedule.ticks.receive_nowait()
        offset[0] = timedelta(days=-1)
        schedule.heed_clock()
        schedule.ticks.receive_nowait()
        due = schedule.next_due()
        assert due is not None
        # The scheduler's own clock was not put back here: it counts from the interval's grid.
        assert due <= datetime.now(timezone.utc) + HOUR
        schedule.stop()

    trio.run(main)


def test_a_clock_put_forward_wakes_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock put forward wakes the scheduler for snapshots that are due by the new time."""

    async def main() -> None:
        offset = [timedelta()]
        schedule = _running(offset)
        woken: list[bool] = []
        monkeypatch.setattr(schedule._scheduler, "wakeup", lambda: woken.append(True))
        schedule.heed_clock()
        assert woken == []
        offset[0] = timedelta(days=2)
        schedule.heed_clock()
        assert woken == [True]
        schedule.stop()

    trio.run(main)


@pytest.mark.parametrize(
    ("wall_seconds", "boot_seconds", "moved"),
    [(30, 30, 0), (86_400, 86_400, 0), (55, 30, 0), (86_430, 30, 86_400), (-86_370, 30, -86_400)],
)
def test_clock_that_is_set_differs_from_time_that_passed(
    wall_seconds: int, boot_seconds: int, moved: float
) -> None:
    """A clock that is set is logged once with the amount, unlike suspended time and slewing."""
    now, boot = [10**18], [10**12]
    watch = ClockWatch(lambda: now[0], lambda: boot[0])
    assert watch.moved_seconds() == 0
    now[0] += wall_seconds * 10**9
    boot[0] += boot_seconds * 10**9
    assert watch.moved_seconds() == moved
    assert watch.moved_seconds() == 0


def test_a_clock_that_was_set_is_an_alert() -> None:
    """Status shows by how much and when the clock was set, and the schedule uses the new time."""
    moments = [10**18]
    alerts = Alerts(EventBus(lambda: moments[0]), lambda: moments[0])
    heeded: list[bool] = []
    daemon: Any = SimpleNamespace(
        now_ns=lambda: moments[0],
        alerts=alerts,
        schedule=SimpleNamespace(heed_clock=lambda: heeded.append(True)),
    )
    housekeeping = DaemonHousekeeping(daemon)
    housekeeping._look_at_clock()
    assert "clock" not in alerts
    moments[0] -= 7200 * 10**9
    housekeeping._look_at_clock()
    (alert,) = alerts.standing()
    assert (alert.key, alert.message) == ("clock", "the clock was put back by 2h00m")
    assert heeded == [True, True]
