"""Processors and memory that this process may still use, by the kernel's own counts.

An arena takes its memory page by page while it is filled, so no call fails when there is none left: the
amount has to be asked before. Of the processors only those count that this process may run on; waiting for a disk
counts as idle, and a processor limit of a control group is not seen (/proc/stat, proc_stat(5)).
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

_MEMINFO: Final = Path("/proc/meminfo")
_OWN_GROUP: Final = Path("/proc/self/cgroup")
_GROUPS: Final = Path("/sys/fs/cgroup")
# Version 1 has no word for "no limit": the file holds a number near 2**63, rounded to pages.
_NO_LIMIT: Final = 1 << 60


def memory_left(meminfo: Path = _MEMINFO, own_group: Path = _OWN_GROUP, groups: Path = _GROUPS) -> int | None:
    """Return the least of the free bytes of the machine and of this process's control groups.

    The result is None if they are unknown.
    """
    found = [left for left in (_machine_left(meminfo), *_groups_left(own_group, groups)) if left is not None]
    return min(found, default=None)


def _machine_left(meminfo: Path) -> int | None:
    try:
        for line in meminfo.read_text().splitlines():
            # Not MemFree, which leaves out what the page cache would give back (proc(5)).
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return None


def _groups_left(own_group: Path, groups: Path) -> list[int | None]:
    try:
        text = os.fsdecode(own_group.read_bytes())
    except OSError:
        return []
    found: list[int | None] = []
    # Not splitlines(): of all control characters the kernel refuses the newline alone in a group's name.
    for line in filter(None, text.split("\n")):
        # A line is ID:CONTROLLERS:PATH (cgroups(7)); the colons keep one of another form from raising.
        _, controllers, path = (line + "::").split(":", 2)
        path = path.removesuffix("::")
        if not controllers:
            found += [_group_left(one) for one in _with_parents(groups, path)]
        # Version 1: without it clusters that still use it had copies for which the group had no room.
        elif "memory" in controllers.split(","):
            found += [_group_v1_left(one) for one in _with_parents(groups / "memory", path)]
    return found


def _with_parents(top: Path, path: str) -> list[Path]:
    """Return the directory of a group and those above it.

    In a container the group itself is the topmost one that is seen.
    """
    group = top / path.strip("/")
    return [one for one in (group, *group.parents) if one == top or top in one.parents]


def _group_left(group: Path) -> int | None:
    """Return the bytes left below the limit of a group of cgroup version 2; None: no limit."""
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # The kernel gives up cached file pages before it kills, so they count as free.
        return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None


def _group_v1_left(group: Path) -> int | None:
    """Return the bytes left below the limit of a group of cgroup version 1; None: no limit."""
    try:
        limit = int((group / "memory.limit_in_bytes").read_text())
        used = int((group / "memory.usage_in_bytes").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit >= _NO_LIMIT:
        return None
    # `total_`: with the groups below, as usage_in_bytes has them.
    return max(0, limit - used + int(stat.get("total_inactive_file", 0)))


_STAT: Final = "/proc/stat"
# Half a second of one processor (a tick is 10 ms): a shorter period tells nothing.
_MIN_TICKS: Final = 50


class _Ticks(NamedTuple):
    """Clock ticks since boot, summed over the processors of this process."""

    idle: int
    all: int


class CpuIdle:
    """Measures the idle share since `begin`."""

    def __init__(self, path: str = _STAT) -> None:
        """Begin the first measurement."""
        self._path = path
        self._before = self._ticks()

    def begin(self) -> None:
        """Begin another measurement."""
        self._before = self._ticks()

    def share(self) -> float | None:
        """Return the idle share since `begin`, 0 to 1.

        The result is None if the period is too short or the kernel does not tell.
        """
        before, now = self._before, self._ticks()
        if before is None or now is None or now.all - before.all < _MIN_TICKS:
            return None
        return (now.idle - before.idle) / (now.all - before.all)

    def _ticks(self) -> _Ticks | None:
        mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        idle = all_ = 0
        with suppress(OSError, ValueError, IndexError):
            with open(self._path, encoding="ascii") as file:
                for line in file:
                    name, *fields = line.split()
                    if name in mine:
                        # user nice system idle iowait irq softirq steal; guest time is in user time already.
                        ticks = [int(field) for field in fields[:8]]
                        idle, all_ = idle + ticks[3] + ticks[4], all_ + sum(ticks)
            return _Ticks(idle, all_) if all_ else None
        return None


# More threads than that wait for each other at the interpreter lock between the calls that release it.
_MAX_READERS: Final = 4


def reader_count() -> int:
    """Return the number of threads to read a state with: the processors of this process, from 2 to 4."""
    # Threads beyond the processors cost time: a state of 500 MB in differences took 1.7 s of processor time
    # with four on two processors, and 1.2 s with two. With one processor a second thread waits for the disk.
    return max(2, min(_MAX_READERS, len(os.sched_getaffinity(0))))
