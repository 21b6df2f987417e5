"""Snapshots from the cut to the commit: order, retries, lost sessions, successors, estimates."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from support.fake_daemon import Bench, FakeOverlay, done, sleeping_process
from support.until import until_async

import ciuic.daemon.snapshots.pending as pending_module
import ciuic.daemon.snapshots.pending as promises_module
from ciuic.daemon.base.runtime import CutRecord, PendingRecord
from ciuic.daemon.capture import job
from ciuic.daemon.capture.job import EXIT_UNDO_LOST, CaptureJob, CaptureProgress, Done, Failed
from ciuic.daemon.snapshots.capturing import MAX_REMEMBERED, Durations, seconds_left
from ciuic.daemon.snapshots.cut import TAG_UNFLUSHED
from ciuic.daemon.snapshots.pending import MACHINE_ENDED, MAX_PENDING, ROOM_SECONDS
from ciuic.errors import Busy, CiuicError, Damaged, NotFound
from ciuic.protocol.control_types import Progress, SnapshotRequest
from ciuic.repository.promised import Promise
from ciuic.system.processes import start_ticks
from ciuic.system.urgency import Urgency
from ciuic.types import LeftOut

_ALL = Urgency(min_share=1.0)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    # A clock that runs fast would end these limits before their thread has begun.
    for limit in ("RECORD_SECONDS", "OUTCOME_SECONDS"):
        monkeypatch.setattr(promises_module, limit, 1e6)
    made = Bench(tmp_path)
    yield made
    made.close()


def run(bench: Bench, script: Callable[[], Awaitable[None]], *, speed: float = 1) -> None:
    """Run ``script`` beside the capture task at ``speed`` times real time, and end the task afterwards.

    A clock that jumps when all tasks wait would jump over the threads in which workers are asked.
    """

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.snapshots.capturing.run)
            with trio.fail_after(20 * speed):
                await script()
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(rate=speed) if speed != 1 else None)


def lose_worker(bench: Bench) -> None:
    """Let the worker of /a end, and its session be known as lost."""
    bench.roots["/a"].worker = None
    bench.snapshots.session_lost("/a", "s")


async def lose_worker_of_capture(bench: Bench) -> pending_module.PendingSnapshot:
    """Return a snapshot of whose capture the worker of /a is lost."""
    pending = await bench.snapshots.take(SnapshotRequest())
    await trio.testing.wait_all_tasks_blocked()
    lose_worker(bench)
    return pending


async def finished(bench: Bench) -> pending_module.PendingSnapshot:
    """Return the snapshot of `record` when it is finished."""
    pending = bench.snapshots.state("cs-00abcd")
    assert pending is not None
    await pending.finished.wait()
    return pending


def test_snapshot_is_cut_captured_and_committed_at_the_worker(bench: Bench) -> None:
    """The job names the sealed epoch, which is committed at the worker only after the capture's Done."""
    overlay = FakeOverlay()
    worker = bench.add_root("/a", overlay)
    gate = trio.Event()
    bench.gates = [gate]

    async def script() -> None:
        pending = await bench.snapshots.take(SnapshotRequest(message="m", tags=["t"], hold=True))
        assert overlay.committed == []
        assert list(bench.store.promises) == [pending.id]
        gate.set()
        await pending.finished.wait()
        assert (pending.state.state, pending.state.new_bytes) == ("committed", 5)
        while bench.runtime.read_pending():  # noqa: ASYNC110  it forgets the snapshot a moment after its commit
            await trio.sleep(0.01)
        assert bench.store.promises == {}

    run(bench, script)
    assert overlay.committed == [1]
    (job,) = bench.jobs
    assert (job.message, job.tags, job.hold, job.host) == ("m", ("t",), True, "host")
    (root,) = job.roots
    assert (root.path, root.session, root.epoch, root.worker_pid) == (b"/a", "s", 1, worker.pid)
    assert root.trust_tracking
    assert bench.flushed == ["/a"]
    assert bench.runtime.read_pending() == []


