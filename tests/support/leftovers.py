"""Find and remove what a test should have removed: mounts, loop devices, processes, descriptors, threads."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from support.until import until

_GRACE_SECONDS = 5.0
_MAX_KEPT = 8
"""Descriptors that one test may leave: of forking helpers, of a thread's memory, and of no test."""
MAX_KEPT_IN_UNIT_TESTS = 4
"""Descriptors that a test of tests/unit may leave: a library's event loop (4) or a traceback's.

The traceback of an expected exception keeps a SnapshotManager's 4 until pytest drops its records. Measured
with 0 over tests/unit: no other test leaves any.
"""
_KEPT_TARGETS = ("/dev/null",)
"""Files that libraries open once and keep."""
_KEPT_THREADS = ("Trio thread",)
"""Thread pools of libraries, which wait for the next test."""
_HELPERS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver", b"dmypy")


class Inside(NamedTuple):
    """Descriptors and threads of this process at one moment."""

    descriptors: dict[int, str]
    """Target of each descriptor."""
    threads: frozenset[threading.Thread]

    @classmethod
    def take(cls) -> Inside:
        return cls(descriptors(), frozenset(threading.enumerate()))

    def left(self, max_kept: int = _MAX_KEPT) -> list[str]:
        """Return a line for each new descriptor and thread since the earlier moment. Nothing is removed.

        Call it when no object refers to the test's resources: descriptors close with the objects that own
        them.
        """
        if self._has_left(max_kept):
            deadline = time.monotonic() + _GRACE_SECONDS
            # Objects held only by a cycle are not left behind, nor is what a thread keeps that is about to end: collected
            # before its end, a cycle that it refers to would stay.
            gc.collect()
            while self._has_left(max_kept) and time.monotonic() < deadline:
                time.sleep(0.05)
                gc.collect()
        threads = [f"thread {thread.name}" for thread in self._new_threads()]
        kept = self._new_descriptors()
        if len(kept) <= max_kept:
            return threads
        descriptions = [f"descriptor {fd} ({target})" for fd, target in list(kept.items())[:_MAX_KEPT]]
        return [*threads, f"{len(kept)} descriptors, among them:", *descriptions]

    def _has_left(self, max_kept: int) -> bool:
        return len(self._new_descriptors()) > max_kept or bool(self._new_threads())

    def _new_descriptors(self) -> dict[int, str]:
        return {
            fd: target
            for fd, target in descriptors().items()
            if self.descriptors.get(fd) != target and not target.startswith(_KEPT_TARGETS)
        }

    def _new_threads(self) -> list[threading.Thread]:
        return [
            thread
            for thread in threading.enumerate()
            # A daemon thread ends with the process and may wait for ever by design.
            if not (thread in self.threads or thread.daemon or thread.name.startswith(_KEPT_THREADS))
        ]


class Stock(NamedTuple):
    """Mounts, loop devices and children at one moment."""

    mounts: dict[int, str]
    """Mount points by mount id."""
    loops: dict[str, str]
    """Backing files by the name of the loop device."""
    children: dict[int, str]
    """Command lines by process id."""


def _unescape(field: str) -> str:
    """Decode blanks, tabs, newlines and backslashes, which mountinfo writes in octal."""
    data = field.encode("latin-1")
    if "\\" in field:
        data = data.decode("unicode_escape").encode("latin-1")
    return data.decode("utf-8", "surrogateescape")


def _lies_below(path: str, below: Iterable[Path]) -> bool:
    return any(path == str(top) or path.startswith(f"{top}/") for top in below)


def mounts_below(below: Iterable[Path]) -> dict[int, str]:
    """Return mount id → mount point, for every mount at or below the given directories."""
    found = {}
    with open("/proc/self/mountinfo", encoding="latin-1") as lines:
        for line in lines:
            fields = line.split(" ")
            point = _unescape(fields[4])
            if _lies_below(point, below):
                found[int(fields[0])] = point
    return found


