"""Finds and removes what a test should have removed: mounts, loop devices, processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_GRACE_SECONDS = 5.0
_HELPERS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver", b"dmypy")


class Stock(NamedTuple):
    """What there was at one moment: mount ids with their points, loop devices, child processes."""

    mounts: dict[int, str]
    loops: dict[str, str]
    children: dict[int, str]


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
