"""Tags and holds of snapshots. Each call opens the repository, takes its lock, and is durable on return.

All raise NotFound for an unknown snapshot, and Busy if another process holds the lock for longer than a
minute.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from ciuic.repository import Repository
from ciuic.training.format.reading import damaged_chunks
from ciuic.types import SnapshotId

VERIFIED: Final = "verified"
"""Tag of a snapshot that was read back whole after it was written."""
DAMAGED: Final = "damaged"
"""Tag of a snapshot that could not be read whole. It takes the place of no good one."""
_LOCK_WAIT_SECONDS: Final = 60.0
"""Time to wait for another holder of the repository's lock."""


def tag(path: Path, snapshot: str, tags: Iterable[str]) -> None:
    """Add tags to a snapshot, beside those that it has; durable on return."""
    with Repository.open(path) as repository:
        id_ = repository.snapshots.resolve(snapshot)
        with repository.writer(wait_seconds=_LOCK_WAIT_SECONDS, command="tag") as writer:
            # Read under the lock: another process may have added a tag meanwhile.
            writer.set_marks(id_, tags=(*repository.snapshots.load(id_).tags, *tags))


def hold(path: Path, snapshot: str, reason: str) -> None:
    """Keep a snapshot whatever the rules say, until `release`."""
    _set_hold(path, snapshot, held=True, reason=reason)


def release(path: Path, snapshot: str) -> None:
    """Undo `hold`."""
    _set_hold(path, snapshot, held=False, reason="")


def mark_damage(path: Path, snapshots: Iterable[str]) -> None:
    """Mark the unreadable content of these snapshots, durably on return.

    Marked content that comes again is stored anew instead of being taken for stored. The snapshots are tagged
    `DAMAGED` and lose `VERIFIED`, so that they take the place of none that can be loaded. A snapshot whose
    content reads well is left as it is, and so is one whose own file is damaged. Nothing is marked while there is no pack at all:
    a disk that is not mounted damages nothing.

    Raises:
        Busy: another process holds the lock.
        OSError: the repository cannot be read or written.
    """
    with Repository.open(path) as repository:
        for id_ in map(SnapshotId, snapshots) if repository.pack_sizes() else ():
            mark_damage_of(repository, id_, _LOCK_WAIT_SECONDS, "mark damage")


def mark_damage_of(repository: Repository, id_: SnapshotId, wait_seconds: float, command: str) -> None:
    """Mark the unreadable content of one snapshot of an open repository, as `mark_damage` does."""
    # Before the lock is taken: this reads the whole snapshot.
    if not (bad := damaged_chunks(repository, id_)):
        return
    with repository.writer(wait_seconds=wait_seconds, command=command) as writer:
        writer.mark_damaged(bad)
        if id_ in repository.snapshots.names():  # another process may have removed it while it was read
            # VERIFIED goes: retention must not count a damaged snapshot as one that was read back.
            tags = (tag for tag in repository.snapshots.load(id_).tags if tag != VERIFIED)
            writer.set_marks(id_, tags=(*tags, DAMAGED))


def _set_hold(path: Path, snapshot: str, *, held: bool, reason: str) -> None:
    with Repository.open(path) as repository:
        id_ = repository.snapshots.resolve(snapshot)
        with repository.writer(wait_seconds=_LOCK_WAIT_SECONDS, command="hold") as writer:
            writer.set_marks(id_, hold=held, reason=reason)
