"""What a manager says of its training's life: beats while it goes on, and at its end what that was."""

from __future__ import annotations

import atexit
import subprocess
import sys
from pathlib import Path

import pytest

from ciuic import SnapshotManager
from ciuic.training.heartbeat import Heartbeat
from ciuic.watch_page import Goodbye, Pulse, read_page


def said(heartbeat: Heartbeat) -> Pulse:
    _, page = heartbeat.fds
    return read_page(page)


def test_steps_reports_and_saves_are_beats(tmp_path: Path) -> None:
    """Whatever tells the manager that the training goes on shows on its page; closing it is a goodbye."""
    manager = SnapshotManager(tmp_path / "s", heartbeat_seconds=5)
    heartbeat = manager._heartbeat
    assert heartbeat.hello is not None
    assert (heartbeat.hello.heartbeat_seconds, heartbeat.hello.where) == (5.0, str(tmp_path / "s"))
    assert said(heartbeat).beats == 0
    manager.report(loss=1.0)
    manager.save_snapshot(table={"a": 1}, step=7)
    manager.report(loss=0.5)
    assert said(heartbeat)[:2] == (3, 7)
    manager.close()
    assert said(heartbeat).goodbye is Goodbye.CLOSED


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
    """But for those by which a person or the program itself ends it."""
    heartbeat = Heartbeat("t", "/w", None)
    heartbeat.closing(error)
    assert (said(heartbeat).goodbye, said(heartbeat).reason) == (goodbye, reason)
    atexit.unregister(heartbeat._at_exit)  # it stays registered where the end was a failure


def test_preemption_is_a_goodbye_that_stays_unless_the_training_goes_on() -> None:
    """The exit that follows is what the platform wants; a beat takes it back."""
    heartbeat = Heartbeat("t", "/w", None)
    heartbeat.preempted()
    heartbeat.closing(SystemExit(143))
    assert said(heartbeat).goodbye is Goodbye.PREEMPTED
    heartbeat.beat(3)
    assert said(heartbeat).goodbye is Goodbye.NONE
    heartbeat.closing(None)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_heartbeat_that_cannot_be_meant_is_refused(tmp_path: Path, seconds: float) -> None:
    """At once, with its name."""
    with pytest.raises(ValueError, match="heartbeat_seconds"):
        SnapshotManager(tmp_path / "s", heartbeat_seconds=seconds)


_PROGRAM = """
import atexit, os, sys
from ciuic.training.heartbeat import Heartbeat
from ciuic.watch_page import read_page
heartbeat = Heartbeat("t", "/w", None)
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
def test_at_the_end_it_is_known_what_was_caught(end: str, goodbye: str) -> None:
    """An exception that the program lived through is none; one that ended it is; a child says nothing."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM.format(end=end)], capture_output=True, check=False)
    assert done.stdout.decode().removeprefix("NONE") == goodbye, done.stderr.decode()
