"""Promised snapshots: ids handed out before their snapshots were committed, and why some never were.

One file for each id in ``promised/`` of the repository (record_files.py). It is made when the id is handed out,
removed when the snapshot is committed, and gets a reason when the snapshot is given up: from then on `list`
shows the snapshot as lost.

Guarantees: a reason is durable when `record_loss` returns. A promise outlives the daemon, and the machine as
far as the file system had written it (no fsync: a cut must not wait for a busy disk). A snapshot that exists
is never shown as lost. The newest ``MAX_LOST`` losses are kept, for ``MAX_LOST_AGE_NS``. The daemon decides
what is lost.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Final

import msgspec

from ciuic.repository.record_files import read_note, write_note

PROMISED_DIR: Final = "promised"
MAX_LOST: Final = 100
"""Limit of recorded losses: an operator reads the newest, and a caller that requests snapshots in a loop must
not fill the disk."""
MAX_LOST_AGE_NS: Final = 30 * 86400 * 10**9
"""Thirty days, longer than anybody waits for an id."""
MAX_PROMISES: Final = 1000
"""Limit of files that are read, ten times what this module keeps, so that a directory that another user
filled costs little."""
DAMAGED: Final = "the record of it in the repository is damaged, and the snapshot does not exist"
_VERSION: Final = 1
_NAME: Final = re.compile(r"cs-[0-9a-f]{6,32}\Z")


class Promise(msgspec.Struct, kw_only=True, frozen=True):
    """Snapshot whose id was handed out."""

    version: int = _VERSION
    id: str
    time_ns: int
    """Wall clock at the cut."""
    roots: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    message: str = ""
    reason: str = ""
    """Why the snapshot was given up; empty while it is pending."""
    lost_ns: int = 0
    """When the snapshot was given up; 0 while it is pending."""


def record_promise(repository: str | os.PathLike[str], promise: Promise) -> None:
    """Record that the id was handed out.

    Raises:
        OSError: the disk failed.
    """
    # No fsync: a cut must not wait for a busy disk.
    _write(repository, promise, durable=False)


def record_loss(repository: str | os.PathLike[str], promise: Promise) -> None:
    """Record why the snapshot was given up, durable on return; delete the oldest losses beyond the limits.

    Raises:
        OSError: the disk failed.
    """
    _write(repository, promise, durable=True)
    for old in _outdated(promises(repository), promise.lost_ns):
        remove_promise(repository, old)


def remove_promise(repository: str | os.PathLike[str], snapshot_id: str) -> bool:
    """Remove the file of this id, because the promise was kept or the loss is acknowledged.

    Returns whether there was one.

    Raises:
        OSError: the disk failed.
    """
    try:
        # Not synced: if a power cut brings the file back, `lost` sees that the snapshot exists, and an
        # acknowledged loss is listed once more.
        os.unlink(_path(repository, snapshot_id))
    except FileNotFoundError:
        return False
    return True


def promised_names(repository: str | os.PathLike[str]) -> set[str]:
    """Return the ids of all promises on file, kept or lost, without reading them."""
    try:
        return set(filter(_NAME.match, os.listdir(f"{os.fspath(repository)}/{PROMISED_DIR}")))
    # No snapshot was ever promised here, or this caller may not look.
    except OSError:
        return set()


def promises(repository: str | os.PathLike[str]) -> list[Promise]:
    """Return every promise on file, newest cut first; a damaged file counts as given up."""
    return sorted(_read_all(repository), key=lambda promise: (promise.time_ns, promise.id), reverse=True)


def lost(repository: str | os.PathLike[str], committed: Collection[str]) -> list[Promise]:
    """Return the snapshots that were given up, newest cut first.

    ``committed`` has the ids of the snapshots that exist, which are never lost.
    """
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
        # A record under another name is a copy: callers know the promise by the file's name.
        if promise is None or promise.version != _VERSION or promise.id != name:
            yield from _damaged(directory, name)
        else:
            yield promise


def _damaged(directory: str, name: str) -> Iterator[Promise]:
    """Yield what is left of a promise whose file cannot be read: its id, and when the file was written."""
    # Suppressed: a file removed since it was listed (its snapshot is committed), or one that cannot be looked
    # at (`list` shows the others).
    with suppress(OSError):
        written_ns = os.stat(f"{directory}/{name}", follow_symlinks=False).st_mtime_ns
        yield Promise(id=name, time_ns=written_ns, reason=DAMAGED, lost_ns=written_ns)
