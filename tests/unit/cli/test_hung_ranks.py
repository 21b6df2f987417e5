"""Judgement of ranks that hang, with a clock that is given."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace

import pytest
from support.until import until

from ciuic.cli.commands import watch
from ciuic.cli.commands.watch import HangWatch, HungRanks, Pulse, Rank, find_ranks
from ciuic.protocol.heartbeat_page import STACKS_SIGNAL, Goodbye, HeartbeatPage, read_page, read_stacks
from ciuic.system import processes
from ciuic.training.writer.heartbeat import TrainerHeartbeat


class Job:
    """Ranks whose steps a test makes, looked at once a second."""

    def __init__(self, limit_seconds: float = 60.0, ranks: int = 2) -> None:
        self.watch = HangWatch(limit_seconds)
        self.now = 1000.0
        self.pulses = [Pulse((100 + rank, 1), f"rank {rank}", 0, 0, 0, False) for rank in range(ranks)]

    def step(self, *ranks: int) -> None:
        for rank in ranks or range(len(self.pulses)):
            pulse = self.pulses[rank]
            self.pulses[rank] = pulse._replace(
                beats=pulse.beats + 1, step=pulse.step + 1, beat_ns=int(self.now * 1e9)
            )

    def excuse(self, rank: int, excused: bool) -> None:
        self.pulses[rank] = self.pulses[rank]._replace(excused=excused)

    def wait(self, seconds: int, *, steps: bool = False) -> str:
        """Look each second; return the last judgement."""
        found = ""
        for _ in range(seconds):
            self.now += 1
            if steps:
                self.step()
            found = self.watch.look(self.pulses, self.now)
        return found


def test_a_rank_without_a_step_hangs_after_the_limit() -> None:
    """A rank hangs after the limit and not before; the text names it first that is behind, and how unusual that is."""
    job = Job()
    assert not job.wait(30, steps=True)
    job.step(0)
    assert not job.wait(59)
    assert job.wait(1) == "rank 1 has made no step for 60 s after step 30, 60 times its median"
    assert job.wait(1) == (
        "rank 1 has made no step for 61 s after step 30, 61 times its median; "
        "rank 0 has made no step for 60 s after step 31, 60 times its median"
    )


def test_one_rank_may_hang_where_others_go_on() -> None:
    """Steps of other ranks do not hide one that hangs."""
    job = Job()
    job.wait(5, steps=True)
    for _ in range(61):
        job.step(0)
        found = job.wait(1)
    assert found.startswith("rank 1 has made no step for 61 s")
    assert "rank 0" not in found


def test_no_rank_hangs_before_its_first_beat() -> None:
    """Starting, compiling and loading may take any time."""
    assert not Job().wait(10_000)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_wait_for_one_that_saves_or_is_stopped(rank: int) -> None:
    """While any rank saves, restores, is stopped or is done none hangs, and the time begins anew after that."""
    job = Job()
    job.wait(5, steps=True)
    job.excuse(rank, True)
    assert not job.wait(10_000)
    job.excuse(rank, False)
    assert not job.wait(59)
    assert job.wait(2)


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """A host that was suspended, or a job that was stopped as a whole, does not hang when it goes on."""
    job = Job()
    job.wait(5, steps=True)
    job.now += 86_400
    assert not job.wait(30)


def test_the_limit_grows_with_pauses_that_the_training_makes() -> None:
    """After an evaluation of nearly the limit, a pause twice as long is none that hangs."""
    job = Job()
    job.wait(5, steps=True)
    assert not job.wait(55)
    job.wait(5, steps=True)
    assert not job.wait(105)
    assert job.wait(10)


def test_ranks_that_are_started_again_begin_anew() -> None:
    """The judgement of a process ends with it, whatever process has its number next."""
    job = Job()
    job.wait(5, steps=True)
    assert job.wait(61)
    job.pulses = [pulse._replace(process=(pulse.process[0], 2), beats=0, step=0) for pulse in job.pulses]
    assert not job.wait(1000)


def test_a_straggler_is_named_once() -> None:
    """A rank slower than 1.5 times the median of the ranks is named with both numbers, once; one that is 1.4 times is not."""
    job = Job(ranks=4)
    told = []
    for second in range(400):
        job.now += 1
        for rank, seconds in enumerate((5, 5, 7, 8)):
            if second % seconds == 0:
                job.step(rank)
        assert not job.watch.look(job.pulses, job.now)
        told += job.watch.new_stragglers()
    assert told == ["rank 3 is slow: 8 s a step, 1.6 times the median of 4 ranks"]


def test_a_rank_alone_is_no_straggler() -> None:
    """One rank is never slower than the median of one."""
    job = Job(ranks=1)
    job.wait(100, steps=True)
    assert not job.watch.new_stragglers()


@pytest.fixture
def page() -> Iterator[HeartbeatPage]:
    made = HeartbeatPage()
    yield made
    made.close()


def test_a_process_with_a_page_of_its_own_is_a_rank(page: HeartbeatPage) -> None:
    """A page makes its process a rank, and no child that has inherited it."""
    child = os.fork()
    if not child:
        signal.pause()
    try:
        assert find_ranks(child) == []
        (whole,) = [rank for rank in find_ranks(os.getpid()) if rank.pid == os.getpid()]
        assert whole.ticks == processes.start_ticks(os.getpid())
        # Other tests may have left pages in this process.
        (own,) = [one for one in whole.pages if os.fstat(one).st_ino == os.fstat(page.fd).st_ino]
        rank = whole._replace(pages=(own,))
        page.beat(7)
        first = rank.pulse()
        assert first is not None
        assert (first.beats, first.step, first.excused) == (1, 7, False)
        page.set_busy(True)
        assert rank.pulse() == first._replace(excused=True)
        page.set_busy(False)
        page.say_goodbye(Goodbye.FAILED)
        assert rank.pulse() == first
        page.say_goodbye(Goodbye.CLOSED)
        closed = rank.pulse()
        assert closed is not None
        assert (closed.beats, closed.excused) == (0, True)
        whole.close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.skipif(os.getuid() != 0, reason="makes a pid namespace")
def test_a_rank_in_a_container_is_found() -> None:
    """A rank that has another pid for itself, in a pid namespace of its own, is found by ours."""
    with _rank_process("", "unshare", "--pid", "--fork", "--kill-child") as process:
        (rank,) = find_ranks(process.pid)
        assert rank.pid != process.pid
        assert processes.own_pid(rank.pid) == read_page(rank.pages[0]).pid == 1
        rank.close()
        process.kill()


@pytest.mark.parametrize("is_interactive", [False, True])
def test_an_interactive_session_is_excused(monkeypatch: pytest.MonkeyPatch, is_interactive: bool) -> None:
    """A notebook is excused for good, before and after its saves; a program only while it saves."""
    if is_interactive:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    else:
        monkeypatch.delattr(sys, "ps1", raising=False)
    heartbeat = TrainerHeartbeat("run", "/work", None)
    seen = [read_page(heartbeat.fds[1]).busy]
    with heartbeat.busy():
        seen.append(read_page(heartbeat.fds[1]).busy)
    seen.append(read_page(heartbeat.fds[1]).busy)
    heartbeat.closing(None)
    assert seen == [is_interactive, True, is_interactive]


def test_a_stopped_rank_is_excused() -> None:
    """SIGSTOP excuses a rank until it goes on, and a rank that has ended has no pulse."""
    with _rank_process() as process:
        (rank,) = find_ranks(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert rank.pulse().excused  # type: ignore[union-attr]
        process.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED)
        assert not rank.pulse().excused  # type: ignore[union-attr]
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert rank.pulse() is None
        rank.close()


class Loop:
    """The watch of one rank, a process that sleeps and whose pulse a test gives; a second passes at each pause."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, page: HeartbeatPage) -> None:
        self.page = page
        self.now, self.beats, self.step = 1000.0, 0, 0
        self.beats_at = 0.0
        """Time of a beat that comes by itself."""
        self.said: list[str] = []
        self.process = self.start()
        monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        monkeypatch.setattr(watch, "complain", self.said.append)
        monkeypatch.setattr(
            watch, "find_ranks", lambda top: [self.rank()] if self.process.poll() is None else []
        )
        monkeypatch.setattr(Rank, "pulse", lambda rank: self.pulse(rank))
        self.watch = HungRanks(1, 60.0, page, lambda: False)

    def start(self) -> subprocess.Popen[bytes]:
        self.beats = 0
        return subprocess.Popen(["sleep", "300"])

    def rank(self) -> Rank:
        return Rank(self.process.pid, 1, os.pidfd_open(self.process.pid), (), "rank 0")

    def pulse(self, rank: Rank) -> Pulse | None:
        if self.process.poll() is not None:
            return None
        beats = self.beats + (0 < self.beats_at <= self.now)
        return Pulse((rank.pid, rank.ticks), rank.label, beats, self.step, 0, False)

    def sleep(self, seconds: float) -> None:
        self.now += max(1.0, seconds)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(0.01)

    def hang_at(self, step: int) -> list[str]:
        """Let the rank make a step and then none; return what was said."""
        self.said.clear()
        self.step = step
        self.beats += 1
        for _ in range(70):
            self.watch._look()
            self.now += 1
        return list(self.said)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch, page: HeartbeatPage) -> Iterator[Loop]:
    made = Loop(monkeypatch, page)
    yield made
    made.watch._close()
    made.process.kill()
    made.process.wait()


