"""Records of the restores that run or were cut short: what `ciuic status` tells of them after a kill or a power cut.

Guarantees: the record is durable before the restore changes anything, is locked while it runs, and goes when the restore has ended by
itself. So an unlocked one means that the run was cut short. The restore goes on by the journal in its destination (journal.py) and
needs no record; where none can be written, it works all the same. Records lie in a directory of the user, below `state_home`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from ciuic.errors import CiuicError
from ciuic.restore.journal import JOURNAL_NAME
from ciuic.structs import decode_json
from ciuic.system import mountinfo
from ciuic.system.disk import Disk, open_regular
from ciuic.system.file_locks import open_locked
from ciuic.system.state_home import state_home

_SUFFIX: Final = ".restore"
_MAX_BYTES: Final = 1 << 20
_MAX_FILES: Final = 1000
# File systems whose server may be gone: a look at one of them could wait for ever.
_SERVED: Final = (b"fuse", b"nfs", b"cifs", b"smb", b"9p", b"ceph", b"lustre")


class UnfinishedRestore(msgspec.Struct, frozen=True):
    """A restore that was begun."""

    snapshot: str
    destinations: tuple[bytes, ...]
    """Absolute paths of what is restored."""
    command: tuple[bytes, ...]
    """Words of the command that goes on with it."""
    began: float
    """Seconds since the epoch."""


def records_directory() -> Path:
    """Return where the records of this user lie."""
    return state_home("restores")


@contextmanager
def recorded(
    snapshot: str, destinations: Sequence[bytes], command: Sequence[bytes], directory: Path
) -> Iterator[None]:
    """Keep a record for as long as the block runs.

    It stays if the block is left by an interrupt, or another defect than an error that is told.
    """
    fd = -1
    name = hashlib.sha256(b"\0".join(sorted(destinations))).hexdigest()[:16] + _SUFFIX
    record = UnfinishedRestore(snapshot, tuple(destinations), tuple(command), time.time())
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Another restore there has it: this one ends at the journal.
        fd = open_locked(directory / name)
        os.ftruncate(fd, 0)
        os.pwrite(fd, msgspec.json.encode(record), 0)
        # Durable before the first change: after a power cut the operator is told of what was begun.
        os.fsync(fd)
        Disk().sync_dir(str(directory))
    except OSError:
        if fd >= 0:
            os.close(fd)
        fd = -1

    ended = False
    try:
        yield
        ended = True
    except CiuicError:
        ended = True
        raise
    finally:
        if fd >= 0:
            if ended:
                with suppress(OSError):
                    os.unlink(directory / name)
            os.close(fd)


def unfinished(directory: Path) -> list[UnfinishedRestore]:
    """Return the restores that were cut short and can go on, the oldest first; nothing is changed."""
    found = []
    try:
        names = sorted(name for name in os.listdir(directory) if name.endswith(_SUFFIX))[:_MAX_FILES]
    except OSError:
        return []
    for name in names:
        with suppress(OSError):
            with os.fdopen(open_regular(directory / name, os.O_RDONLY), "rb") as file:
                # A restore that runs holds the lock: BlockingIOError.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                record = decode_record(file.read(_MAX_BYTES))
            if record is not None and _can_go_on(record):
                found.append(record)
    return sorted(found, key=lambda record: record.began)


def decode_record(data: bytes) -> UnfinishedRestore | None:
    """Decode a record; None for anything else, such as one that was cut short itself."""
    try:
        return decode_json(data, UnfinishedRestore)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def _can_go_on(record: UnfinishedRestore) -> bool:
    """Return False if something of the destinations shows that there is nothing to go on with."""
    mounts = mountinfo.read()
    if any(_is_served(path, mounts) for path in record.destinations):
        return True
    if len(record.destinations) > 1:
        # Of several, one may be complete and the next not begun.
        return any(map(os.path.lexists, record.destinations))
    # Ended by another restore, or removed with the destination.
    return os.path.lexists(os.path.join(record.destinations[0], JOURNAL_NAME))


def _is_served(path: bytes, mounts: Sequence[mountinfo.Mount]) -> bool:
    over = [mount for mount in mounts if (path + b"/").startswith(mount.mount_point.rstrip(b"/") + b"/")]
    return any(mount.fs_type.startswith(_SERVED) for mount in over)