def _loops_below(below: Iterable[Path]) -> dict[str, str]:
    found = {}
    # Not by pathlib's glob, which takes more than twice as long: this runs three times for every test.
    for name in os.listdir("/sys/block"):
        if name.startswith("loop"):
            # Not in use, or released during the listing.
            with contextlib.suppress(OSError), open(f"/sys/block/{name}/loop/backing_file") as state:
                file = state.read().strip().removesuffix(" (deleted)")
                if _lies_below(file, below):
                    found[name] = file
    return found


def child_pids(parent: int | str = "self") -> set[int]:
    """Return the pids of every child of a process, adopted orphans included, living and dead."""
    pids: set[int] = set()
    for tasks in Path(f"/proc/{parent}/task").glob("*/children"):
        # The thread ended during the listing.
        with contextlib.suppress(OSError):
            pids.update(int(pid) for pid in tasks.read_text().split())
    return pids


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def living_children() -> dict[int, str]:
    """Return the live children of this process with their command lines."""
    found = {}
    for pid in child_pids():
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if not _is_zombie(pid) and not any(helper in command for helper in _HELPERS):
                found[pid] = command.replace(b"\0", b" ").decode("utf-8", "replace").strip()
    return found


def training_writer() -> int:
    """Return the process id of the one writer of training states that this process has started."""
    # The kernel shows no command line for a moment after the program has begun.
    (pid,) = until(
        "the start of a writer",
        lambda: [pid for pid, command in living_children().items() if "writer_process" in command],
    )
    return int(pid)


def _collect_zombies(before: Stock) -> None:
    """Reap children that began and ended during the test, which no other code waits for."""
    for pid in child_pids() - before.children.keys():
        with contextlib.suppress(OSError):
            if _is_zombie(pid):
                os.waitpid(pid, os.WNOHANG)


def take_stock(below: Iterable[Path]) -> Stock:
    """Return the present stock."""
    below = tuple(below)
    return Stock(mounts_below(below), _loops_below(below), living_children())


def descriptors() -> dict[int, str]:
    """Return the descriptors of this process with their targets: paths, or names such as "socket:[4711]"."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        # Around each test pytest replaces the standard descriptors.
        if int(name) > 2:
            # The listing's own descriptor is closed by now.
            with contextlib.suppress(OSError):
                found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _new_children(before: Stock) -> dict[int, str]:
    return {pid: command for pid, command in living_children().items() if pid not in before.children}


def _new_loops(before: Stock, below: Iterable[Path]) -> dict[str, str]:
    return {loop: file for loop, file in _loops_below(below).items() if loop not in before.loops}


def remove_new(before: Stock, below: Iterable[Path]) -> list[str]:
    """Remove what is new since the earlier stock; return one line for each thing."""
    below = tuple(below)
    # A process told to end may still be ending: only what outlives the grace is left behind.
    deadline = time.monotonic() + _GRACE_SECONDS
    while ((orphans := _new_children(before)) or _new_loops(before, below)) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = []
    for pid, command in orphans.items():
        left.append(f"process {pid} ({command})")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for mount_id, point in sorted(mounts_below(below).items(), reverse=True):
        if mount_id not in before.mounts:
            left.append(f"mount {point}")
            _unmount(point)
    for loop, file in _new_loops(before, below).items():
        left.append(f"/dev/{loop} on {file}")
        subprocess.run(["losetup", "-d", f"/dev/{loop}"], check=False, timeout=30)
    _collect_zombies(before)
    return left


def _unmount(point: str) -> None:
    subprocess.run(["umount", "-l", point], check=False, timeout=30, stderr=subprocess.DEVNULL)


def unmount_below(top: Path) -> None:
    """Detach every mount at or below ``top``, the innermost first."""
    for _, point in sorted(mounts_below((top,)).items(), reverse=True):
        _unmount(point)
