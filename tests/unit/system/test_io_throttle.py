"""Tests of throttled work beside a job, with a simulated clock and simulated waiting."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ci import needs

from ciuic.system.io_throttle import (
    Gauge,
    Pace,
    _written_by_others,
    audible,
    gauges,
    other_threads_wait,
    processor_waits,
    waits_files,
)
from ciuic.system.urgency import Urgency

_STEP_SECONDS = 0.004
"""Seconds of a piece of work, which is a few megabytes."""


class World:
    """A clock, and a job that waits for the disk for the share ``waits(now)`` of the time."""

    def __init__(self, waits: Callable[[float], float], *, own_waits: float = 0.0) -> None:
        self.now = 1000.0
        self.worked = 0.0
        self.heard = 0.0
        self.own = 0.0
        self._waits = waits
        self._own_waits = own_waits

    def sleep(self, seconds: float) -> None:
        while seconds > 1e-9:
            part = min(seconds, 0.001)
            self.heard += part * self._waits(self.now)
            self.now += part
            seconds -= part

    def work(self) -> None:
        self.sleep(_STEP_SECONDS)
        self.own += _STEP_SECONDS * self._own_waits
        self.worked += _STEP_SECONDS

    def pace(
        self,
        *,
        counts_us: bool = True,
        min_share: float = 0.01,
        urgency: Urgency | None = None,
        we_wait: bool = False,
        on_pause: Callable[[], None] = lambda: None,
        processor_waits: Callable[[], float] = lambda: 0.0,
    ) -> Pace:
        def read() -> float:
            return self.heard + self.own

        return Pace(
            [Gauge(read, counts_us)],
            min_share=min_share,
            urgency=urgency,
            on_pause=on_pause,
            clock=lambda: self.now,
            sleep=self.sleep,
            we_wait=lambda: we_wait,
            processor_waits=processor_waits,
        )

    def run(self, pace: Pace, until: float) -> float:
        """Work until a time; return the share of the time that was worked."""
        began, worked = self.now, self.worked
        while self.now < until:
            self.work()
            pace.step()
        return (self.worked - worked) / (self.now - began)


@pytest.mark.parametrize("counts_us", [True, False])
def test_work_pauses_and_resumes_within_a_second(counts_us: bool) -> None:
    """Work pauses within a second when a job waits for the disk, and resumes within one when it stops."""
    world = World(lambda now: 0.6 if 1010 <= now < 1020 else 0.0)
    history: list[tuple[float, float, float]] = []
    pace = world.pace(counts_us=counts_us, on_pause=lambda: history.append(_moment(world, pace)))
    world.run(pace, 1030)

    def at(time: float) -> tuple[float, float]:
        """Share, and work done so far."""
        return next((share, worked) for now, share, worked in reversed(history) if now <= time)

    assert at(1010)[1] > 9
    assert at(1011)[0] <= 0.011
    assert at(1020)[1] - at(1011)[1] < 0.2
    assert at(1021)[0] == 1
    assert at(1030)[1] - at(1021)[1] > 8


def _moment(world: World, pace: Pace) -> tuple[float, float, float]:
    return world.now, pace.state.share, world.worked


def test_own_waiting_does_not_slow_the_work() -> None:
    """The work's own waiting, which the kernel's figure includes, does not slow it: pauses are quiet."""
    world = World(lambda now: 0.0, own_waits=1.0)
    pace = world.pace()
    assert world.run(pace, 1020) > 0.9
    assert pace.state.share == 1


def test_own_waiting_threads_do_not_slow_the_work() -> None:
    """A waiting thread of its own makes the system's figure useless, not the work slow.

    The overlay's figure still counts.
    """
    world = World(lambda now: 0.9)
    pace = world.pace(we_wait=True)
    assert world.run(pace, 1005) > 0.9
    pace = world.pace(we_wait=True, counts_us=False)
    assert world.run(pace, 1010) < 0.1


@given(busy=st.floats(0.0, 1.0), period=st.floats(0.01, 3.0), duty=st.floats(0.0, 1.0))
def test_work_gets_at_least_the_least_share(busy: float, period: float, duty: float) -> None:
    """Work gets at least the least share of the time, and never more than all of it."""
    world = World(lambda now: busy if now % period < duty * period else 0.0)
    pace = world.pace(min_share=0.05)
    share = world.run(pace, 1010)
    # A pause that has begun may last beyond the end.
    assert 0.03 < share <= 1
    assert 0.05 <= pace.state.share <= 1


def test_work_ends_in_bounded_time() -> None:
    """Ten seconds of work beside a job that never stops waiting take at most eleven minutes."""
    world = World(lambda now: 1.0)
    pace = world.pace()
    while world.worked < 10:
        world.work()
        pace.step()
    assert 300 < world.now - 1000 < 12 * 60


def test_work_gets_more_time_towards_its_deadline() -> None:
    """Work beside a job that always waits gets more as its deadline nears, and then all of the time."""
    world = World(lambda now: 1.0)
    pace = world.pace(urgency=Urgency(min_share=0.01, finish_within_seconds=100))
    assert world.run(pace, 1010) < 0.05
    world.run(pace, 1050)
    assert 0.09 < world.run(pace, 1060) < 0.25
    world.run(pace, 1100)
    assert world.run(pace, 1110) == pytest.approx(1)


def test_requested_work_has_half_of_the_time() -> None:
    """Requested work has half of the time, however others wait."""
    world = World(lambda now: 1.0)
    pace = world.pace(urgency=Urgency(min_share=0.01, finish_within_seconds=10_000, requested=True))
    assert 0.4 < world.run(pace, 1020) < 0.6


def test_new_terms_end_a_pause_that_goes_on() -> None:
    """New terms end a pause, which could last over an hour for half a second's work at a share of 0.01 %."""
    world = World(lambda now: 1.0)

    def on_pause() -> None:
        if world.now > 1010:
            pace.urge(Urgency(min_share=0.0001, requested=True))

    pace = world.pace(urgency=Urgency(min_share=0.0001), on_pause=on_pause)
    for _ in range(3):
        world.sleep(0.5)
        pace.step()
    assert world.now < 1015
    assert pace.state.share == pace.state.least_share == 0.5