def test_snapshots_are_captured_one_at_a_time_in_the_order_of_their_cuts(bench: Bench) -> None:
    """A second cut does not wait for the first capture, but its capture does."""
    overlay = FakeOverlay()
    bench.add_root("/a", overlay)
    gate = trio.Event()
    bench.gates = [gate]

    async def script() -> None:
        first = await bench.snapshots.take(SnapshotRequest())
        await trio.testing.wait_all_tasks_blocked()
        second = await bench.snapshots.take(SnapshotRequest())
        await trio.testing.wait_all_tasks_blocked()
        assert overlay.pending == [1, 2]
        assert len(bench.jobs) == 1
        assert [record.id for record in bench.runtime.read_pending()] == [first.id, second.id]
        gate.set()
        await second.finished.wait()
        assert first.state.state == "committed"

    run(bench, script)
    assert [job.roots[0].epoch for job in bench.jobs] == [1, 2]
    assert overlay.committed == [1, 2]


def test_a_killed_capture_is_tried_again(bench: Bench) -> None:
    """A capture that ended without a message is started again with the same epoch and id."""
    overlay = FakeOverlay()
    bench.add_root("/a", overlay)
    bench.behaviours = [lambda job: Failed(error="killed", code=-1), done]

    async def script() -> None:
        pending = await bench.snapshots.take(SnapshotRequest())
        await pending.finished.wait()
        assert pending.state.state == "committed"
        assert pending.state.attempts == 2
        assert pending.state.error == ""

    run(bench, script, speed=100)
    assert len({job.id for job in bench.jobs}) == 1
    assert overlay.committed == [1]
    assert "capture" not in bench.alerts


@pytest.mark.parametrize(("code", "kind"), [(4, Damaged), (2, CiuicError)])
def test_damage_is_not_retried(bench: Bench, code: int, kind: type[CiuicError]) -> None:
    """Damage is not retried: the epoch goes back to its worker with an alert, and the id is lost."""
    overlay = FakeOverlay()
    bench.add_root("/a", overlay)
    bench.behaviours = [lambda job: Failed(error="no", hint="do this", code=code)]

    async def script() -> None:
        pending = await bench.snapshots.take(SnapshotRequest())
        await pending.finished.wait()
        assert pending.state.state == "failed"
        assert isinstance(pending.failure, kind)

    run(bench, script)
    assert len(bench.jobs) == 1
    assert overlay.aborted == [1]
    (alert,) = bench.alerts.standing()
    assert (alert.key, alert.severity, alert.hint) == ("capture", "problem", "do this")
    assert [state.state for state in bench.snapshots.unfinished()] == ["failed"]
    assert [promise.reason for promise in bench.store.promises.values()] == ["no"]


def test_a_commit_ends_the_alert_of_an_earlier_failure(bench: Bench) -> None:
    """The next snapshot, which has the changes, clears the alert of an earlier failure."""
    overlay = FakeOverlay()
    bench.add_root("/a", overlay)
    bench.behaviours = [lambda job: Failed(error="no", code=4), done]

    async def script() -> None:
        await (await bench.snapshots.take(SnapshotRequest())).finished.wait()
        await (await bench.snapshots.take(SnapshotRequest())).finished.wait()

    run(bench, script)
    assert bench.alerts.standing() == []
    assert bench.snapshots.unfinished() == []
    assert (overlay.aborted, overlay.committed) == ([1], [2])


