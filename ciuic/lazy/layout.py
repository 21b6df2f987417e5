"""Directory of a lazy restore below its mount: what is where, how far it has come, and how the tree takes the destination's place.

In the destination, as long as it is incomplete::

    INCOMPLETE-RESTORE                     says in words what this is
    .ciuic-state/lazy-restore/lock         locked by the process that restores
    .ciuic-state/lazy-restore/record       which snapshot, and how far (JSON)
    .ciuic-state/lazy-restore/pending/     a hidden link of each incomplete file (incomplete_files.py)
    .ciuic-state/lazy-restore/tree/NAME    the tree

Guarantees: the record is replaced atomically and durably; every directory belongs to root alone, and is opened without following
links. The tree appears in the destination only after `LazyPhase.MOVING` is durable, which is after everything in it is. Killed at
any point, the next run goes on where this one ended.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress
from enum import Enum
from typing import Final

import msgspec

from ciuic import STATE_DIR_NAME
from ciuic.errors import Busy, CiuicError, DestinationExists
from ciuic.lazy.progress import LostFile
from ciuic.printable import one_line
from ciuic.protocol.state_directory import own_directory, remove_state
from ciuic.restore.destination import Remover, rename_new
from ciuic.system.mountinfo import LAZY_RESTORE
from ciuic.system.xattrs import read_xattrs

MARKER: Final = b"INCOMPLETE-RESTORE"
_RECORD, _LOCK, _PENDING, _TREE = b"record", b"lock", b"pending", b"tree"
_MAX_RECORD_BYTES: Final = 16 << 20
_MAX_FAILURES: Final = 10_000
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WORDS: Final = """\
This directory is being restored by ciuic, and is not complete: the process that restored it has ended, or its mount was taken away.
Run the same command again (ciuic restore --lazy …): it goes on. Or remove this directory with everything in it.
"""


class LazyPhase(str, Enum):
    """Phase of a lazy restore."""

    SKELETON = "skeleton"
    """Directories and placeholders are being made."""
    FILLING = "filling"
    """All names are there; files with a hidden link are incomplete."""
    MOVING = "moving"
    """Everything is complete, and is moved to the destination."""


class LazyRecord(msgspec.Struct):
    """Record from which a later run goes on."""

    snapshot: str
    source: str
    """Path at the snapshot, in hexadecimal."""
    special: bool
    phase: LazyPhase = LazyPhase.SKELETON
    lost: list[LostFile] = []
    left_out: int = 0
    left_out_because: str = ""
    boot: str = ""
    """Start of the machine in which placeholders and links were made, until they are durable; empty afterwards."""
    times: tuple[int, int] | None = None
    """Access and modification time of the restored directory in nanoseconds, once it is being moved."""
    version: int = 1

    def encode(self) -> bytes:
        """Return the record as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> LazyRecord:
        """Decode a record. ValueError for anything else."""
        try:
            record = msgspec.json.decode(data, type=cls)
            bytes.fromhex(record.source)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ValueError(f"not the record of a lazy restore: {error}") from None
        if record.version != 1:
            raise ValueError(f"the version must be 1, got {record.version}")
        return record


