"""Heartbeat page of a manager: beats while the training goes on, and how it ended."""

from __future__ import annotations

import atexit
import subprocess
import sys
from pathlib import Path

import pytest

from ciuic import SnapshotManager
from ciuic.protocol.heartbeat_page import Goodbye, HeartbeatReading, read_page
from ciuic.training import ManagerOptions
from ciuic.training.writer.heartbeat import TrainerHeartbeat


def reading_of(heartbeat: TrainerHeartbeat) -> HeartbeatReading:
    _, page = heartbeat.fds
    return read_page(page)


def test_steps_reports_and_saves_are_beats(tmp_path: Path) -> None:
    """Steps, reports and saves beat on the page; closing the manager says goodbye."""
    manager = SnapshotManager(tmp_path / "s", options=ManagerOptions(heartbeat_seconds=5))
    heartbeat = manager._coordinator.heartbeat
    assert heartbeat.hello is not None
    assert (heartbeat.hello.heartbeat_seconds, heartbeat.hello.where) == (5.0, str(tmp_path / "s"))
    assert reading_of(heartbeat).beats == 0
    manager.report(loss=1.0)
    manager.save_snapshot(table={"a": 1}, step=7)
    manager.report(loss=0.5)
    assert reading_of(heartbeat)[:2] == (3, 7)
    manager.close()
    assert reading_of(heartbeat).goodbye is Goodbye.CLOSED


@pytest.mark.parametrize(
    ("error", "goodbye", "reason"),
    [
        (None, Goodbye.CLOSED, ""),
        (ValueError("x"), Goodbye.FAILED, "ValueError: x"),
        (SystemExit(3), Goodbye.FAILED, "ended with status 3"),
        (SystemExit(0), Goodbye.CLOSED, ""),
        (KeyboardInterrupt(), Goodbye.CLOSED, ""),
    ],
)
def test_an_end_by_an_exception_is_no_goodbye(
    error: BaseException | None, goodbye: Goodbye, reason: str
) -> None:
    """An exception counts as a failure, except those by which the user or the program ends the run."""
    heartbeat = TrainerHeartbeat("t", "/w", None)
    heartbeat.closing(error)
    assert (reading_of(heartbeat).goodbye, reading_of(heartbeat).reason) == (goodbye, reason)
    atexit.unregister(heartbeat._at_exit)  # it stays registered where the end was a failure


def test_preemption_is_a_goodbye_that_stays_unless_the_training_goes_on() -> None:
    """A goodbye for preemption outlasts the exit that follows; a beat takes it back."""
    heartbeat = TrainerHeartbeat("t", "/w", None)
    heartbeat.preempted()
    heartbeat.closing(SystemExit(143))
    assert reading_of(heartbeat).goodbye is Goodbye.PREEMPTED
    heartbeat.beat(3)
    assert reading_of(heartbeat).goodbye is Goodbye.NONE
    heartbeat.closing(None)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_heartbeat_that_cannot_be_meant_is_refused(tmp_path: Path, seconds: float) -> None:
    """An invalid heartbeat_seconds is refused at once, by name."""
    with pytest.raises(ValueError, match="heartbeat_seconds"):
        SnapshotManager(tmp_path / "s", options=ManagerOptions(heartbeat_seconds=seconds))


_PROGRAM = """
import atexit, os, sys
from ciuic.training.writer.heartbeat import TrainerHeartbeat
from ciuic.protocol.heartbeat_page import read_page
heartbeat = TrainerHeartbeat("t", "/w", None)
_, page = heartbeat.fds
copy = os.dup(page)
out = os.dup(1)
# After everything that atexit runs: the last of those registered first.
atexit._clear()
atexit.register(lambda: os.write(out, read_page(copy).goodbye.name.encode()))
atexit.register(heartbeat._at_exit)
{end}
"""


@pytest.mark.parametrize(
    ("end", "goodbye"),
    [
        ("pass", "CLOSED"),
        ("raise ValueError('x')", "FAILED"),
        ("raise KeyboardInterrupt", "CLOSED"),
        ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    heartbeat.closing(sys.exc_info()[1])", "CLOSED"),
        (
            "if not os.fork():\n    sys.exit(0)\nos.wait()\nos.write(out, b'child left it ' )",
            "child left it CLOSED",
        ),
    ],
)
def test_only_an_uncaught_exception_is_a_failure(end: str, goodbye: str) -> None:
    """A caught exception is no failure, an uncaught one is; a forked child says nothing."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM.format(end=end)], capture_output=True, check=False)
    assert done.stdout.decode().removeprefix("NONE") == goodbye, done.stderr.decode()
