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

_GRACE_SECONDS = 5.0
_MAX_KEPT = 8
"""Descriptors that one test may leave: a process that forks others, memory that a thread keeps, and such belong to no test."""
_KEPT_TARGETS = ("/dev/null",)
"""Libraries open these once and keep them."""
_KEPT_THREADS = ("Trio thread",)
"""Pools of libraries: their threads wait for the next test."""
_HELPERS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver", b"dmypy")


class Inside(NamedTuple):
    """What this process had at one moment."""

    descriptors: dict[int, str]
    """What each descriptor refers to."""
    threads: frozenset[threading.Thread]

    @classmethod
    def take(cls) -> Inside:
        return cls(_descriptors(), frozenset(threading.enumerate()))

    def left(self) -> list[str]:
        """Descriptors and threads that are there now and were not, one line each. Nothing of them is removed.

        To be called when nothing refers to what the test used: descriptors close with the objects that own them.
        """
        if self._has_left():
            gc.collect()  # what a cycle of objects still held is not left behind
            deadline = time.monotonic() + _GRACE_SECONDS
            while self._has_left() and time.monotonic() < deadline:
                time.sleep(0.02)
        threads = [f"thread {thread.name}" for thread in self._new_threads()]
        kept = self._new_descriptors()
        if len(kept) <= _MAX_KEPT:
            return threads
        told = [f"descriptor {fd} ({target})" for fd, target in list(kept.items())[:_MAX_KEPT]]
        return [*threads, f"{len(kept)} descriptors, among them:", *told]

    def _has_left(self) -> bool:
        return len(self._new_descriptors()) > _MAX_KEPT or bool(self._new_threads())

    def _new_descriptors(self) -> dict[int, str]:
        return {
            fd: target
            for fd, target in _descriptors().items()
            if self.descriptors.get(fd) != target and not target.startswith(_KEPT_TARGETS)
        }

    def _new_threads(self) -> list[threading.Thread]:
        return [
            thread
            for thread in threading.enumerate()
            # A daemon thread ends with the process, and may wait for ever as it is meant to.
            if not (thread in self.threads or thread.daemon or thread.name.startswith(_KEPT_THREADS))
        ]


class Stock(NamedTuple):
    """What there was at one moment."""

    mounts: dict[int, str]
    """Mount points by mount id."""
    loops: dict[str, str]
    """Backing files by the name of the loop device."""
    children: dict[int, str]
    """Command lines by process id."""


def _unescape(field: str) -> str:
    """mountinfo writes blanks, tabs, newlines and backslashes in octal."""
    return (
        field.encode("latin-1").decode("unicode_escape").encode("latin-1").decode("utf-8", "surrogateescape")
    )


def _lies_below(path: str, below: Iterable[Path]) -> bool:
    return any(path == str(top) or path.startswith(f"{top}/") for top in below)


def mounts_below(below: Iterable[Path]) -> dict[int, str]:
    """Mount id → mount point, for every mount at or below the given directories."""
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
    for state in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):  # released while we looked
            file = state.read_text().strip().removesuffix(" (deleted)")
            if _lies_below(file, below):
                found[state.parts[3]] = file
    return found


def _child_pids() -> set[int]:
    """Every child of this process, orphans of the run included (see conftest), living and dead."""
    pids: set[int] = set()
    for tasks in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread ended
            pids.update(int(pid) for pid in tasks.read_text().split())
    return pids


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def living_children() -> dict[int, str]:
    """Live children of this process with their command lines."""
    found = {}
    for pid in _child_pids():
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if not _is_zombie(pid) and not any(helper in command for helper in _HELPERS):
                found[pid] = command.replace(b"\0", b" ").decode("utf-8", "replace").strip()
    return found


def _collect_zombies(before: Stock) -> None:
    """Takes note of the death of what began and ended during the test; nobody else will."""
    for pid in _child_pids() - before.children.keys():
        with contextlib.suppress(OSError):
            if _is_zombie(pid):
                os.waitpid(pid, os.WNOHANG)


def take_stock(below: Iterable[Path]) -> Stock:
    """What exists now."""
    below = tuple(below)
    return Stock(mounts_below(below), _loops_below(below), living_children())


def _descriptors() -> dict[int, str]:
    """Descriptors of this process with their targets: paths, or names such as "socket:[4711]"."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:  # pytest exchanges the standard ones around each test
            with contextlib.suppress(OSError):  # the listing's own is closed by now
                found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _new_children(before: Stock) -> dict[int, str]:
    return {pid: command for pid, command in living_children().items() if pid not in before.children}


def _new_loops(before: Stock, below: Iterable[Path]) -> dict[str, str]:
    return {loop: file for loop, file in _loops_below(below).items() if loop not in before.loops}


def remove_new(before: Stock, below: Iterable[Path]) -> list[str]:
    """Removes what is there now and was not before; one line for each thing, nothing when all is clean."""
    below = tuple(below)
    # What has been told to end may still be ending: only what outlives the grace is left behind.
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
    """Detaches every mount at or below ``top``, the innermost first."""
    for _, point in sorted(mounts_below((top,)).items(), reverse=True):
        _unmount(point)
