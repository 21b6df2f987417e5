"""Snapshots of one root of one host, in the order of commits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from ciuic.errors import Damaged
from ciuic.types import RootRecord, Snapshot

MAX_PATH_BYTES: Final = 4096
"""Longest path of a directory that is looked into, as of the kernel (PATH_MAX). The text of all paths in a chain of directories grows with
the square of its levels: a gigabyte for 3,000."""


class PathTooLong(Damaged):
    """A directory has a longer path than is looked at: the answer is without what it holds."""

    def __init__(self, path: bytes) -> None:
        super().__init__(f"its path has {len(path)} bytes, more than {MAX_PATH_BYTES}")


OnDamage = Callable[[Snapshot, bytes, Damaged], None]
"""Receives a path that cannot be read in a snapshot, and why. It is passed over if this returns."""


def raise_damage(snapshot: Snapshot, path: bytes, error: Damaged) -> NoReturn:
    """Raise the error: nothing is passed over."""
    raise error


class Timeline:
    """Snapshots that have one root, newest first.

    The same path on two hosts is two roots.
    """

    def __init__(self, host: str, path: bytes, snapshots: Sequence[Snapshot]) -> None:
        self.host = host
        self.path = path
        self.snapshots = snapshots
        # Where the clock was set, times are not in the order of commits.
        self._by_time = sorted(snapshots, key=lambda snapshot: (snapshot.time_ns, snapshot.order_ns))
        self._times = [snapshot.time_ns for snapshot in self._by_time]

    def root_of(self, snapshot: Snapshot) -> RootRecord:
        """Return the root in one of these snapshots."""
        return next(root for root in snapshot.roots if root.path == self.path)

    def before(self, time_ns: int) -> Snapshot | None:
        """Return the newest snapshot before this time, or None."""
        at = bisect_left(self._times, time_ns)
        return self._by_time[at - 1] if at else None

    def not_after(self, time_ns: int) -> Snapshot | None:
        """Return the newest snapshot at or before this time, or None."""
        return self.before(time_ns + 1)


def timelines(
    snapshots: Sequence[Snapshot], wanted: Callable[[bytes], bool] = lambda path: True
) -> list[Timeline]:
    """Return a timeline for each root and host, by path.

    Args:
        snapshots: Snapshots of one repository, newest first.
        wanted: True for the paths of the roots to return.
    """
    found: dict[tuple[bytes, str], list[Snapshot]] = {}
    for snapshot in snapshots:
        for root in snapshot.roots:
            if wanted(root.path):
                found.setdefault((root.path, snapshot.host), []).append(snapshot)
    return [Timeline(host, path, found[path, host]) for path, host in sorted(found)]
