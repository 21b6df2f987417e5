"""Tests of when a snapshot is due, that being late costs one and not many, first snapshots, the age of roots."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from support.cli_repository import FIRST_NS, CliRepository
from support.fake_daemon import Bench, FakeOverlay

from ciuic.daemon.base.events import Alerts, EventBus
from ciuic.daemon.base.repository_store import Store
from ciuic.daemon.housekeeping import ClockWatch, DaemonHousekeeping
from ciuic.daemon.service import _risk_seconds
from ciuic.daemon.snapshots.pending import PendingSnapshot
from ciuic.daemon.snapshots.schedule import FirstSnapshots, Schedule, ScheduledSnapshots, first_due
from ciuic.errors import CiuicError
from ciuic.protocol.control_types import RootStatus, SnapshotRequest
from ciuic.types import SAFETY_MESSAGE, TAG_SAFETY

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


def _run(first: FirstSnapshots, script: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first.run)
            with trio.fail_after(20):
                await script()
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_root_gets_its_first_snapshot_when_it_is_mounted(tmp_path: Path) -> None:
    """A root gets its first snapshot once it is mounted, without other roots, and repeated on failure."""
    bench = Bench(tmp_path)
    bench.add_root("/a", FakeOverlay())
    requested_roots: list[list[str]] = []

    async def take(request: SnapshotRequest) -> PendingSnapshot:
        requested_roots.append(list(request.roots))
        if len(requested_roots) == 1:
            raise CiuicError("not now")
        return await bench.snapshots.take(request, scheduled=True)

    first = FirstSnapshots(take, lambda: bench.roots, bench.alerts)

    async def script() -> None:
        bench.add_root("/b", FakeOverlay())
        worker, bench.roots["/b"].worker = bench.roots["/b"].worker, None
        first.wanted("/b")
        await trio.testing.wait_all_tasks_blocked()
        assert requested_roots == []
        bench.roots["/b"].worker = worker
        first.retry()
        await trio.testing.wait_all_tasks_blocked()
        assert (requested_roots, first.waiting, "schedule" in bench.alerts) == ([["/b"]], {"/b"}, True)
        first.retry()
        while first.waiting:  # noqa: ASYNC110  it announces nothing
            await trio.sleep(0.01)
        assert (requested_roots, "schedule" in bench.alerts) == ([["/b"], ["/b"]], False)
        first.retry()
        first.wanted("/gone")
        await trio.testing.wait_all_tasks_blocked()
        assert (len(requested_roots), first.waiting) == (2, set())

    try:
        _run(first, script)
    finally:
        bench.close()


def test_the_root_that_is_longest_without_one_is_the_risk() -> None:
    """The risk is the age of the root longest without snapshot, where none counts as more than any age.

    Without roots it is the age of the newest snapshot.
    """
    ages = [RootStatus(path="/a", seconds_since_last=5.0), RootStatus(path="/b", seconds_since_last=9.0)]
    assert _risk_seconds(ages, 1.0) == 9.0
    assert _risk_seconds([*ages, RootStatus(path="/c")], 1.0) is None
    assert _risk_seconds([], 1.0) == 1.0


def test_the_store_knows_the_newest_of_each_root(tmp_path: Path) -> None:
    """The newest snapshot is known for each root, and a safety snapshot is never the newest of all."""
    repository = CliRepository(tmp_path / "repo", tmp_path / "a")
    store = Store(repository.path, block_bytes=4096)
    there = repository.snapshot({b"f": b"x"})
    safety = repository.snapshot({b"f": b"y"}, tags=(TAG_SAFETY,), message=f"{SAFETY_MESSAGE}{there}")
    found = store.latest_of([str(repository.root), "/other"])
    assert {root: info and info.id for root, info in found.items()} == {
        str(repository.root): safety,
        "/other": None,
    }
    newest = store.latest()
    assert newest is not None
    assert (newest.id, newest.time_ns) == (there, FIRST_NS)


@pytest.mark.parametrize("scheduled", [True, False])
def test_only_roots_with_a_scheduled_snapshot_under_way_are_left_out_of_the_next(
    tmp_path: Path, scheduled: bool
) -> None:
    """A tick leaves out only roots with a scheduled snapshot under way, not those with a requested one."""
    bench = Bench(tmp_path)
    bench.add_root("/a", FakeOverlay())
    bench.add_root("/b", FakeOverlay())

    async def script() -> None:
        await bench.snapshots.take(SnapshotRequest(roots=["/a"]), scheduled=scheduled)
        assert bench.snapshots.scheduled_roots() == ({"/a"} if scheduled else set())

    try:
        trio.run(script)
    finally:
        bench.close()


def test_a_tick_takes_the_roots_that_are_not_behind(tmp_path: Path) -> None:
    """A tick leaves out roots still being captured, with an alert, and otherwise requests all roots."""
    bench = Bench(tmp_path)
    bench.add_root("/a", FakeOverlay())
    bench.add_root("/b", FakeOverlay())
    requested_roots: list[list[str]] = []
    under_way: set[str] = {"/a"}

    async def take(request: SnapshotRequest) -> PendingSnapshot:
        requested_roots.append(list(request.roots))
        return await bench.snapshots.take(request, scheduled=True)

    async def main() -> None:
        send, ticks = trio.open_memory_channel[None](5)
        schedule = ScheduledSnapshots(ticks, take, lambda: bench.roots, lambda: under_way, bench.alerts)
        await send.send(None)
        send.close()
        await schedule.run()
        (alert,) = bench.alerts.standing()
        assert (alert.key, "of /a was skipped" in alert.message) == ("behind", True)
        under_way.update({"/b"})
        await schedule._tick()
        under_way.clear()
        await schedule._tick()
        assert requested_roots == [["/b"], []]
        assert bench.alerts.standing() == []

    try:
        trio.run(main)
    finally:
        bench.close()
