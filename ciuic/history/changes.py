"""Added, deleted and overwritten bytes between two snapshots of a root, summed by directory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ciuic.compare.diff import PathChange, diff_snapshots
from ciuic.history.versions import Timeline
from ciuic.repository import Repository
from ciuic.types import Snapshot


class Total(NamedTuple):
    """Regular files, and the sum of their sizes."""

    files: int = 0
    size_bytes: int = 0

    def plus(self, files: int, size_bytes: int) -> Total:
        """Return the sum."""
        return Total(self.files + files, self.size_bytes + size_bytes)


class DirectoryChanges(NamedTuple):
    """Changes in one directory. Sizes of overwritten files are those of now."""

    path: bytes
    """Absolute path."""
    added: Total = Total()
    overwritten: Total = Total()
    deleted: Total = Total()


class RootChanges(NamedTuple):
    """Changes of one root."""

    host: str
    root: bytes
    old: Snapshot
    new: Snapshot
    directories: list[DirectoryChanges]
    """Directories in which something changed, by path."""


def changes_since(
    repository: Repository, timeline: Timeline, since_ns: int, *, rolled_up: bool = False
) -> RootChanges | None:
    """Return what changed from the newest snapshot not after a time to the newest of all.

    Args:
        repository: Repository of the snapshots.
        timeline: Root to compare.
        since_ns: Time; without a snapshot so old the oldest one is taken.
        rolled_up: Count each file in all directories above it, up to the root.

    Returns:
        None for a root with a single snapshot.

    Raises:
        Damaged: a tree cannot be read.
    """
    new = timeline.snapshots[0]
    old = timeline.not_after(since_ns) or timeline.snapshots[-1]
    if old.id == new.id:
        return None
    found = diff_snapshots(repository, old, new, timeline.path)
    directories = summed(found, timeline.path, rolled_up=rolled_up)
    return RootChanges(timeline.host, timeline.path, old, new, directories)


def summed(changes: Iterable[PathChange], root: bytes, *, rolled_up: bool = False) -> list[DirectoryChanges]:
    """Return the sums of the changes of regular files by directory, in the order of their paths."""
    sums: dict[bytes, DirectoryChanges] = {}
    for change in changes:
        fields = _counted(change)
        folder = change.path.rpartition(b"/")[0] or b"/"
        while fields:
            total = sums.get(folder, DirectoryChanges(folder))
            for field, size_bytes in fields:
                total = total._replace(**{field: getattr(total, field).plus(1, size_bytes)})
            sums[folder] = total
            if not rolled_up or len(folder) <= len(root):
                break
            folder = folder.rpartition(b"/")[0] or b"/"
    return [sums[path] for path in sorted(sums)]


def _counted(change: PathChange) -> list[tuple[str, int]]:
    """Return (field of `DirectoryChanges`, bytes) for a change of a regular file."""
    old = change.old if change.old is not None and change.old.is_file else None
    new = change.new if change.new is not None and change.new.is_file else None
    if old is not None and new is not None:
        return [("overwritten", new.size_bytes)] if "content" in change.details else []
    fields = []
    if new is not None:
        fields.append(("added", new.size_bytes))
    if old is not None:
        fields.append(("deleted", old.size_bytes))
    return fields