def test_time_without_a_processor_is_no_work() -> None:
    """Time spent ready to run without a processor does not count as work, or pauses would be far too long.

    Beside busy processes at nice 19 it is 99 % of the time, and a pause a hundred times too long.
    """
    world = World(lambda now: 1.0)
    ready = 0.0
    pace = world.pace(min_share=0.1, processor_waits=lambda: ready)
    paused = 0.0
    for _ in range(50):
        world.sleep(0.5)
        ready += 0.495
        before = world.now
        pace.step()
        paused += world.now - before
    # For 0.25 s of work; it was 225 s.
    assert paused < 5


def test_waiting_time_for_a_processor_comes_from_the_kernel() -> None:
    """The kernel's figure of waiting for a processor is in seconds that only grow."""
    read = processor_waits()
    first = read()
    assert 0 <= first <= read() < 3600


def test_work_slows_down_for_a_stream_of_writes_and_not_for_a_log() -> None:
    """Work slows down for a stream of writes, such as a checkpoint, but not for a log.

    A checkpoint being saved waits for nothing until memory is full of it.
    """
    # Rates in MiB/s.
    world = World(lambda now: 1000.0 if now < 1010 else 10.0)
    writes = Gauge(lambda: world.heard * (1 << 20), counts_us=False, busy_at=128 << 20)
    pace = Pace([writes], clock=lambda: world.now, sleep=world.sleep)
    assert world.run(pace, 1010) < 0.05
    assert pace.state.writing > 500 << 20
    world.run(pace, 1012)
    assert world.run(pace, 1020) > 0.9


def test_full_least_share_means_no_pauses() -> None:
    """Work with a least share of the whole makes no pauses, not even to measure."""
    world = World(lambda now: 1.0)
    assert world.run(world.pace(min_share=1.0), 1005) == pytest.approx(1.0)


def test_a_pause_can_be_ended() -> None:
    """A request to stop ends a pause."""

    class Stop(Exception):
        pass

    def stop() -> None:
        if world.now > 1003:
            raise Stop

    world = World(lambda now: 1.0)
    pace = Pace([Gauge(lambda: world.heard, True)], on_pause=stop, clock=lambda: world.now, sleep=world.sleep)
    with pytest.raises(Stop):
        world.run(pace, 1100)
    assert world.now < 1003.2


def test_gauge_that_ends_or_restarts_is_ignored() -> None:
    """A worker's figure that ends or starts again from nothing does not slow the work."""
    world = World(lambda now: 0.0)
    values = iter([5.0, 1.0])

    def read() -> float:
        try:
            return next(values)
        except StopIteration:
            raise ValueError from None

    pace = Pace([Gauge(read, False)], clock=lambda: world.now, sleep=world.sleep)
    assert world.run(pace, 1005) > 0.9


