"""Tests of the estimated commit time: from work done, the share so far, and the share to come."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from support.fake_daemon import Bench, FakeOverlay, until

from ciuic.daemon.capture import job
from ciuic.daemon.snapshots.estimate import MAX_REMEMBERED, Durations, seconds_left
from ciuic.protocol.control_types import Progress, SnapshotRequest
from ciuic.system.urgency import Urgency

_ALL = Urgency(min_share=1.0)


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
                await until(lambda: running.state.state == "capturing")
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
