"""Tests of the priority of real processes for processor and disk, and that the kernel gets it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.until import until

from ciuic.system.precedence import _SYSCALLS, BEST_EFFORT, IDLE, MAX_NICE_WITHOUT_RETURN, IoPriority, place
from ciuic.system.privileges import Capability, permitted

_IDLE = IoPriority(IDLE, 0)
_TWO_THREADS = "import threading, signal; threading.Thread(target=signal.pause, daemon=True).start(); print(flush=True); signal.pause()"


def io_class_of(thread: int) -> int:
    """Return the I/O class of a thread (ioprio_get(2), whose number follows that of ioprio_set)."""
    number = _SYSCALLS[os.uname().machine] + 1
    value: int = ctypes.CDLL(None).syscall(ctypes.c_long(number), 1, thread)
    return value >> 13


def autogroup_nice(pid: int) -> str | None:
    """Return the nice value of the process's session, or None where it has no group of its own."""
    path = Path(f"/proc/{pid}/autogroup")
    text = path.read_text() if path.exists() else ""
    return text.split()[-1] if text.strip() else None


@pytest.fixture
def process() -> Iterator[int]:
    """Start a process with two threads and a session of its own."""
    child = subprocess.Popen(
        [sys.executable, "-c", _TWO_THREADS], stdout=subprocess.PIPE, start_new_session=True
    )
    assert child.stdout is not None
    child.stdout.readline()
    try:
        yield child.pid
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


@pytest.mark.skipif(Capability.SYS_NICE not in permitted(), reason="raising others takes CAP_SYS_NICE")
def test_all_threads_go_down_and_come_back(process: int) -> None:
    """Nice value, session and I/O class of all threads are lowered and raised together."""
    threads = [int(name) for name in os.listdir(f"/proc/{process}/task")]
    assert len(threads) == 2
    for share, nice, io_class in ((0.01, 19, IDLE), (0.5, 3, BEST_EFFORT), (1.0, 0, BEST_EFFORT)):

        def has_place(share: float = share, nice: int = nice) -> bool:
            # The kernel accepts one value a tenth of a second for a session.
            place(process, share, _IDLE)
            return autogroup_nice(process) in (None, str(nice))

        until("the session's nice value", has_place)
        assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {nice}
        assert {io_class_of(thread) for thread in threads} == {io_class}


def test_nothing_rises_above_its_parent(process: int) -> None:
    """A daemon started at nice 7 starts nothing at nice 0."""
    place(process, 1.0, _IDLE, min_nice=7)
    assert os.getpriority(os.PRIO_PROCESS, process) == 7


def test_a_process_that_is_gone_is_no_error() -> None:
    """A process that ended between two steps is no error."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    place(child.pid, 0.5, _IDLE)


def test_priority_is_lowered_only_as_far_as_it_can_be_raised() -> None:
    """A process whose priority could not be raised again is not lowered so far, or raises itself first.

    Without RLIMIT_NICE or a privileged parent nice 19 would be for ever.
    """
    program = """
        import os, resource
        from ciuic.system import precedence
        from ciuic.system.privileges import keep_only
        keep_only(())  # as in a container, and a kernel that lets nobody raise itself
        one = precedence.Precedence("idle")
        one.take(0.01); low = os.getpriority(os.PRIO_PROCESS, 0)
        one.take(1.0); print(low, os.getpriority(os.PRIO_PROCESS, 0), resource.getrlimit(resource.RLIMIT_NICE)[0])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    low, high, limit = map(int, done.stdout.split())
    # Another test may have lowered this process.
    own = os.getpriority(os.PRIO_PROCESS, 0)
    if limit >= 20:
        assert (low, high) == (19, own)
    else:
        assert low == high == max(MAX_NICE_WITHOUT_RETURN, own)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("idle", (3, 0)),
        ("none", (0, 0)),
        ("best-effort", (2, 4)),
        ("best-effort:0", (2, 0)),
        (" Best-Effort:7 ", (2, 7)),
    ],
)
def test_each_form_of_the_configuration(text: str, expected: tuple[int, int]) -> None:
    """Each documented form of class and level is parsed."""
    assert IoPriority.parse(text) == expected


@pytest.mark.parametrize(
    "text", ["", "idle:3", "none:1", "best-effort:", "best-effort:8", "realtime", "best-effort:11"]
)
def test_invalid_priorities_are_refused(text: str) -> None:
    """Any other text is refused, so that a typing error does not mean full speed."""
    with pytest.raises(ValueError, match="I/O priority"):
        IoPriority.parse(text)


@pytest.mark.parametrize(("text", "shown"), [("idle", "idle"), ("best-effort:6", "best-effort: prio 6")])
def test_the_kernel_has_it_afterwards(text: str, shown: str) -> None:
    """A process has the I/O priority afterwards, as ionice(1) reads it."""
    program = (
        "import os, subprocess\n"
        "from ciuic.system.precedence import IoPriority, set_io_priority\n"
        f"set_io_priority(IoPriority.parse({text!r}))\n"
        "subprocess.run(['ionice', '-p', str(os.getpid())], check=True)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30
    )
    assert found.stdout.strip() == shown
