"""Journal of an unfinished restore: the file `.ciuic-restore` in the directory that is being restored.

Guarantees: while it is locked, no second restore works there. When it is found unlocked, the run that made it was cut short:
what that run restored is recognised (it is no conflict), and its temporary files are removed. Where no journal can be
written, a restore works all the same, but after an interruption it must be repeated with an overwrite mode.

Records of the restores that run or were cut short: what `ciuic status` tells of them after a kill or a power cut.

Guarantees: the record is durable before the restore changes anything, is locked while it runs, and goes when the restore has ended by
itself. So an unlocked one means that the run was cut short. The restore goes on by the journal in its destination and
needs no record; where none can be written, it works all the same. Records lie in a directory of the user, below `state_home`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from ciuic.errors import Busy, CiuicError
from ciuic.printable import one_line
from ciuic.restore.destination import unlink_if_there
from ciuic.structs import decode_json
from ciuic.system import mountinfo
from ciuic.system.disk import Disk, open_locked, open_regular
from ciuic.system.state_home import state_home

_SUFFIX: Final = ".restore"
_MAX_RECORD_BYTES: Final = 1 << 20
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
    # Imported here: it loads OpenSSL (3 ms), which a dry run and the start of the restore of a file do without.
    from hashlib import sha256

    fd = -1
    name = sha256(b"\0".join(sorted(destinations))).hexdigest()[:16] + _SUFFIX
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
                record = decode_record(file.read(_MAX_RECORD_BYTES))
            if record is not None and _can_go_on(record):
                found.append(record)
    return sorted(found, key=lambda record: record.began)


def decode_record(data: bytes) -> UnfinishedRestore | None:
    """Decode a record; None for anything else, such as one that was cut short itself."""
    try:
        return decode_json(data, UnfinishedRestore)
    except msgspec.DecodeError:
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


JOURNAL_NAME = b".ciuic-restore"
_MAX_MARK_BYTES = 65536
# Errors of open(2) for a directory, a socket or a pipe with the journal's name, which any user may put there.
_SOMETHING_ELSE = (errno.EISDIR, errno.ENXIO, errno.ENODEV, errno.ENOTDIR)
# Errors with which a restore goes on without a journal.
_NO_JOURNAL = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ELOOP,
    *_SOMETHING_ELSE,
)
# Each attempt but the last means that another restore finished in between; a few follow each other by chance.
_MAX_LOCK_ATTEMPTS = 20
_RUN = re.compile(r"[0-9a-f]{16}\Z")


class RestoreMark(msgspec.Struct, frozen=True):
    """Content of a journal: which restore of which snapshot is unfinished."""

    snapshot: str
    source: bytes
    run: str
    """16 hexadecimal digits in the names of the run's temporary files."""

    def is_of(self, snapshot: str, source: bytes) -> bool:
        """Return whether it is that of the same restore."""
        return (self.snapshot, self.source) == (snapshot, source)

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        document = {"snapshot": self.snapshot, "source": self.source.hex(), "run": self.run}
        return msgspec.json.encode(document)

    @classmethod
    def decode(cls, data: bytes) -> RestoreMark | None:
        """Decode the file; None for anything that is not complete, because the run was cut short while writing it."""
        try:
            document = decode_json(data, dict[str, str])
            source = bytes.fromhex(document["source"])
            mark = cls(document["snapshot"], source, document["run"])
        except (msgspec.MsgspecError, ValueError, KeyError, RecursionError):
            return None
        return mark if _RUN.match(mark.run) else None


def read_mark(folder: int) -> RestoreMark | None:
    """Return the mark in a directory, None if there is none that can be read."""
    try:
        fd = _open(folder, os.O_RDONLY)
    except OSError:
        # Absent, unreadable for the caller, or something else with that name.
        return None
    try:
        return RestoreMark.decode(os.pread(fd, _MAX_MARK_BYTES, 0))
    finally:
        os.close(fd)


def new_run() -> str:
    """Return a new identifier of a run: 16 hexadecimal digits."""
    return os.urandom(8).hex()


class Journal:
    """The locked journal of a running restore; ended by `finish` when everything is restored, otherwise by `close`."""

    def __init__(self, folder: int, fd: int, mark: RestoreMark, resumed: bool) -> None:
        self._folder = os.dup(folder)
        self._fd = fd
        self.mark = mark
        self.resumed = resumed
        """True if the same restore was begun before and cut short."""

    @classmethod
    def begin(cls, folder: int, path: bytes, snapshot: str, source: bytes) -> Journal | None:
        """Create and lock the journal; None where no journal can be kept.

        Raises:
            Busy: another restore works in the directory.
        """
        try:
            fd = _open_locked(folder, path)
        except OSError as error:
            if error.errno in _NO_JOURNAL:
                return None
            raise
        before = RestoreMark.decode(os.pread(fd, _MAX_MARK_BYTES, 0))
        # The id of the dead run is taken over: by it its temporary files are recognised and removed.
        resumed = before is not None and before.is_of(snapshot, source)
        mark = RestoreMark(snapshot, source, before.run if before else new_run())
        try:
            data = mark.encode()
            os.ftruncate(fd, 0)
            os.pwrite(fd, data, 0)
            # Durable before the first file: after a power cut, files of an unknown run would be conflicts.
            os.fsync(fd)
            return cls(folder, fd, mark, resumed)
        except OSError:
            # A full disk, for instance: the restore meets the same error with the first file and reports it.
            try:
                unlink_if_there(folder, JOURNAL_NAME)
            finally:
                os.close(fd)
            return None

    def finish(self) -> None:
        """Remove the journal, as everything is restored, and close it in any case. OSError."""
        with closing(self):
            unlink_if_there(self._folder, JOURNAL_NAME)

    def close(self) -> None:
        """Close the journal and leave it for the next run."""
        os.close(self._fd)
        os.close(self._folder)


def _open_locked(folder: int, path: bytes) -> int:
    """Create or open the journal and lock it. Raises Busy while another run has the lock, and OSError as `_open`."""
    for _ in range(_MAX_LOCK_ATTEMPTS):
        fd = _open(folder, os.O_RDWR | os.O_CREAT)
        # The kernel drops the lock when the process dies, so a journal that is found unlocked is that of a dead run.
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            break
        except OSError:
            # A file system without locks: there the operator must not run two restores at once.
            return fd
        # A run that finished between open and flock has removed the file: a lock on it keeps nobody out, because
        # the next run makes a new file. The name that leads here now stays, as only the lock's holder removes it.
        if _is_named(folder, fd):
            return fd
        os.close(fd)
    raise Busy(f"another restore into {one_line(path)} is running", hint="wait for it to end")


def _is_named(folder: int, fd: int) -> bool:
    """Return whether the journal's name leads to the open file."""
    try:
        named = os.stat(JOURNAL_NAME, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(fd))


def _open(folder: int, flags: int) -> int:
    """Open the journal; OSError for a file that another user made or may write."""
    # O_NONBLOCK: a pipe with the journal's name must not block the open.
    fd = os.open(JOURNAL_NAME, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=folder)
    st = os.fstat(fd)
    # A journal that another user may write could declare any file to be the result of an earlier run.
    others = st.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISREG(st.st_mode) or st.st_nlink != 1 or st.st_uid != os.geteuid() or others:
        os.close(fd)
        raise OSError(errno.ELOOP, "the journal belongs to, or can be written by, another user")
    return fd
