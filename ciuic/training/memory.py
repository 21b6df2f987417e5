"""How much memory this process may still take before the kernel begins to kill.

The memory of an arena is taken page by page when it is filled, so that no call fails where it is not there: it has to be asked before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_MEMINFO: Final = Path("/proc/meminfo")
_OWN_GROUP: Final = Path("/proc/self/cgroup")
_GROUPS: Final = Path("/sys/fs/cgroup")
_NO_LIMIT: Final = 1 << 60
"""What stands there where version 1 has none."""


def memory_left(meminfo: Path = _MEMINFO, own_group: Path = _OWN_GROUP, groups: Path = _GROUPS) -> int | None:
    """Bytes, of the machine and of every control group that this process is in; None where that is not known."""
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
    found: list[int | None] = []
    for line in lines:
        _, controllers, path = (line + "::").split(":", 2)
        path = path.removesuffix("::")
        if not controllers:
            found += [_of_group(one) for one in _with_parents(groups, path)]
        elif "memory" in controllers.split(","):
            found += [_of_old_group(one) for one in _with_parents(groups / "memory", path)]
    return found


def _with_parents(top: Path, path: str) -> list[Path]:
    """In a container the group is the top of what is seen."""
    group = top / path.strip("/")
    return [one for one in (group, *group.parents) if one == top or top in one.parents]


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


def _of_old_group(group: Path) -> int | None:
    """As `_of_group`, by version 1."""
    try:
        limit = int((group / "memory.limit_in_bytes").read_text())
        used = int((group / "memory.usage_in_bytes").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit >= _NO_LIMIT:
        return None
    return max(0, limit - used + int(stat.get("total_inactive_file", 0)))
