"""Tests of the first snapshot of a newly protected root, and of the age of each root."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing
from support.cli_repository import FIRST_NS, CliRepository
from support.fake_daemon import Bench, FakeOverlay

from ciuic.daemon.base.repository_store import Store
from ciuic.daemon.first_snapshots import FirstSnapshots
from ciuic.daemon.scheduled_snapshots import ScheduledSnapshots
from ciuic.daemon.snapshots.pending import PendingSnapshot
from ciuic.daemon.status import _risk_seconds
from ciuic.errors import CiuicError
from ciuic.protocol.control_types import RootStatus, SnapshotRequest
from ciuic.types import SAFETY_MESSAGE, TAG_SAFETY


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