def test_a_rank_that_goes_on_is_left_alone(loop: Loop) -> None:
    """A beat that comes while stacks are read keeps the rank, and the page takes back that it hangs."""
    loop.beats_at = 1061.0
    assert loop.hang_at(5)[-1] == "ciuic: it goes on, and is left alone"
    assert loop.process.poll() is None
    assert not read_page(loop.page.fd).hung


def test_a_job_that_hangs_at_one_step_is_not_restarted_for_ever(loop: Loop) -> None:
    """Three ends without a step beyond are the last; a step beyond begins the count anew."""
    for step in (5, 3, 5, 6, 6, 4):
        assert "ciuic: ends 1 rank, for the launcher to start again" in loop.hang_at(step)
        assert loop.process.wait(60) == -signal.SIGTERM
        assert read_page(loop.page.fd).reason.startswith("rank 0 has made no step for 60 s")
        loop.process = loop.start()
    said = loop.hang_at(6)
    assert said[-1] == "ciuic: left as it is: it was started again 3 times, and never got beyond step 6"
    assert loop.process.poll() is None
    assert read_page(loop.page.fd).hung


_RANK = """
import sys, time
from ciuic.protocol.heartbeat_page import HeartbeatPage
page = HeartbeatPage()
other = HeartbeatPage()
if sys.argv[1] == "stacks":
    other.append_stacks_at_signal()
    page.append_stacks_at_signal()
    other.close()
def hangs_here():
    print(flush=True)
    sys.stdin.read()
hangs_here()
"""


