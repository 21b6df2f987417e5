"""Tests of how a trainer's end and silence are judged from its page, the kernel and its files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ciuic.config import TrainerConfig
from ciuic.daemon.trainers.registry import ProcessIdentity, WatchedTrainer, judge
from ciuic.daemon.trainers.watch import look_at
from ciuic.protocol.heartbeat_page import (
    Goodbye,
    HeartbeatPage,
    HeartbeatReading,
    check_page,
    read_losses,
    read_page,
)
from ciuic.system import processes

KILLED = signal.SIGKILL.value
CRASHED = signal.SIGSEGV.value
INTERRUPTED = signal.SIGINT.value


def status_of(code: int) -> int:
    return code << 8


OPEN, CLOSED = HeartbeatReading(3, 7), HeartbeatReading(3, 7, 0, Goodbye.CLOSED)
PREEMPTED = HeartbeatReading(3, 7, 0, Goodbye.PREEMPTED)
FAILED = HeartbeatReading(3, 7, 0, Goodbye.FAILED, "ValueError: x")


@pytest.mark.parametrize(
    ("pulses", "status", "kind"),
    [
        ([OPEN], KILLED, "died"),
        ([OPEN], None, "died"),
        ([OPEN], status_of(1), "failed"),
        ([OPEN], 0, None),
        ([OPEN], INTERRUPTED, None),
        ([CLOSED], 0, None),
        ([CLOSED], None, None),
        ([CLOSED], CRASHED, None),
        ([CLOSED], status_of(1), "failed"),
        ([FAILED], status_of(1), "failed"),
        ([FAILED], None, "failed"),
        ([FAILED], 0, None),
        ([PREEMPTED], status_of(143), None),
        ([PREEMPTED], KILLED, None),
        ([PREEMPTED, OPEN], KILLED, "died"),
        ([CLOSED, OPEN], KILLED, "died"),
        ([CLOSED, OPEN], None, "died"),
        ([], 0, None),
        ([], KILLED, "died"),
        ([], None, "died"),
    ],
)
def test_an_end_is_judged_by_goodbye_and_exit_status(
    pulses: list[HeartbeatReading], status: int | None, kind: str | None
) -> None:
    """A trainer with a goodbye ended well unless its exit status is an error; without one it died."""
    assert judge(pulses, status, paged=bool(pulses)).kind == kind


def test_reason_is_that_of_the_trainer() -> None:
    """The reason of an incident names the trainer's exception or its signal."""
    assert judge([FAILED], status_of(1), paged=True).reason == "ValueError: x"
    assert judge([OPEN], KILLED, paged=True).reason == "was killed by SIGKILL"


@pytest.fixture
def page() -> Iterator[HeartbeatPage]:
    made = HeartbeatPage()
    yield made
    made.close()


def test_a_heartbeat_page_reads_back(page: HeartbeatPage) -> None:
    """Beats, step, time and goodbye are read back, and control characters in texts are made harmless."""
    before = time.monotonic_ns()
    page.beat(5)
    page.beat()
    assert read_page(page.fd)[:2] == (2, 5)
    assert before <= read_page(page.fd).beat_ns <= time.monotonic_ns()
    page.say_goodbye(Goodbye.FAILED, "a\x1b[31mb\n" + "ü" * 1000)
    reading = read_page(page.fd)
    assert reading.goodbye is Goodbye.FAILED
    assert reading.reason.startswith("a [31mb üü")
    assert reading.reason.isprintable()


def test_losses_read_back(page: HeartbeatPage) -> None:
    """The last 128 losses are read once each, the oldest first, NaN included."""
    assert read_losses(page.fd, 0) == (0, ())
    page.report_loss(5, 2.5)
    page.report_loss(6, float("nan"))
    first = read_losses(page.fd, 0)
    assert (first.total, first.losses[0], len(first.losses)) == (2, (5, 2.5), 2)
    assert first.losses[1][1] != first.losses[1][1]
    for step in range(200):
        page.report_loss(step, 1.0)
    found = read_losses(page.fd, first.total)
    assert (found.total, len(found.losses)) == (202, 128)
    assert [step for step, _ in found.losses] == list(range(72, 200))
    assert read_losses(page.fd, 202).losses == ()
    page.report_loss(200, 1.0)
    assert read_losses(page.fd, 202).losses == ((200, 1.0),)
    # The trainer may write anything.
    os.pwrite(page.fd, b"\xff" * 3072, 0)
    assert len(read_losses(page.fd, 203).losses) == 128


