"""Checkpoints in the snapshots of a root, each with its verdict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ciuic.errors import Damaged
from ciuic.history.timeline import MAX_PATH_BYTES, OnDamage, PathTooLong, Timeline, raise_damage
from ciuic.repository import Repository
from ciuic.repository.lookup import Located, join
from ciuic.repository.trees.tree_reader import Lineage
from ciuic.types import Snapshot
from ciuic.verdicts.checkpoint_verdict import Checkpoint, checkpoints_in, may_hold_checkpoints
from ciuic.verdicts.snapshot_source import SnapshotDirectory


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
    on_damage: OnDamage = raise_damage,
) -> Iterator[StoredCheckpoint]:
    """Yield the checkpoints in a snapshot of a root, by directory.

    Args:
        repository: Repository of the snapshots.
        timeline: Root to search.
        snapshot: One of its snapshots; None for the newest.
        on_damage: Called for directories that cannot be read. Content that cannot be read is UNKNOWN.
    """
    snapshot = snapshot or timeline.snapshots[0]
    root = timeline.root_of(snapshot)
    lineage = Lineage()
    # For the frame of the root alone.
    lineage.enter(b"")
    stack = [iter([Located(root, timeline.path, root.entry)])]
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
                    mtime_ns = max((times.get(name, 0) for name in found.files), default=0)
                    yield StoredCheckpoint(found, mtime_ns, snapshot, timeline.host)
            except Damaged as error:
                on_damage(snapshot, at.path, error)
        below = [child for child in children if child.is_dir and child.name not in covered and child.content]
        deeper = []
        for child in below:
            path = join(at.path, child.name)
            if len(path) > MAX_PATH_BYTES:
                on_damage(snapshot, path, PathTooLong(path))
            else:
                deeper.append(Located(root, path, child))
        stack.append(iter(deeper))