def _rank_process(how: str = "", *before: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [*before, sys.executable, "-c", _RANK, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "RANK": "3"}
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    return process


def _stacks(rank: Rank) -> bytes:

    pages = rank.ask_for_stacks()
    return until(  # type: ignore[no-any-return]
        "the stacks", lambda: b"".join(read_stacks(page, start) for page, start in pages.items())
    )


def test_ranks_are_found_beside_processes_that_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of others, of which a /proc with hidepid=1 shows the numbers alone, keep no rank from being found."""
    stat_fields = processes.stat_fields

    def fields(pid: int) -> list[str]:
        if pid == 1:
            raise PermissionError
        return stat_fields(pid)

    monkeypatch.setattr(processes, "stat_fields", fields)
    page = HeartbeatPage()
    (rank,) = (one for one in find_ranks(os.getpid()) if one.pid == os.getpid())
    rank.close()
    page.close()


def test_stacks_of_a_rank_are_read_and_it_goes_on() -> None:
    """The stacks of a rank in a system call are had by a signal, again each time, and it does not notice."""
    with _rank_process("stacks") as process:
        (rank,) = find_ranks(process.pid)
        assert rank.label == f"rank 3 (pid {process.pid})"
        for _ in range(2):
            found = _stacks(rank)
            assert found.count(b"in hangs_here") == 1, found
        rank.close()
        process.communicate(b"", timeout=60)
        assert process.returncode == 0


def test_a_process_without_the_handler_is_not_signalled() -> None:
    """A rank that does not show its stacks gets no signal, which would end it."""
    with _rank_process() as process:
        (rank,) = find_ranks(process.pid)
        assert not processes.catches(process.pid, STACKS_SIGNAL)
        rank.ask_for_stacks()
        rank.close()
        process.communicate(b"", timeout=60)
        assert process.returncode == 0