def test_a_child_does_not_speak_for_its_parent(page: HeartbeatPage) -> None:
    """A forked child that ends writes no goodbye for its parent."""
    child = os.fork()
    if not child:
        page.say_goodbye(Goodbye.CLOSED)
        page.report_save("x")
        os._exit(0)
    os.waitpid(child, 0)
    assert read_page(page.fd) == HeartbeatReading(pid=os.getpid())


def test_an_error_of_a_save_is_shown_as_far_as_it_fits(page: HeartbeatPage) -> None:
    """An error is cut to what the page has room for and made printable; it disturbs neither losses nor reason, nor they it."""
    page.report_loss(1, 2.0)
    page.say_goodbye(Goodbye.FAILED, "r" * 600)
    page.report_save("e\x1b[2J" + "\u20ac" * 200)
    found = read_page(page.fd)
    assert found.save_error.isprintable()
    assert found.save_error.startswith("e [2J\u20ac")
    assert (found.failed_saves, found.reason) == (1, "r" * 511)
    assert read_losses(page.fd, 0).losses == ((1, 2.0),)
    page.report_save()
    assert read_page(page.fd)[5] == 0
    assert not read_page(page.fd).save_error


def test_descriptors_without_a_page_are_refused(tmp_path: Path) -> None:
    """Files, pipes, memory that may shrink and memory with other content are not read as pages."""
    (tmp_path / "file").write_bytes(bytes(4096))
    read_end, write_end = os.pipe()
    shrinking = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(shrinking, 4096)
    other = HeartbeatPage()
    os.pwrite(other.fd, b"somebody", 0)
    fds = [os.open(tmp_path / "file", os.O_RDWR), read_end, write_end, shrinking, os.dup(other.fd)]
    try:
        for fd in fds:
            with pytest.raises(ValueError, match=r"memfd|memory|page"):
                check_page(fd)
    finally:
        for fd in fds:
            os.close(fd)


def trainer(heartbeat_seconds: float = 3.0) -> WatchedTrainer:
    return WatchedTrainer(
        ProcessIdentity(0, 1, 2), -1, name="t", where="/w", kind="library", heartbeat_seconds=heartbeat_seconds, since_ns=0
    )  # fmt: skip


def test_silence_is_reported_once_until_it_beats_again(page: HeartbeatPage) -> None:
    """Silence after a first beat is one incident, and the next beat arms it again."""
    watched = trainer()
    watched.add_page(os.dup(page.fd))
    assert [watched.look(1.0, 0) for _ in range(10)] == ["beat"] + ["silent"] * 9
    page.beat(1)
    assert [watched.look(1.0, 0) for _ in range(6)] == [
        "beat",
        "silent",
        "silent",
        "hung",
        "silent",
        "silent",
    ]
    assert watched.status().state == "hung"
    page.beat(2)
    assert [watched.look(1.0, 0) for _ in range(4)] == ["recovered", "silent", "silent", "hung"]
    watched.close()


def test_page_that_says_hung_is_reported_once_until_it_beats(page: HeartbeatPage) -> None:
    """A trainer whose page says that it hangs hangs for that reason, without a limit, until the page beats again."""
    watched = trainer(heartbeat_seconds=0.0)
    watched.add_page(os.dup(page.fd))
    page.say_hung("rank 3")
    assert [watched.look(1.0, 0) for _ in range(4)] == ["beat", "hung", "silent", "silent"]
    assert (watched.status().state, watched.hung_reason) == ("hung", "rank 3")
    page.say_hung("")
    page.beat()
    assert [watched.look(1.0, 0) for _ in range(2)] == ["recovered", "silent"]
    watched.close()


def test_trainer_after_its_goodbye_may_be_silent(page: HeartbeatPage) -> None:
    """A trainer after its goodbye does not count as hung, however long its process stays."""
    watched = trainer()
    watched.add_page(os.dup(page.fd))
    page.beat(1)
    watched.look(1.0, 0)
    page.say_goodbye(Goodbye.CLOSED)
    assert {watched.look(1.0, 0) for _ in range(9)} == {"silent"}
    assert watched.status().state == "closed"
    watched.close()


def beaten(page: HeartbeatPage, *, each_seconds: int, heartbeat_seconds: float = 0.0) -> WatchedTrainer:
    """Return a trainer that has beaten twenty times."""
    watched = trainer(heartbeat_seconds)
    watched.add_page(os.dup(page.fd))
    for step in range(20):
        page.beat(step)
        for _ in range(each_seconds):
            watched.look(1.0, 0)
    return watched


