"""Snapshots of one root of one host in the order of commits, and the versions of a path over them, newest first.

Guarantees: directories whose trees are equal in two snapshots are read once. Content is compared by its id and never read.
"""

from __future__ import annotations

import stat
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, NamedTuple, NoReturn

from ciuic.compare.diff import attribute_details
from ciuic.errors import Damaged
from ciuic.repository import Repository
from ciuic.repository.lookup import resolve
from ciuic.types import Entry, RootRecord, Snapshot

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


VersionKind = Literal["added", "changed", "retyped", "gone"]


class PathVersion(NamedTuple):
    """A version of a path, or its absence."""

    kind: VersionKind
    """Difference from the version before; ``added`` if there was none."""
    first: Snapshot
    """Oldest snapshot that has it; for ``gone``, the oldest without the path."""
    last: Snapshot
    """Newest snapshot that has it, without another version between."""
    snapshots: int
    """Number of snapshots from the first to the last."""
    entry: Entry | None
    """Complete entry; None for ``gone``."""
    details: tuple[str, ...] = ()
    """Names of what changed, as `ciuic.compare.diff` has them."""
    host: str = ""


def versions(
    repository: Repository, timeline: Timeline, path: bytes, *, on_damage: OnDamage = raise_damage
) -> Iterator[PathVersion]:
    """Yield the versions of an absolute, normalised path below the root of a timeline, newest first.

    The path's absence is a version, except before it was first there. Snapshots that were made without the root say nothing
    of the path, and neither do those in which it cannot be read.

    Args:
        repository: Repository of the snapshots.
        timeline: Root with the path.
        path: The path.
        on_damage: Called for each snapshot in which the path cannot be read.
    """
    finder = _PathFinder(repository, path[len(timeline.path) :])
    run: list[Snapshot] = []
    entry: Entry | None = None
    for snapshot in timeline.snapshots:
        try:
            found = finder.find(timeline.root_of(snapshot))
        except Damaged as error:
            on_damage(snapshot, path, error)
            continue
        if run and not _equal(repository, found, entry):
            yield _version(repository, run, entry, found, timeline.host)
            run = []
        # The entry of the oldest snapshot of the run; its other attributes are equal.
        entry = found
        run.append(snapshot)
    if run and entry is not None:
        yield PathVersion("added", run[-1], run[0], len(run), entry, (), timeline.host)


def _version(
    repository: Repository, run: list[Snapshot], entry: Entry | None, before: Entry | None, host: str
) -> PathVersion:
    kind: VersionKind = "changed"
    details: tuple[str, ...] = ()
    if entry is None:
        kind = "gone"
    elif before is None:
        kind = "added"
    elif stat.S_IFMT(entry.mode) != stat.S_IFMT(before.mode):
        kind = "retyped"
    else:
        details = tuple(_details(repository, before, entry))
    return PathVersion(kind, run[-1], run[0], len(run), entry, details, host)


def _details(repository: Repository, old: Entry, new: Entry) -> list[str]:
    details = attribute_details(old, new)
    if (old.content, old.map_height) != (new.content, new.map_height) or (
        old.is_file and old.size_bytes != new.size_bytes
    ):
        details.insert(0, "content")
    if old.xattrs != new.xattrs and _differ_in_xattrs(repository, old, new):
        details.append("xattrs")
    return details


def _differ_in_xattrs(repository: Repository, old: Entry, new: Entry) -> bool:
    try:
        return repository.trees.xattrs(old) != repository.trees.xattrs(new)
    except Damaged:
        # They are stored apart, so they most likely differ; the version is told all the same.
        return True


def _equal(repository: Repository, one: Entry | None, other: Entry | None) -> bool:
    if one is None or other is None:
        return one is other
    return stat.S_IFMT(one.mode) == stat.S_IFMT(other.mode) and not _details(repository, one, other)


class _PathFinder:
    """Lookup of one path in many trees; where a directory is the same as in the tree before, nothing below it is looked up."""

    def __init__(self, repository: Repository, relative: bytes) -> None:
        self._repository = repository
        self._names = [name for name in relative.split(b"/") if name]
        # For each name the tree in which it was looked up last, and what was found.
        self._last: list[tuple[bytes, Entry | None]] = [(b"\0", None)] * len(self._names)

    def find(self, root: RootRecord) -> Entry | None:
        """Return the complete entry; None for a path that is not there."""
        entry: Entry | None = root.entry
        for depth, name in enumerate(self._names):
            if entry is None or not entry.is_dir:
                return None
            tree, found = self._last[depth]
            if tree != entry.content:
                found = self._repository.trees.entry(entry.content, name) if entry.content else None
                self._last[depth] = entry.content, found
            entry = found
        # The attributes of several names of one inode stand in a table that changes by itself.
        return entry and resolve(self._repository, root, entry)
