"""Checkpoints in the snapshots of a root, each with its verdict."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from typing import NamedTuple

from ciuic.errors import Damaged, NotFound
from ciuic.history.timeline import MAX_PATH_BYTES, OnDamage, PathTooLong, Timeline, raise_damage
from ciuic.printable import one_line
from ciuic.repository import Repository
from ciuic.repository.lookup import Located, find, is_within, join
from ciuic.repository.trees.tree_reader import Lineage
from ciuic.types import Snapshot
from ciuic.verdicts.sources import SnapshotDirectory
from ciuic.verdicts.verdict import Checkpoint, checkpoints_in, may_hold_checkpoints


class StoredCheckpoint(NamedTuple):
    """A checkpoint in a snapshot."""

    checkpoint: Checkpoint
    mtime_ns: int
    """Latest change of one of its files."""
    snapshot: Snapshot
    host: str


def checkpoints(
    repository: Repository,
    timeline: Timeline,
    snapshot: Snapshot | None = None,
    *,
    path: bytes | None = None,
    on_damage: OnDamage = raise_damage,
) -> Iterator[StoredCheckpoint]:
    """Yield the checkpoints in a snapshot of a root, by directory.

    Args:
        repository: Repository of the snapshots.
        timeline: Root to search.
        snapshot: One of its snapshots; None for the newest.
        path: Only what is at or below this absolute path in the root; None for all.
        on_damage: Called for directories that cannot be read. Content that cannot be read is UNKNOWN.
    """
    snapshot = snapshot or timeline.snapshots[0]
    root = timeline.root_of(snapshot)
    lineage = Lineage()
    # For the frame of the root alone.
    lineage.enter(b"")
    stack = [iter([_start(repository, timeline, snapshot, path)])]
    while stack:
        at = next(stack[-1], None)
        if at is None:
            stack.pop()
            lineage.leave()
            continue
        try:
            children = list(repository.trees.entries(at.entry.content))
            lineage.enter(at.entry.content)
        except Damaged as error:
            on_damage(snapshot, at.path, error)
            continue
        covered: set[bytes] = set()
        if may_hold_checkpoints([child.name for child in children]):
            directory = SnapshotDirectory(repository, snapshot, at, timeline.before)
            try:
                times = {child.name: child.mtime_ns for child in directory.entries()}
                for found in checkpoints_in(directory):
                    covered.update(found.files)
                    if path is not None and not is_within(found.path, path):
                        continue
                    mtime_ns = max((times.get(name, 0) for name in found.files), default=0)
                    yield StoredCheckpoint(found, mtime_ns, snapshot, timeline.host)
            except Damaged as error:
                on_damage(snapshot, at.path, error)
        below = [child for child in children if child.is_dir and child.name not in covered and child.content]
        deeper = []
        for child in below:
            inside = join(at.path, child.name)
            if path is not None and not is_within(inside, path):
                continue
            if len(inside) > MAX_PATH_BYTES:
                on_damage(snapshot, inside, PathTooLong(inside))
            else:
                deeper.append(Located(root, inside, child))
        stack.append(iter(deeper))


def _start(repository: Repository, timeline: Timeline, snapshot: Snapshot, path: bytes | None) -> Located:
    """Return the directory to begin with. A directory may be a checkpoint itself, which the one above it tells."""
    if path is None or path == timeline.path:
        root = timeline.root_of(snapshot)
        return Located(root, timeline.path, root.entry)
    above = find(repository, snapshot, posixpath.dirname(path))
    if not above.entry.is_dir:
        raise NotFound(f"{one_line(above.path)} is no directory in snapshot {snapshot.id}")
    return above