@pytest.mark.parametrize(("each_seconds", "limit_seconds"), [(1, 300), (10, 300), (60, 1200)])
def test_silence_for_much_longer_than_usual_is_told(
    page: HeartbeatPage, each_seconds: int, limit_seconds: int
) -> None:
    """Twenty usual intervals of silence are too long, at least 5 minutes, and the next beat ends it."""
    watched = beaten(page, each_seconds=each_seconds)
    for _ in range(limit_seconds - each_seconds + 1):
        watched.look(1.0, 0)
    assert watched.silent_too_long(20) == 0
    watched.look(1.0, 0)
    assert watched.silent_too_long(20) == each_seconds
    assert watched.silent_too_long(0) == 0
    page.beat(21)
    watched.look(1.0, 0)
    assert watched.silent_too_long(20) == 0
    watched.close()


def test_a_long_pause_that_happened_before_is_usual(page: HeartbeatPage) -> None:
    """A trainer that validates for half an hour now and then is not silent within twice that."""
    watched = beaten(page, each_seconds=1)
    for _ in range(1800):
        watched.look(1.0, 0)
    assert watched.silent_too_long(20)
    page.beat(21)
    for _ in range(3500):
        watched.look(1.0, 0)
    assert not watched.silent_too_long(20)
    for _ in range(200):
        watched.look(1.0, 0)
    assert watched.silent_too_long(20)
    watched.close()


def test_no_silence_of_one_that_is_done_or_has_a_limit(page: HeartbeatPage) -> None:
    """A time limit of its own, a goodbye, and a process that is gone leave nothing to tell."""
    limited = beaten(page, each_seconds=1, heartbeat_seconds=9e9)
    watched = beaten(page, each_seconds=1)
    for _ in range(1000):
        limited.look(1.0, 0)
        watched.look(1.0, 0)
    assert (limited.silent_too_long(20), watched.silent_too_long(20)) == (0, 1)
    watched.present = False
    assert watched.silent_too_long(20) == 0
    watched.present = True
    page.say_goodbye(Goodbye.CLOSED)
    assert watched.silent_too_long(20) == 0
    watched.close()
    limited.close()


def test_a_heartbeat_file_of_an_earlier_run_is_no_incident() -> None:
    """A heartbeat file of an earlier run counts from when it was first seen to change."""
    watched = trainer()
    watched.file_beats = 10
    assert "hung" not in {watched.look(1.0, 0) for _ in range(9)}
    watched.file_beats = 11
    assert [watched.look(1.0, 0) for _ in range(4)] == ["beat", "silent", "silent", "hung"]


def test_page_sent_again_is_not_added(page: HeartbeatPage) -> None:
    """A page sent again by a restarted writer is not added, and a seventeenth page replaces the oldest."""
    watched = trainer()
    for _ in range(3):
        watched.add_page(os.dup(page.fd))
    assert len(watched.pulses()) == 1
    others = [HeartbeatPage() for _ in range(20)]
    for other in others:
        watched.add_page(os.dup(other.fd))
    assert len(watched.pulses()) == 16
    watched.close()
    for other in others:
        other.close()


def test_a_pid_that_is_another_processs_by_now_is_not_believed(tmp_path: Path) -> None:
    """A reused pid is recognized by its start time, also in a pid file older than the process."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        ticks = processes.start_ticks(child.pid)
        os.close(processes.life_of(child.pid, ticks))
        with pytest.raises(ProcessLookupError):
            processes.life_of(child.pid, ticks - 1)
        file = tmp_path / "pid"
        file.write_text(f"{child.pid}\n")
        wanted = TrainerConfig("t", pid_file=file)
        assert look_at(wanted).pid == child.pid
        an_hour_ago = time.time() - 3600
        os.utime(file, (an_hour_ago, an_hour_ago))
        assert look_at(wanted).pid == 0
    finally:
        child.kill()
        child.wait()
    file.write_text(f"{child.pid}\n")
    assert look_at(wanted).pid == 0
    for text in ("", "x", "-1", "1", "99999999999"):
        file.write_text(text)
        assert look_at(wanted).pid == 0


def test_the_exit_status_is_read_from_the_pidfd() -> None:
    """The exit status of a reaped process is read from its pidfd from Linux 6.15 on."""
    child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    life = processes.life_of(child.pid)
    assert processes.pid_of(life) == child.pid
    assert processes.owner(child.pid) == os.getuid()
    ticks = processes.start_ticks(child.pid)
    os.waitid(os.P_PIDFD, life, os.WEXITED | os.WNOWAIT)
    assert processes.end_of_zombie(child.pid, ticks) == 3 << 8
    assert processes.end_of_zombie(child.pid, ticks + 1) is None
    child.wait()
    assert processes.end_of_zombie(child.pid, ticks) is None
    assert processes.end_of(life) in (None, 3 << 8)
    os.close(life)
    with pytest.raises(ValueError, match="pidfd"):
        processes.pid_of(0)