class LazyLayout:
    """The directories, open and locked. ``close`` lets them go and leaves them as they are."""

    def __init__(self, destination: int, path: bytes) -> None:
        """Open or make them in the destination, an open directory that stays the caller's.

        Raises:
            Busy: another process restores there.
            DestinationExists: the directory is not empty, and was not begun by a lazy restore.
            CiuicError: what an earlier run left cannot be read.
            OSError: they cannot be made.
        """
        self.destination: Final = destination
        self.path: Final = path
        self._opened: list[int] = []
        self.record: LazyRecord | None = None
        """Record of the run that was begun; None for a new one."""
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        names = set(map(os.fsencode, os.listdir(self.destination))) - {STATE_DIR_NAME, MARKER}
        begun = _has_directory(self.destination)
        if names and not begun:
            raise DestinationExists(
                f"{one_line(self.path)} is not empty, and --lazy restores into a new or empty directory",
                hint="restore without --lazy, or into another directory with -d",
            )
        state = self._own(self.destination, STATE_DIR_NAME)
        self.directory = self._own(state, LAZY_RESTORE)
        self._lock()
        self.record = self._read()
        if names and (self.record is None or self.record.phase is not LazyPhase.MOVING):
            raise DestinationExists(
                f"{one_line(self.path)} is an incomplete restore, and something else was put there since: "
                f"{', '.join(one_line(name) for name in sorted(names)[:5])}",
                hint="move it away, and run the command again",
            )
        self.pending = self._own(self.directory, _PENDING)
        self.tree = self._own(self.directory, _TREE)

    def _own(self, parent: int, name: bytes) -> int:
        fd = own_directory(parent, name)
        self._opened.append(fd)
        return fd

    def _lock(self) -> None:
        fd = os.open(_LOCK, os.O_RDWR | os.O_CREAT | _FILE, 0o600, dir_fd=self.directory)
        self._opened.append(fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(
                f"another process restores {one_line(self.path)}", hint="ciuic restore --status shows it"
            ) from None

    def _read(self) -> LazyRecord | None:
        try:
            fd = os.open(_RECORD, os.O_RDONLY | _FILE, dir_fd=self.directory)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb") as file:
            data = file.read(_MAX_RECORD_BYTES)
            if not data:
                # One that was not durable yet when the machine stopped.
                return None
            try:
                return LazyRecord.decode(data)
            except ValueError as error:
                raise CiuicError(
                    f"{one_line(self.path)} holds an interrupted lazy restore that cannot be read: {error}",
                    hint="remove the directory, and restore anew",
                ) from None

    def write(self, record: LazyRecord, *, durable: bool = True) -> None:
        """Replace the record, durably unless the caller says that a lost one does no harm."""
        record.lost = record.lost[:_MAX_FAILURES]
        temporary = _RECORD + b".new"
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=self.directory)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=self.directory)
        with os.fdopen(fd, "wb") as file:
            file.write(record.encode())
            file.flush()
            if durable:
                # The bytes before the name: a record that is cut would be taken for damage.
                os.fsync(fd)
        os.rename(temporary, _RECORD, src_dir_fd=self.directory, dst_dir_fd=self.directory)
        if durable:
            # The phase must be durable before what it permits.
            os.fsync(self.directory)
        self.record = record

    def needs_skeleton(self) -> bool:
        """Return whether the skeleton has to be made, or made anew."""
        record = self.record
        if record is None or record.phase is LazyPhase.SKELETON:
            return True
        # Not synced yet when the machine stopped: any of its names may be missing.
        return bool(record.boot) and record.boot != boot_id()

    def mark(self) -> None:
        """Put the file into the destination that says in words what it is."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE
        try:
            fd = os.open(MARKER, flags, 0o644, dir_fd=self.destination)
        except FileExistsError:
            # It is removed, not written to: it may be another name of any file, planted by the owner of the destination.
            os.unlink(MARKER, dir_fd=self.destination)
            fd = os.open(MARKER, flags, 0o644, dir_fd=self.destination)
        with os.fdopen(fd, "w") as file:
            file.write(_WORDS)
        os.fchmod(self.destination, 0o700)

    def empty(self) -> None:
        """Remove a skeleton that was cut short."""
        remover = Remover()
        for fd, name in ((self.tree, _TREE), (self.pending, _PENDING)):
            for entry in map(os.fsencode, os.listdir(fd)):
                remover.remove(fd, entry, name + b"/" + entry, b"")
        if remover.failures:
            path, reason = remover.failures[0]
            raise CiuicError(f"{one_line(path)} of an interrupted restore is in the way: {reason}")

    def open_tree(self, name: bytes) -> int:
        """Open the restored directory in the tree; the caller closes the descriptor."""
        return os.open(name, _DIRECTORY, dir_fd=self.tree)

    def finish(self, record: LazyRecord, content: int) -> None:
        """Move the tree from the directory ``content`` to the destination, give that its attributes, and remove what is ours.

        Raises:
            OSError: EEXIST where something was put into the destination meanwhile.
        """
        if record.times is None:
            st = os.fstat(content)
            record.times = (st.st_atime_ns, st.st_mtime_ns)
            record.phase = LazyPhase.MOVING
            # Before the first move: a later run must not take what was moved for something that is in the way.
            self.write(record)
        # What an earlier run has moved is in the destination already.
        for name in map(os.fsencode, os.listdir(content)):
            rename_new(content, name, self.destination, name)
        # An earlier run may have been of a version whose core made a state directory; a remover of trees spares it.
        remove_state(content)
        _copy_attributes(content, self.destination)
        # Without this a power cut could leave neither the names nor the record that would move them again.
        os.fsync(self.destination)
        self._remove_own()
        os.utime(self.destination, ns=record.times)
        os.fsync(self.destination)

    def _remove_own(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(MARKER, dir_fd=self.destination)
        state = own_directory(self.destination, STATE_DIR_NAME)
        try:
            Remover().remove(state, LAZY_RESTORE, LAZY_RESTORE, b"")
        finally:
            os.close(state)
        # Another state of ciuic may be there.
        with suppress(OSError):
            os.rmdir(STATE_DIR_NAME, dir_fd=self.destination)

    def close(self) -> None:
        """Close everything; the lock is released."""
        for fd in reversed(self._opened):
            os.close(fd)
        self._opened = []


def boot_id() -> str:
    """Return the id of this start of the machine."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _has_directory(destination: int) -> bool:
    """Return whether a lazy restore was begun in an open directory, whichever user owns what is there."""
    try:
        os.stat(STATE_DIR_NAME + b"/" + LAZY_RESTORE, dir_fd=destination, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return False
        raise
    return True


def _copy_attributes(source: int, target: int) -> None:
    """Give a directory owner, extended attributes and mode of another one, in an order in which no user is let in too early."""
    st = os.fstat(source)
    # The target has mode 0700 and is root's until the last step.
    os.chown(target, st.st_uid, st.st_gid)
    wanted = read_xattrs(source)
    for name in read_xattrs(target).keys() - wanted.keys():
        with suppress(OSError):
            os.removexattr(target, name)
    for name, value in wanted.items():
        # What a security module decides stays as it decides; the plain restore has reported what could not be set.
        with suppress(OSError):
            os.setxattr(target, name, value)
    os.chmod(target, stat.S_IMODE(st.st_mode))
