"""Memory that this process may still take before the kernel begins to kill processes.

An arena takes its memory page by page while it is filled, so no call fails when there is none left: the
amount has to be asked before.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

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