def test_a_busy_repository_is_waited_for_but_not_for_ever(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy repository is waited for, and after a while the epoch is given back: waiting costs the job."""
    monkeypatch.setattr(pending_module, "BUSY_PATIENCE_SECONDS", 60)
    overlay = FakeOverlay()
    bench.add_root("/a", overlay)
    bench.behaviours = [lambda job: Failed(error="busy", code=75)]

    async def script() -> None:
        began = trio.current_time()
        pending = await bench.snapshots.take(SnapshotRequest())
        await pending.finished.wait()
        assert trio.current_time() - began >= 60
        assert isinstance(pending.failure, Busy)

    run(bench, script, speed=200)
    assert overlay.aborted == [1]
    assert len(bench.jobs) > 2


def test_a_lost_session_ends_the_running_capture_and_costs_its_root(bench: Bench) -> None:
    """A capture is killed when its worker dies, and a root whose successor has another session is left out at once."""
    ours, other = FakeOverlay("a"), FakeOverlay("b")
    bench.add_root("/a", ours)
    bench.add_root("/b", other)
    bench.gates = [trio.Event()]

    async def script() -> None:
        pending = await bench.snapshots.take(SnapshotRequest(message="m"))
        await trio.testing.wait_all_tasks_blocked()
        lose_worker(bench)
        assert bench.captures[0].killed
        ours.epoch, ours.pending = 1, []
        bench.add_root("/a", ours, session="successor")
        await pending.finished.wait()
        assert (pending.state.state, pending.state.roots) == ("committed", ["/b"])
        assert pending.state.left_out == {"/a": "the overlay session of /a ended before the capture did"}
        while bench.store.promises:  # noqa: ASYNC110  the note goes a moment after the commit
            await trio.sleep(0.01)

    run(bench, script)
    assert (ours.aborted, ours.committed, ours.epoch) == ([], [], 1)
    assert (other.aborted, other.committed) == ([], [1])
    first, second = bench.jobs
    assert (first.id, first.time_ns) == (second.id, second.time_ns)
    assert [(root.path, root.session, root.epoch) for root in second.roots] == [(b"/b", "s", 1)]
    assert [root.path for root in second.left_out] == [b"/a"]


def test_epoch_of_a_killed_worker_is_captured_through_its_successor(bench: Bench) -> None:
    """A dead worker's sealed epoch is captured again through its successor, with the promised instant."""
    overlay = FakeOverlay("a")
    bench.add_root("/a", overlay)
    bench.gates = [trio.Event()]

    async def script() -> None:
        pending = await lose_worker_of_capture(bench)
        assert bench.captures[0].killed
        bench.add_root("/a", overlay)
        await pending.finished.wait()
        assert (pending.state.state, pending.state.left_out) == ("committed", {})

    run(bench, script)
    assert (overlay.aborted, overlay.committed) == ([], [1])
    assert [job.roots[0].epoch for job in bench.jobs] == [1, 1]


def test_a_root_that_does_not_come_back_is_left_out(bench: Bench) -> None:
    """A root without a successor is left out, and the others are captured at the promised instant."""
    other = FakeOverlay("b")
    bench.add_root("/a", FakeOverlay("a"))
    bench.add_root("/b", other)
    bench.gates = [trio.Event()]

    async def script() -> None:
        pending = await lose_worker_of_capture(bench)
        await pending.finished.wait()
        assert (pending.state.state, pending.state.roots) == ("committed", ["/b"])
        assert list(pending.state.left_out) == ["/a"]

    run(bench, script, speed=200)
    assert (other.aborted, other.committed) == ([], [1])
    assert [[root.path for root in job.roots] for job in bench.jobs] == [[b"/a", b"/b"], [b"/b"]]
    assert "left-out:/a" in bench.alerts


def test_a_successor_that_dies_when_it_is_asked_loses_nothing(bench: Bench) -> None:
    """A root is in doubt as long as its workers end: the next one that has the session goes on with the sealed epoch."""
    overlay = FakeOverlay("a")
    bench.add_root("/a", overlay)
    bench.gates = [trio.Event()]

    async def script() -> None:
        pending = await lose_worker_of_capture(bench)
        overlay.fail_on.add("status")
        bench.add_root("/a", overlay)
        await until_async(lambda: "status a" in overlay.log)
        lose_worker(bench)
        overlay.fail_on.clear()
        bench.add_root("/a", overlay)
        await pending.finished.wait()
        assert (pending.state.state, pending.state.left_out) == ("committed", {})

    run(bench, script)
    assert (overlay.aborted, overlay.committed) == ([], [1])


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_snapshot_whose_undo_log_was_given_up_is_lost(bench: Bench, scheduled: bool) -> None:
    """A full disk that took the sealed epoch of the only root is the reason that waiters get; its epoch goes back at once, and no snapshot follows before its turn."""
    overlay = FakeOverlay()
    bench.add_root("/a", overlay)
    bench.behaviours = [lambda job: Failed(error="given up", code=EXIT_UNDO_LOST)]
    again: list[str] = []
    bench.on_scheduled_lost = lambda: again.append("again")

    async def script() -> None:
        pending = await bench.snapshots.take(SnapshotRequest(message="m", tags=["t"]), scheduled=scheduled)
        await pending.finished.wait()
        assert (pending.state.state, pending.state.error) == ("failed", "given up")
        assert f"snapshot {pending.id} failed: given up" in str(pending.failure)

    run(bench, script)
    assert (len(bench.jobs), overlay.aborted, again) == (1, [1], [])
    found = [(one.message, one.roots, one.reason) for one in bench.store.promises.values()]
    assert found == ([] if scheduled else [("m", ("/a",), "given up")])


def test_every_waiting_snapshot_of_an_ended_session_is_lost(bench: Bench) -> None:
    """No snapshot of an ended session is cut anew; those of other roots go on, and the schedule replaces what it lost, but not twice in a row."""
    ours, other = FakeOverlay("a"), FakeOverlay("b")
    bench.add_root("/a", ours)
    bench.add_root("/b", other)
    gate = trio.Event()
    bench.gates = [gate]
    again: list[str] = []
    bench.on_scheduled_lost = lambda: again.append("again")

    async def script() -> None:
        first = await bench.snapshots.take(SnapshotRequest(roots=["/b"]))
        await trio.testing.wait_all_tasks_blocked()
        lost = [await bench.snapshots.take(SnapshotRequest(roots=["/a"]), scheduled=True) for _ in range(2)]
        asked = await bench.snapshots.take(SnapshotRequest(roots=["/a"]))
        last = await bench.snapshots.take(SnapshotRequest(roots=["/b"]), scheduled=True)
        lose_worker(bench)
        ours.epoch, ours.pending = 1, []
        bench.add_root("/a", ours, session="successor")
        gate.set()
        await last.finished.wait()
        assert [one.state.state for one in (first, *lost, asked)] == ["committed", *["failed"] * 3]
        assert [one.reason for one in bench.store.promises.values() if one.reason] == [
            "the overlay session of /a ended before the capture did"
        ]

    run(bench, script)
    assert again == ["again"]
    assert [job.roots[0].path for job in bench.jobs] == [b"/b", b"/b"]
    assert (ours.epoch, other.committed) == (1, [1, 2])


def test_a_root_that_the_capture_left_out_gets_its_epoch_back(bench: Bench) -> None:
    """A root left out of a snapshot gets its epoch back, and an alert stands until one has the root again."""
    ours, other = FakeOverlay("a"), FakeOverlay("b")
    bench.add_root("/a", ours)
    bench.add_root("/b", other)
    lost = LeftOut(path=b"/a", reason="its undo log was given up")
    bench.behaviours = [lambda job: msgspec.structs.replace(done(job), left_out=(lost,)), done]

    async def script() -> None:
        pending = await bench.snapshots.take(SnapshotRequest())
        await pending.finished.wait()
        assert (pending.state.state, pending.state.roots) == ("committed", ["/b"])
        assert pending.state.left_out == {"/a": "its undo log was given up"}
        assert "left-out:/a" in bench.alerts
        await (await bench.snapshots.take(SnapshotRequest())).finished.wait()

    run(bench, script)
    assert (ours.aborted, ours.committed) == ([1], [2])
    assert (other.aborted, other.committed) == ([], [1, 2])
    assert "left-out:/a" not in bench.alerts


@pytest.mark.parametrize("by_name", [True, False])
def test_a_root_that_always_ends_the_capture_is_left_out(bench: Bench, by_name: bool) -> None:
    """A root during which every attempt is killed or fails is left out of the last attempt."""
    bench.add_root("/a", FakeOverlay("a"))
    bench.add_root("/b", FakeOverlay("b"))

    def fails(job: CaptureJob) -> Failed | Done:
        if any(root.path == b"/a" for root in job.roots):
            return Failed(error="killed", code=1 if by_name else -1, root=b"/a" if by_name else b"")
        return done(job)

    bench.behaviours = [fails]
    if not by_name:
        bench.progress = CaptureProgress(root=b"/a", entries=1, files_read=0, bytes_read=0, new_bytes=0)

    async def script() -> None:
        pending = await bench.snapshots.take(SnapshotRequest())
        await pending.finished.wait()
        assert (pending.state.state, list(pending.state.left_out)) == ("committed", ["/a"])

    run(bench, script, speed=100)
    assert len(bench.jobs) == 4


@pytest.mark.parametrize("scheduled", [True, False])
def test_a_scheduled_snapshot_that_was_lost_is_taken_again(bench: Bench, scheduled: bool) -> None:
    """A scheduled snapshot lost with its worker is taken again; a requested one has been answered."""
    bench.add_root("/a", FakeOverlay())
    bench.gates = [trio.Event()]
    retries: list[str] = []
    bench.on_scheduled_lost = lambda: retries.append("again")

    async def script() -> None:
        pending = await bench.snapshots.take(SnapshotRequest(), scheduled=scheduled)
        await trio.testing.wait_all_tasks_blocked()
        lose_worker(bench)
        await pending.finished.wait()

    run(bench, script, speed=200)
    assert retries == (["again"] if scheduled else [])
    assert len(bench.store.promises) == (not scheduled)


def test_stopping_gives_every_epoch_back(bench: Bench) -> None:
    """Stopping in the middle of a capture, with another waiting, returns both epochs to the worker."""
    overlay = FakeOverlay()
    bench.add_root("/a", overlay)
    bench.gates = [trio.Event()]

    async def script() -> None:
        await bench.snapshots.take(SnapshotRequest())
        await bench.snapshots.take(SnapshotRequest())
        await trio.testing.wait_all_tasks_blocked()

    run(bench, script)
    assert sorted(overlay.aborted) == [1, 2]
    assert overlay.pending == []
    assert [promise.reason for promise in bench.store.promises.values()] == [
        "the daemon stopped before it was captured"
    ] * 2


def test_a_restarting_daemon_leaves_waiting_snapshots_to_its_successor(bench: Bench) -> None:
    """A daemon that restarts gives no epoch back, and its journal names what was promised."""
    overlay = FakeOverlay()
    bench.add_root("/a", overlay)
    bench.gates = [trio.Event()]
    bench.snapshots.capturing.leaving = True

    async def script() -> None:
        await bench.snapshots.take(SnapshotRequest())
        await bench.snapshots.take(SnapshotRequest())
        await trio.testing.wait_all_tasks_blocked()

    run(bench, script)
    assert (overlay.aborted, overlay.pending) == ([], [1, 2])
    assert [record.id for record in bench.runtime.read_pending()] == list(bench.store.promises)


def test_a_root_that_is_not_mounted_is_named(bench: Bench) -> None:
    """An unmounted root is left out of "all roots" and named; asked for by name it is an error."""
    bench.add_root("/a", FakeOverlay())
    bench.add_root("/b", FakeOverlay())
    worker, bench.roots["/b"].worker, bench.roots["/b"].state = bench.roots["/b"].worker, None, "failed"

    async def script() -> None:
        pending = await bench.snapshots.take(SnapshotRequest())
        assert pending.state.roots == ["/a"]
        assert pending.state.left_out == {"/b": "it was not mounted"}
        with pytest.raises(CiuicError, match="/b"):
            await bench.snapshots.take(SnapshotRequest(roots=["/a", "/b"]))
        with pytest.raises(NotFound):
            await bench.snapshots.take(SnapshotRequest(roots=["/c"]))

    run(bench, script)
    assert worker is not None


def test_too_many_waiting_snapshots_are_refused(bench: Bench) -> None:
    """Cuts stop while too many sealed epochs wait, also after a minute."""
    overlay = FakeOverlay()
    bench.add_root("/a", overlay)
    bench.gates = [trio.Event()]

    async def script() -> None:
        for _ in range(MAX_PENDING):
            await bench.snapshots.take(SnapshotRequest())
        before = trio.current_time()
        with pytest.raises(Busy):
            await bench.snapshots.take(SnapshotRequest())
        assert trio.current_time() - before >= ROOM_SECONDS
        assert len(overlay.pending) == MAX_PENDING

    run(bench, script, speed=200)


def test_unfinished_flush_gives_a_tag(bench: Bench) -> None:
    """A snapshot whose flush did not finish has a tag that says cached writes may be missing."""
    bench.add_root("/a", FakeOverlay())

    async def fail_to_check(root: str, worker: object) -> bool:
        await trio.lowlevel.checkpoint()
        return False

    bench.flush = fail_to_check

    async def script() -> None:
        assert (await bench.snapshots.take(SnapshotRequest(tags=["x"]))).state.tags == ["x", TAG_UNFLUSHED]

    run(bench, script)


def test_tracking_counts_again_only_after_a_full_comparison_was_committed(bench: Bench) -> None:
    """Tracking is trusted again after a bypass once a snapshot cut later has compared everything."""
    from ciuic.system.bypass import Bypasser, Use

    bench.add_root("/a", FakeOverlay())
    supervisor, mounts = bench.roots["/a"], bench.mounts["/a"]
    somebody = Bypasser(1, "x", 0, (Use("open", b"/a/f", True),))
    supervisor.bypass.processes, supervisor.bypass.has_gap, mounts.found = [somebody], True, [somebody]

    def met_by_another(job: CaptureJob) -> Done:
        supervisor.bypass.processes = [somebody]
        return done(job)

    bench.behaviours = [done, lambda job: Failed(error="no", code=4), met_by_another, done, done]

    async def take() -> None:
        await (await bench.snapshots.take(SnapshotRequest())).finished.wait()

    async def script() -> None:
        # The bypassing process is still there.
        await take()
        assert bench.runtime.read_untrusted() == {"/a"}
        mounts.found = []
        # The bypass has ended, but this capture fails.
        await take()
        # A bypass begins during this one.
        await take()
        # This capture compares everything.
        await take()
        assert bench.runtime.read_untrusted() == set()
        await take()

    run(bench, script)
    assert [job.roots[0].trust_tracking for job in bench.jobs] == [False, False, False, False, True]


def record(**changes: object) -> PendingRecord:
    cuts = [CutRecord(path="/a", session="s", epoch=1)]
    return PendingRecord(**{"id": "cs-00abcd", "time_ns": 5, "cuts": cuts, "attempts": 1, **changes})  # type: ignore[arg-type]


def test_a_successor_goes_on_with_the_same_id(bench: Bench) -> None:
    """A snapshot promised by a killed daemon is captured by its successor under the same id."""
    overlay = FakeOverlay()
    overlay.epoch, overlay.pending = 2, [1]
    bench.add_root("/a", overlay)

    async def script() -> None:
        await bench.snapshots.resume([record()])
        pending = await finished(bench)
        assert pending.state.state == "committed"

    run(bench, script)
    assert [job.id for job in bench.jobs] == ["cs-00abcd"]
    assert overlay.committed == [1]


def test_a_successor_captures_no_committed_snapshot_again(bench: Bench) -> None:
    """A successor tells the worker of a snapshot committed before, and captures nothing again."""
    overlay = FakeOverlay()
    overlay.epoch, overlay.pending = 2, [1]
    bench.add_root("/a", overlay)
    bench.store.epochs[("/a", "s", 1)] = "cs-00abcd"

    async def script() -> None:
        await bench.snapshots.resume([record()])
        await finished(bench)

    run(bench, script)
    assert bench.jobs == []
    assert overlay.committed == [1]


def test_a_successor_lets_a_running_capture_finish(bench: Bench) -> None:
    """A capture that the predecessor started goes on and is waited for, not started twice."""
    overlay = FakeOverlay()
    overlay.epoch, overlay.pending = 2, [1]
    bench.add_root("/a", overlay)
    process = sleeping_process()

    async def script() -> None:
        await bench.snapshots.resume(
            [record(capture_pid=process.pid, capture_started_ticks=start_ticks(process.pid))]
        )
        await trio.testing.wait_all_tasks_blocked()
        assert bench.jobs == []
        bench.store.epochs[("/a", "s", 1)] = "cs-00abcd"
        process.kill()
        pending = await finished(bench)
        assert pending.state.state == "committed"

    run(bench, script)
    process.wait()
    assert bench.jobs == []


def test_a_successor_reports_what_was_lost_with_its_session(bench: Bench) -> None:
    """A snapshot of a session that ended with the daemon before is lost, and nothing is cut for it."""
    overlay = FakeOverlay()
    bench.add_root("/a", overlay, session="new")

    async def script() -> None:
        await bench.snapshots.resume([record()])
        pending = await finished(bench)
        assert pending.state.state == "failed"

    run(bench, script)
    assert (bench.jobs, overlay.epoch) == ([], 1)
    (loss,) = bench.store.promises.values()
    assert loss.reason == "the overlay session of /a ended with the daemon before this one"


def test_promise_without_a_journal_is_lost(bench: Bench) -> None:
    """A promise in the repository without a journal, as after a reboot, is noted as lost."""
    bench.store.promises = {id_: Promise(id=id_, time_ns=1) for id_ in ("cs-00abcd", "cs-00abce")}
    overlay = FakeOverlay()
    overlay.epoch, overlay.pending = 2, [1]
    bench.add_root("/a", overlay)
    bench.gates = [trio.Event()]

    async def script() -> None:
        await bench.snapshots.resume([record()])
        assert [one.reason for one in bench.store.promises.values()] == ["", MACHINE_ENDED]

    run(bench, script)


def test_reconcile_settles_forgotten_epochs(bench: Bench) -> None:
    """A pending epoch with a snapshot is committed, one without is aborted, a queued one is left alone."""
    overlay = FakeOverlay()
    overlay.epoch, overlay.pending = 3, [1, 2]
    worker = bench.add_root("/a", overlay)
    bench.store.epochs[("/a", "s", 1)] = "cs-000001"
    bench.gates = [trio.Event()]

    async def script() -> None:
        # This is epoch 3.
        await bench.snapshots.take(SnapshotRequest())
        await bench.snapshots.reconcile("/a", worker)
        assert (overlay.committed, overlay.aborted, overlay.pending) == ([1], [2], [3])

    run(bench, script)


def test_descriptors_do_not_leak(bench: Bench) -> None:
    """Each attempt closes its duplicates of the backing descriptors, however it ends."""
    bench.add_root("/a", FakeOverlay())
    bench.behaviours = [lambda job: OSError("no such program"), done]

    async def script() -> None:
        before = len(os.listdir("/proc/self/fd"))
        await (await bench.snapshots.take(SnapshotRequest())).finished.wait()
        assert len(os.listdir("/proc/self/fd")) == before

    run(bench, script, speed=100)


def test_a_quarter_done_in_ten_seconds_takes_thirty_more() -> None:
    """A capture a quarter done in ten seconds needs thirty more; of bytes and names the slower counts."""
    progress = Progress(bytes_done=25, bytes_total=100, files_done=9, files_total=10)
    assert seconds_left(progress, 10, _ALL) == pytest.approx(30)


def test_first_capture_has_no_estimate() -> None:
    """A first capture has no estimate, as its size is unknown."""
    assert seconds_left(Progress(bytes_done=25, files_done=9), 10, _ALL) is None
    assert seconds_left(Progress(bytes_total=25, files_total=9), 10, _ALL) is None


def test_the_share_that_rises_is_counted_with() -> None:
    """Half of ten seconds of work at a share of 1 % is estimated with the share that rises to the deadline.

    The deadline is in a hundred seconds, so the estimate is far from the five hundred of a constant share.
    """
    progress = Progress(files_done=50, files_total=100, paused_seconds=495, share=0.01)
    urgency = Urgency(min_share=0.01, finish_within_seconds=100)
    left = seconds_left(progress, 500, urgency)
    assert left is not None
    # At this point the integral of 0.01**(1 - t/100) is 5.
    assert left == pytest.approx(69, abs=1)
    assert seconds_left(progress, 500, Urgency(min_share=0.01, requested=True)) == pytest.approx(10)


@given(
    st.integers(1, 10**12), st.integers(1, 10**12), st.floats(0.1, 1e6), st.floats(0.0, 1.0),
    st.floats(0.0001, 1.0), st.floats(0.0001, 1.0), st.floats(0, 1e6),
)  # fmt: skip
def test_estimate_is_at_least_the_work_left(
    done: int, total: int, elapsed: float, paused: float, share: float, least: float, within: float
) -> None:
    """The estimate is at least the work that is left, and ends soon after the deadline."""
    progress = Progress(bytes_done=done, bytes_total=total, paused_seconds=paused * elapsed, share=share)
    left = seconds_left(progress, elapsed, Urgency(min_share=least, finish_within_seconds=within))
    if left is None:
        assert paused == pytest.approx(1)
        return
    work = elapsed * (1 - paused) * max(0, total - done) / done
    assert left >= work * 0.999
    if within:
        assert left <= (within + work) * 1.01 + 1


def test_the_last_captures_are_remembered_and_no_more() -> None:
    """The median of the last captures is used, so one that waited for a lock does not matter."""
    durations = Durations()
    assert durations.typical_seconds is None
    for seconds in (1000.0, *[3.0] * MAX_REMEMBERED, 5.0):
        durations.add(seconds)
    assert durations.typical_seconds == 3.0


def test_status_has_estimates_of_running_and_waiting_captures(tmp_path: Path) -> None:
    """Status has the estimate of running and waiting captures, in their order, until they are committed."""
    bench = Bench(tmp_path)
    bench.add_root("/a", FakeOverlay())
    gate = trio.Event()
    bench.gates = [None, gate]

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.snapshots.capturing.run)
            with trio.fail_after(30):
                first = await bench.snapshots.take(SnapshotRequest())
                await first.finished.wait()
                assert first.state.seconds_left is None
                running = await bench.snapshots.take(SnapshotRequest())
                await bench.snapshots.take(SnapshotRequest())
                await until_async(lambda: running.state.state == "capturing")
                assert [one.seconds_left for one in bench.snapshots.unfinished()] == [None, None]
                await trio.sleep(0.05)
                running.attempt_progressed(
                    job.CaptureProgress(
                        root=b"/a", entries=1, files_read=1, bytes_read=1, new_bytes=0, entries_expected=2
                    )
                )
                left, later = [one.seconds_left for one in bench.snapshots.unfinished()]
                assert left is not None
                assert later is not None
                assert 0 < left < later
                gate.set()
                await running.finished.wait()
                assert running.state.seconds_left is None
            nursery.cancel_scope.cancel()

    try:
        trio.run(main)
    finally:
        bench.close()
