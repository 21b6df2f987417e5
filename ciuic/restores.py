"""Restores on record: which paths a safety snapshot can put back, and whether that would still undo the newest change of them.

A restore notes the paths that it is about to change under the id of its safety snapshot, in ``restores/`` of the repository (note_files). A
safety snapshot without a note, of an earlier version or of a repository that could not be written, stands for all of its roots.

Guarantees: what cannot be read or compared counts as a restore that can still be undone, because the answer decides what is deleted.
Leaves the decision to retention.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from ciuic.diff import diff_snapshots
from ciuic.errors import CiuicError, NotFound
from ciuic.lookup import root_of
from ciuic.repository.note_files import read_note, write_note
from ciuic.types import Snapshot, SnapshotId

if TYPE_CHECKING:
    from ciuic.repository import Repository

RESTORES_DIR: Final = "restores"
_VERSION: Final = 1


class Dated(Protocol):
    """What is asked of the list of snapshots; a catalogue row and ciuic.types.Snapshot both have it."""

    @property
    def id(self) -> SnapshotId: ...
    @property
    def time_ns(self) -> int: ...


class Restore(msgspec.Struct, frozen=True, kw_only=True):
    """A restore that was begun."""

    version: int = _VERSION
    paths: tuple[bytes, ...]
    """Absolute, below protected roots: what it was to change. Base64 in the file."""
    finished_ns: int = 0
    """Wall clock of its end; 0 while it is at work, or where it was killed."""


def record_restore(
    repository: str | os.PathLike[str], safety: str, paths: Iterable[bytes], snapshots: Iterable[str]
) -> None:
    """Note what a restore is about to change; ``snapshots``: those that exist, the notes of all others are removed. OSError."""
    directory = f"{os.fspath(repository)}/{RESTORES_DIR}"
    with suppress(FileNotFoundError):  # the first restore of this repository makes it
        for name in set(os.listdir(directory)).difference(snapshots):
            os.unlink(f"{directory}/{name}")
    # Before anything is changed: the note must not be younger than the restore.
    write_note(directory, safety, Restore(paths=tuple(paths)), durable=True)


def record_end(repository: str | os.PathLike[str], safety: str, now_ns: int) -> None:
    """Note that the restore is over; nothing happens where it was not noted. OSError."""
    note = _read(repository, safety)
    if note is not None:
        directory = f"{os.fspath(repository)}/{RESTORES_DIR}"
        write_note(directory, safety, msgspec.structs.replace(note, finished_ns=now_ns), durable=True)


def _read(repository: str | os.PathLike[str], safety: str) -> Restore | None:
    """Return None where there is no note that can be read."""
    note = read_note(f"{os.fspath(repository)}/{RESTORES_DIR}", safety, Restore)
    return note if note is not None and note.version == _VERSION and note.paths else None


def undoes_newest_change(repository: Repository, snapshots: Sequence[Dated], safety: SnapshotId) -> bool:
    """Return whether a restore that this safety snapshot can undo is the newest change of one of its paths.

    ``snapshots``: all there are. The first one after the safety snapshot that has the path shows what the restore left there; where
    the newest one shows the same, nothing has changed it since.
    """
    try:
        snapshot = repository.snapshots.load(safety)
        note = _read(repository.path, str(safety))
        paths = note.paths if note is not None else [root.path for root in snapshot.roots]
        # One that was cut while the restore was at work shows half of it: later ones are asked.
        after_ns = max(snapshot.time_ns, note.finished_ns if note is not None else 0)
        later = sorted((one.time_ns, one.id) for one in snapshots if one.time_ns > after_ns)
        return any(_is_unchanged(repository, [id_ for _, id_ in later], path) for path in paths)
    except (CiuicError, OSError):
        return True


def _is_unchanged(repository: Repository, later: Sequence[SnapshotId], path: bytes) -> bool:
    """Whether the first and the last of these snapshots that have the root of ``path`` show the same there."""
    first, last = _having(repository, later, path), _having(repository, reversed(later), path)
    if first is None or last is None or first.id == last.id:
        return True  # nobody knows of a change since
    try:
        return next(diff_snapshots(repository, first, last, path), None) is None
    except NotFound:  # it is in neither: the restore removed it, and nothing made it again
        return True


def _having(repository: Repository, ids: Iterable[SnapshotId], path: bytes) -> Snapshot | None:
    loaded = (repository.snapshots.load(id_) for id_ in ids)
    return next((snapshot for snapshot in loaded if root_of(snapshot, path) is not None), None)
