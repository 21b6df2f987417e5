"""Records of restores: which paths a safety snapshot can put back, and whether that would still undo their newest change.

A restore notes the paths that it is about to change, under the id of its safety snapshot, in ``restores/`` of the repository
(repository/record_files.py). A safety snapshot without a note (from an earlier version, or of a repository that could not be written)
stands for all of its roots.

Guarantees: a note or snapshot that cannot be read or compared counts as a restore that can still be undone, because the answer
decides what is deleted. The decision itself is made by retention.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from ciuic.errors import CiuicError, NotFound
from ciuic.repository.lookup import root_of
from ciuic.repository.record_files import read_note, write_note
from ciuic.types import Snapshot, SnapshotId

if TYPE_CHECKING:
    from ciuic.repository import Repository

RESTORES_DIR: Final = "restores"
_VERSION: Final = 1


class Dated(Protocol):
    """A snapshot's id and time; rows of the catalogue and ciuic.types.Snapshot both have them."""

    @property
    def id(self) -> SnapshotId:
        """Identifier of the snapshot."""
        ...

    @property
    def time_ns(self) -> int:
        """Wall-clock time of the cut."""
        ...

    @property
    def order_ns(self) -> int:
        """Place in the order of commits."""
        ...


class RestoreRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Note about a restore that was begun."""

    version: int = _VERSION
    paths: tuple[bytes, ...]
    """Absolute paths below protected roots that it was to change; base64 in the file."""
    finished_ns: int = 0
    """Wall-clock time of its end; 0 while it is running, or if it was killed."""
    changed: bool = True
    """False if it ended and is known to have found everything as it was to be."""
    first: str = ""
    """Id of the safety snapshot of the restore, cut short, that this one goes on with; empty for one that begins anew."""


def record_restore(
    repository: str | os.PathLike[str],
    safety: str,
    paths: Iterable[bytes],
    snapshots: Iterable[str],
    first: str = "",
) -> None:
    """Note durably what a restore is about to change, and remove notes of snapshots that are gone. OSError.

    Args:
        repository: path of the repository.
        safety: id of the safety snapshot.
        paths: absolute paths that the restore may change.
        snapshots: ids of all snapshots that exist.
        first: id of the safety snapshot of the restore that this one goes on with.
    """
    paths = tuple(paths)
    directory = f"{os.fspath(repository)}/{RESTORES_DIR}"
    # The first restore of a repository creates the directory.
    with suppress(FileNotFoundError):
        for name in set(os.listdir(directory)).difference(snapshots):
            # Not synced: a note that a power cut brings back is removed by the next restore.
            os.unlink(f"{directory}/{name}")
    before = _read(repository, first) if first else None
    if before is not None and set(before.paths) != set(paths):
        # It does not have all that this one is about to change.
        first = ""
    # Durable before anything is changed: after a power cut the note must not be missing while the restore's changes are there.
    write_note(directory, safety, RestoreRecord(paths=paths, first=first), durable=True)


def record_end(repository: str | os.PathLike[str], safety: str, now_ns: int, *, changed: bool = True) -> None:
    """Note that the restore has ended, and whether it may have changed something; does nothing where its begin was not noted. OSError."""
    note = _read(repository, safety)
    if note is not None:
        directory = f"{os.fspath(repository)}/{RESTORES_DIR}"
        # Durable: without the end, a snapshot cut during the restore would count as later, and could cost the
        # safety snapshot.
        write_note(
            directory,
            safety,
            msgspec.structs.replace(note, finished_ns=now_ns, changed=changed),
            durable=True,
        )


def restored_paths(repository: Repository, safety: Snapshot) -> tuple[bytes, ...]:
    """Return the paths that the restore was to change for which a safety snapshot was taken: its roots, where that was not noted."""
    note = _read(repository.path, str(safety.id))
    return note.paths if note is not None else tuple(root.path for root in safety.roots)


def first_of(repository: str | os.PathLike[str], safety: str) -> str:
    """Return the id of the safety snapshot from before the first of the runs, each cut short, that led to this restore."""
    note = _read(repository, safety)
    return note.first if note is not None and note.first else safety


def has_changed(repository: str | os.PathLike[str], safety: str) -> bool:
    """Return False if the restore is known to have changed nothing."""
    note = _read(repository, safety)
    return note is None or note.changed


def was_cut_short(repository: str | os.PathLike[str], safety: str) -> bool:
    """Return whether the restore is known to have begun and not to have ended."""
    note = _read(repository, safety)
    return note is not None and not note.finished_ns


def _read(repository: str | os.PathLike[str], safety: str) -> RestoreRecord | None:
    """Return the note of a restore; None if there is none that can be read."""
    note = read_note(f"{os.fspath(repository)}/{RESTORES_DIR}", safety, RestoreRecord)
    return note if note is not None and note.version == _VERSION and note.paths else None


def undoes_newest_change(repository: Repository, snapshots: Sequence[Dated], safety: SnapshotId) -> bool:
    """Return whether a restore that this safety snapshot can undo is the newest change of one of its paths.

    The first snapshot after the restore that has the path shows what the restore left there. If the newest one shows the same,
    nothing has changed it since.

    Args:
        repository: the open repository.
        snapshots: all snapshots of the repository.
        safety: id of the safety snapshot.
    """
    try:
        snapshot = repository.snapshots.load(safety)
        note = _read(repository.path, str(safety))
        paths = restored_paths(repository, snapshot)
        # A snapshot that was cut while the restore was running shows half of it, so only later ones count.
        after_ns = max(snapshot.time_ns, note.finished_ns if note is not None else 0)
        later = sorted(
            (one.order_ns, one.id)
            for one in snapshots
            # One that a clock ahead has dated later was still committed before.
            if one.time_ns > after_ns and one.order_ns > snapshot.order_ns
        )
        return any(_is_unchanged(repository, [id_ for _, id_ in later], path) for path in paths)
    except (CiuicError, OSError):
        # In doubt the safety snapshot is kept.
        return True


def _is_unchanged(repository: Repository, later: Sequence[SnapshotId], path: bytes) -> bool:
    """Return whether the first and the last of these snapshots that have the root of ``path`` show the same there."""
    first, last = _having(repository, later, path), _having(repository, reversed(later), path)
    # With one snapshot or none, no later change is known.
    if first is None or last is None or first.id == last.id:
        return True
    # Imported here: it imports what restores read and write (30 ms), which `prune` needs only where it compares.
    from ciuic.compare.diff import diff_snapshots

    try:
        return next(diff_snapshots(repository, first, last, path), None) is None
    except NotFound:
        # The path is in neither: the restore removed it, and nothing created it again.
        return True


def _having(repository: Repository, ids: Iterable[SnapshotId], path: bytes) -> Snapshot | None:
    # One by one: the first that has the root ends the search, and the others are not read.
    loaded = (repository.snapshots.load(id_) for id_ in ids)
    return next((snapshot for snapshot in loaded if root_of(snapshot, path) is not None), None)