def test_gauges_of_workers_are_found(tmp_path: Path) -> None:
    """The workers' figures are found by path and are in seconds; unreadable ones are left out."""
    (tmp_path / "worker-1.sock.waits").write_bytes(struct.pack("<Q", 2_500_000))
    (tmp_path / "worker-2.sock.waits").write_bytes(b"")
    (tmp_path / "worker-1.sock").touch()
    found = waits_files(str(tmp_path))
    assert len(found) == 2
    ours = [
        gauge
        for gauge in gauges([*found, str(tmp_path / "none")])
        if not gauge.counts_us and gauge.busy_at < 1
    ]
    readings = []
    for gauge in ours:
        try:
            readings.append(gauge.read())
        except ValueError:
            readings.append(-1.0)
    assert sorted(readings) == [-1.0, 2.5]
    assert "requests" in audible(found)
    assert "requests" not in audible([str(tmp_path / "worker-2.sock.waits")])
    assert len(audible([])) == len(gauges([]))
    # The system has gauges where the kernel keeps the figures.
    for gauge in gauges([]):
        assert gauge.read() >= 0


def test_writes_of_other_processes_are_counted_apart(tmp_path: Path) -> None:
    """The writes of others are what the kernel counts for all less what it counts for this process."""
    writes = [gauge for gauge in gauges([]) if gauge.busy_at > 1]
    needs("" if writes else "the kernel does not count what is written")
    fd = os.open(tmp_path / "ours", os.O_WRONLY | os.O_CREAT)
    try:
        own_before = _own_write_bytes()
        os.write(fd, bytes(8 << 20))
        own = _own_write_bytes() - own_before
    finally:
        os.close(fd)
    if not own:
        pytest.skip("what is written here gets to no disk")
    # A file system dirties pages of its own in our name, and what is written back halfway gets dirty twice.
    assert 8 << 20 <= own < 16 << 20, "as the kernel counts pages that get dirty"
    with subprocess.Popen(
        [sys.executable, "-c", _WRITE, str(tmp_path / "theirs")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as they:
        assert they.stdin is not None
        assert they.stdout is not None
        # Not earlier: starting one process reaps others that have ended, and what those have written is ours
        # from then on.
        before = writes[0].read()
        they.stdin.write(b"\n")
        they.stdin.flush()
        assert they.stdout.readline() == b"written\n"
        assert writes[0].read() - before > 32 << 20


_WRITE = """
import os, sys
sys.stdin.readline()
os.write(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), bytes(64 << 20))
print("written", flush=True)
sys.stdin.read()  # not to be waited for yet: what a child has written is its parent's from then on
"""


def test_own_writes_are_subtracted_from_all_writes(tmp_path: Path) -> None:
    """Our writes, in bytes, are subtracted from all writes, in pages, whatever else the files contain."""
    vmstat, own = tmp_path / "vmstat", tmp_path / "io"
    vmstat.write_text("nr_dirty 7\nnr_dirtied 3000\nnr_dirtied_more 9\n")
    own.write_text(f"rchar: 1\nwrite_bytes: {1000 * mmap.PAGESIZE}\ncancelled_write_bytes: 5\n")
    with vmstat.open("rb") as all_, own.open("rb") as ours:
        assert _written_by_others(all_.fileno(), ours.fileno()) == 2000 * mmap.PAGESIZE


def _own_write_bytes() -> int:
    return int(Path("/proc/self/io").read_text().partition("\nwrite_bytes: ")[2].split()[0])


def test_a_thread_that_sleeps_waits_for_no_disk() -> None:
    """Only uninterruptible sleep counts as waiting for a disk."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert not other_threads_wait()
    finally:
        end.set()
        thread.join()


@pytest.mark.parametrize("own_session", [True, False])
def test_lowest_priority_applies_across_sessions(own_session: bool) -> None:
    """The lowest priority applies across sessions where the kernel schedules by sessions.

    In a session shared with others only our own processes are lowered.
    """
    program = (
        "import os; from ciuic.system.io_throttle import yield_to_others; yield_to_others('idle');"
        "print(os.nice(0)); path = '/proc/self/autogroup';"
        "print(open(path).read() if os.path.exists(path) else '')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        start_new_session=own_session,
        capture_output=True,
        text=True,
        check=True,
    )
    nice, _, session = done.stdout.partition("\n")
    assert nice == "19"
    # The file is empty where the session has no group of its own, as in some containers.
    if session.strip():
        assert (session.split()[-1] == "19") == own_session
