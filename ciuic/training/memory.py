"""How much memory this process may still take before the kernel begins to kill.

The memory of an arena is taken page by page when it is filled, so that no call fails where it is not there: it has to be asked before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_MEMINFO: Final = Path("/proc/meminfo")
_OWN_GROUP: Final = Path("/proc/self/cgroup")
_GROUPS: Final = Path("/sys/fs/cgroup")


def memory_left(meminfo: Path = _MEMINFO, own_group: Path = _OWN_GROUP, groups: Path = _GROUPS) -> int | None:
    """Bytes, of the machine and of every control group (version 2) that this process is in; None where that is not known."""
    found = [left for left in (_of_machine(meminfo), *_of_groups(own_group, groups)) if left is not None]
    return min(found, default=None)


def _of_machine(meminfo: Path) -> int | None:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return None


def _of_groups(own_group: Path, groups: Path) -> list[int | None]:
    try:
        lines = own_group.read_text().splitlines()
    except OSError:
        return []
    path = next((line[3:].strip("/") for line in lines if line.startswith("0::")), None)
    if path is None:
        return []
    group = groups / path
    every = [group, *group.parents]
    # In a container the group is the top of what is seen.
    return [_of_group(one) for one in every if one == groups or groups in one.parents]


def _of_group(group: Path) -> int | None:
    """What is cached of files can be given up, and counts as free."""
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None
