"""What is noted of snapshots after they were taken. Each call opens the repository, takes its lock, and is durable on return.

Raise NotFound where there is no such snapshot, and Busy where somebody holds the lock for longer than a minute.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from ciuic.repository import Repository
from ciuic.training.reading import SavedSnapshot, damaged_chunks, saved_snapshots
from ciuic.types import SnapshotId

VERIFIED: Final = "verified"
"""Tag of a snapshot that was read back whole after it was written."""
DAMAGED: Final = "damaged"
"""Tag of a snapshot that could not be read whole. It takes the place of no good one."""
_LOCK_WAIT_SECONDS: Final = 60.0


class Marked:
    """A part of `SnapshotManager`."""

    save_dir: Path
    _root: bytes

    def list_snapshots(self) -> list[SavedSnapshot]:
        """Newest first, those that cannot be read left out."""
        with Repository.open(self.save_dir) as repository:
            return saved_snapshots(repository, self._root)

    def tag(self, snapshot: str, *tags: str) -> None:
        """Adds tags; durable on return. NotFound; Busy."""
        tag(self.save_dir, snapshot, tags)

    def hold(self, snapshot: str, reason: str = "held") -> None:
        """Keeps it, whatever `max_snapshots` says, until `release`; durable on return. NotFound; Busy."""
        hold(self.save_dir, snapshot, reason)

    def release(self, snapshot: str) -> None:
        """Undoes `hold`."""
        release(self.save_dir, snapshot)


def tag(path: Path, snapshot: str, tags: Iterable[str]) -> None:
    """Adds tags."""
    with Repository.open(path) as repository:
        id_ = repository.snapshots.resolve(snapshot)
        with repository.writer(wait_seconds=_LOCK_WAIT_SECONDS, command="tag") as writer:
            writer.set_marks(id_, tags=(*repository.snapshots.load(id_).tags, *tags))


def hold(path: Path, snapshot: str, reason: str) -> None:
    """Keeps it until `release`."""
    _set_hold(path, snapshot, held=True, reason=reason)


def release(path: Path, snapshot: str) -> None:
    """Undoes `hold`."""
    _set_hold(path, snapshot, held=False, reason="")


def mark_damage(path: Path, snapshots: Iterable[str]) -> None:
    """Mark what of these snapshots cannot be read, durably on return. Busy; OSError.

    Content that comes again is stored anew and not taken for stored. The snapshots are tagged `DAMAGED` and lose `VERIFIED`, so that
    they take the place of none that can be loaded. A snapshot whose content reads well is left as it is, and so is one whose own
    file is damaged."""
    with Repository.open(path) as repository:
        for id_ in map(SnapshotId, snapshots):
            mark_damage_of(repository, id_, _LOCK_WAIT_SECONDS, "mark damage")


def mark_damage_of(repository: Repository, id_: SnapshotId, wait_seconds: float, command: str) -> None:
    """Mark what of one snapshot of an open repository cannot be read, as `mark_damage` does."""
    if not (bad := damaged_chunks(repository, id_)):
        return
    with repository.writer(wait_seconds=wait_seconds, command=command) as writer:
        writer.mark_damaged(bad)
        if id_ in repository.snapshots.names():  # another process may have removed it while it was read
            tags = (tag for tag in repository.snapshots.load(id_).tags if tag != VERIFIED)
            writer.set_marks(id_, tags=(*tags, DAMAGED))


def _set_hold(path: Path, snapshot: str, *, held: bool, reason: str) -> None:
    with Repository.open(path) as repository:
        id_ = repository.snapshots.resolve(snapshot)
        with repository.writer(wait_seconds=_LOCK_WAIT_SECONDS, command="hold") as writer:
            writer.set_marks(id_, hold=held, reason=reason)
