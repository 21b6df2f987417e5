"""When a snapshot will be committed: from what is done, the share so far, and the share to come."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from support.fake_daemon import Bench, FakeOverlay, until

from ciuic.control_types import Progress, SnapshotRequest
from ciuic.daemon import capture_job
from ciuic.daemon.estimate import MAX_REMEMBERED, Durations, seconds_left
from ciuic.urgency import Urgency

_ALL = Urgency(min_share=1.0)


def test_a_quarter_done_in_ten_seconds_takes_thirty_more() -> None:
    """At the disk's speed; of bytes and names the one that is less far counts."""
    progress = Progress(bytes_done=25, bytes_total=100, files_done=9, files_total=10)
    assert seconds_left(progress, 10, _ALL) == pytest.approx(30)


def test_a_first_capture_does_not_know_how_much_there_is() -> None:
    """No figure is better than a wrong one."""
    assert seconds_left(Progress(bytes_done=25, files_done=9), 10, _ALL) is None
    assert seconds_left(Progress(bytes_total=25, files_total=9), 10, _ALL) is None


def test_the_share_that_rises_is_counted_with() -> None:
    """Half of ten seconds of work at a share of 1 %: not five hundred seconds, for the deadline is in a hundred."""
    progress = Progress(files_done=50, files_total=100, paused_seconds=495, share=0.01)
    urgency = Urgency(min_share=0.01, finish_within_seconds=100)
    left = seconds_left(progress, 500, urgency)
    assert left is not None
    assert left == pytest.approx(69, abs=1)  # where the integral of 0.01**(1 - t/100) is 5
    assert seconds_left(progress, 500, Urgency(min_share=0.01, requested=True)) == pytest.approx(10)


@given(
    st.integers(1, 10**12), st.integers(1, 10**12), st.floats(0.1, 1e6), st.floats(0.0, 1.0),
    st.floats(0.0001, 1.0), st.floats(0.0001, 1.0), st.floats(0, 1e6),
)  # fmt: skip
def test_it_is_at_least_the_work_and_ends_soon_after_the_deadline(
    done: int, total: int, elapsed: float, paused: float, share: float, least: float, within: float
) -> None:
    """Whatever a capture says of itself."""
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
    """The median: one that waited for a lock says nothing of the next."""
    durations = Durations()
    assert durations.typical_seconds is None
    for seconds in (1000.0, *[3.0] * MAX_REMEMBERED, 5.0):
        durations.add(seconds)
    assert durations.typical_seconds == 3.0


def test_status_tells_it_for_what_runs_and_for_what_waits(tmp_path: Path) -> None:
    """One that waits comes after those before it; when it is committed there is nothing left to tell."""
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
                await until(lambda: running.state.state == "capturing")
                assert [one.seconds_left for one in bench.snapshots.unfinished()] == [None, None]
                await trio.sleep(0.05)
                running.progressed(
                    capture_job.Progress(
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
