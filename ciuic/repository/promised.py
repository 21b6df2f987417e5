"""Promised snapshots: ids that were given out before their snapshots were committed, and what became of those that never were.

One file for each id in ``promised/`` of the repository (note_files). It is made when the id is given out, removed when the snapshot is
committed, and gets a reason when the snapshot is given up: from then on `list` shows the snapshot as lost.

Guarantees: a reason is durable when ``record_loss`` returns; a promise outlives the daemon, and the machine as far as the file system
had written it (no fsync: a cut must not wait for a busy disk). A snapshot that exists is never shown as lost. The newest
``MAX_LOST`` losses are kept, for ``MAX_LOST_AGE_NS``. Leaves deciding what is lost to the daemon.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Final

import msgspec

from ciuic.repository.note_files import read_note, write_note

PROMISED_DIR: Final = "promised"
MAX_LOST: Final = 100
"""Losses that are remembered: an operator reads the newest, and a caller who asks for snapshots in a loop must not fill the disk."""
MAX_LOST_AGE_NS: Final = 30 * 86400 * 10**9
"""Thirty days: longer than anybody waits for an id."""
MAX_PROMISES: Final = 1000
"""Files that are read at most; ten times what this module keeps, so that a directory that somebody else filled costs little."""
DAMAGED: Final = "the record of it in the repository is damaged, and the snapshot does not exist"
_VERSION: Final = 1
_NAME: Final = re.compile(r"cs-[0-9a-f]{6,32}\Z")


class Promise(msgspec.Struct, kw_only=True, frozen=True):
    """A snapshot whose id was given out."""

    version: int = _VERSION
    id: str
    time_ns: int
    """Wall clock of its cut."""
    roots: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    message: str = ""
    reason: str = ""
    """Why it was given up; empty while it is on its way."""
    lost_ns: int = 0
    """When it was given up; 0 while it is on its way."""


def record_promise(repository: str | os.PathLike[str], promise: Promise) -> None:
    """Note that the id was given out. OSError."""
    _write(repository, promise, durable=False)


def record_loss(repository: str | os.PathLike[str], promise: Promise) -> None:
    """Note why the snapshot was given up, durable on return; forget the oldest losses beyond the limits. OSError."""
    _write(repository, promise, durable=True)
    for old in _outdated(promises(repository), promise.lost_ns):
        remove_promise(repository, old)


def remove_promise(repository: str | os.PathLike[str], snapshot_id: str) -> bool:
    """Remove the file of this id: the promise was kept, or nobody wants to hear of it any more. Return whether there was one. OSError."""
    try:
        os.unlink(_path(repository, snapshot_id))
    except FileNotFoundError:
        return False
    return True


def promised_names(repository: str | os.PathLike[str]) -> set[str]:
    """Return the ids of all promises on file, kept or lost, without reading them."""
    try:
        return set(filter(_NAME.match, os.listdir(f"{os.fspath(repository)}/{PROMISED_DIR}")))
    except OSError:  # no snapshot was ever promised here, or this caller may not look
        return set()


def promises(repository: str | os.PathLike[str]) -> list[Promise]:
    """Return every promise that is on file, newest cut first. Of a damaged file the id is known, and counts as given up."""
    return sorted(_read_all(repository), key=lambda promise: (promise.time_ns, promise.id), reverse=True)


def lost(repository: str | os.PathLike[str], committed: Collection[str]) -> list[Promise]:
    """Return the snapshots that were given up, newest cut first; ``committed``: ids of the snapshots that exist."""
    return [promise for promise in promises(repository) if promise.reason and promise.id not in committed]


def _outdated(known: list[Promise], now_ns: int) -> list[str]:
    losses = sorted((one for one in known if one.reason), key=lambda one: one.lost_ns, reverse=True)
    kept = [one for one in losses[:MAX_LOST] if now_ns - one.lost_ns <= MAX_LOST_AGE_NS]
    return [one.id for one in losses if one not in kept]


def _path(repository: str | os.PathLike[str], snapshot_id: str) -> str:
    return f"{os.fspath(repository)}/{PROMISED_DIR}/{snapshot_id}"


def _write(repository: str | os.PathLike[str], promise: Promise, *, durable: bool) -> None:
    write_note(f"{os.fspath(repository)}/{PROMISED_DIR}", promise.id, promise, durable=durable)


def _read_all(repository: str | os.PathLike[str]) -> Iterator[Promise]:
    directory = f"{os.fspath(repository)}/{PROMISED_DIR}"
    for name in sorted(promised_names(repository))[:MAX_PROMISES]:
        promise = read_note(directory, name, Promise)
        if promise is None or promise.version != _VERSION or promise.id != name:
            yield from _damaged(directory, name)
        else:
            yield promise


def _damaged(directory: str, name: str) -> Iterator[Promise]:
    """Yield what is left of a promise whose file cannot be read: its id, and when the file was written."""
    # Removed since it was listed, and its snapshot is committed; or it cannot be looked at, and `list` shows the others.
    with suppress(OSError):
        written_ns = os.stat(f"{directory}/{name}", follow_symlinks=False).st_mtime_ns
        yield Promise(id=name, time_ns=written_ns, reason=DAMAGED, lost_ns=written_ns)
