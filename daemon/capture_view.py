"""The state of a root at the cut, read while the job goes on changing it.

Guarantee: what this module returns is true at the end of the epoch that its log reader was made for. It holds because
everything is done in one order: read the backing directory, then poll the undo log, then let the log win. The overlay writes
a record before the change that the record protects against, so whatever was read too late has its record by then.
Inodes are pinned by O_PATH descriptors before the poll: what a name leads to cannot change between the question and the use.

With `OfflineLog` (no overlay) the same code reads what is there, and exactness ends where somebody writes meanwhile.

Leaves to others: what to visit (capture_walk) and file content (capture_content).
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from types import TracebackType
from typing import Final

from ciuic import STATE_DIR_NAME, mountinfo
from ciuic.fuse_layer.undo_format import LOG_NAME, LogReader, NameRecord, OldStat, UndoLost, hold_name
from ciuic.spill import NameTable, Spill
from ciuic.state_directory import mount_id
from ciuic.xattrs import read_xattrs

_PATIENCE: Final = 100
_PATIENCE_SECONDS: Final = 0.005
_PIN: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_STAT_RETRIES: Final = 100
_LISTED: Final = 4096


class Unreadable(Exception):
    """The backing file system refused to show something. `error` is why."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror or str(error))
        self.error = error


class OfflineLog(LogReader):
    """The undo log of a directory that no overlay serves: there is nothing in it."""

    def __init__(self) -> None:
        super().__init__("", 0)

    def poll(self) -> int:
        return 0


class Thing:
    """One inode as it was at the cut, pinned. Close it, or use it as a context manager."""

    __slots__ = ("fd", "ino", "mountpoint", "removed_epoch", "stat", "target", "xattrs")

    def __init__(self, fd: int, ino: int, removed_epoch: int | None = None) -> None:
        self.fd = fd
        """O_PATH descriptor of the inode; -1 for a directory that was removed since, of which only records are left."""
        self.ino = ino
        self.removed_epoch = removed_epoch
        """Removed directories: the epoch of the record that says so. Nothing holds the number of a removed directory, and
        records of a later epoch may speak of another directory that got it."""
        self.mountpoint = False
        """Another file system is mounted here: attributes are those of its root."""
        self.stat: OldStat
        self.xattrs: dict[bytes, bytes] = {}
        self.target = b""

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.stat.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.stat.mode)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Thing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ListedNames:
    """Names in byte order, one after the other."""

    def __init__(self, names: NameTable, *, left_out: bytes = b"", room_bytes: int = sys.maxsize) -> None:
        if names.held_bytes > room_bytes:
            names.write_out()
        self.held_bytes = names.held_bytes
        """What they take in memory until the last one was given."""
        self._names = _until_done(names, left_out)

    def __iter__(self) -> Iterator[bytes]:
        return self._names

    def __next__(self) -> bytes:
        return next(self._names)


def _until_done(names: NameTable, left_out: bytes) -> Iterator[bytes]:
    try:
        yield from (name for name, _ in names.items() if name != left_out)
    finally:
        names.clear()


class SealedView:
    """A root as it was at the cut. Not thread-safe.

    `backing_fd` leads to the backing directory, `undo_fd` to its undo directory (-1 offline), `worker_pid` is the process whose
    descriptors the log mentions. Descriptors stay the caller's. Every method may raise UndoLost or UndoDamaged.
    """

    def __init__(
        self, backing_fd: int, *, log: LogReader, spill: Spill, undo_fd: int = -1, worker_pid: int = 0
    ) -> None:
        self._spill = spill
        self.backing_fd = backing_fd
        self.log = log
        self.undo_fd = undo_fd
        self.worker_pid = worker_pid
        self.exact = undo_fd >= 0
        """Whether changes made meanwhile are in the log."""
        self.device = os.fstat(backing_fd).st_dev
        self._user_mounts = frozenset(
            mount.mount_id
            for mount in mountinfo.read()
            if mountinfo.is_served_by_a_user(mount.fs_type, mount.super_options)
        )

    def root(self) -> Thing:
        """The root directory itself. Unreadable."""
        return self._finish(self._pin(b".", self.backing_fd, os.O_DIRECTORY))

    def names(self, directory: Thing, *, is_root: bool = False, room_bytes: int = sys.maxsize) -> ListedNames:
        """Names that may have been in the directory at the cut, sorted; `child` says which of them were. They are read before
        this returns, and wait in a temporary file if they take more memory than ``room_bytes``. Unreadable."""
        names = self._spill.names()
        for listed in self._listing(directory) if directory.fd >= 0 else ():
            for name in listed:
                names.put(name)
        self.log.poll()
        for name in self.log.names(directory.ino):
            record = self._name_record(directory, name)
            if record is not None and record.ino:
                names.put(name)
        return ListedNames(names, left_out=STATE_DIR_NAME if is_root else b"", room_bytes=room_bytes)

    def child(self, directory: Thing, name: bytes) -> Thing | None:
        """What the name led to at the cut, with its attributes then; None when it did not exist. Unreadable."""
        thing: Thing | None = None
        refused: Unreadable | None = None
        try:
            thing = self._pin(name, directory.fd) if directory.fd >= 0 else None
        except FileNotFoundError:
            pass
        except OSError as error:
            refused = Unreadable(error)
        self.log.poll()
        record = self._name_record(directory, name)
        if record is not None:
            if thing is not None and (thing.ino != record.ino or _is_removed_directory(record)):
                thing.close()
                thing = None
            if record.ino == 0:
                return None
            if thing is None:
                thing = self._held(record)
        elif thing is not None:
            thing = self._before_swap(thing)
        elif refused is not None:
            raise refused
        return None if thing is None else self._finish(thing)

    def open_content(self, thing: Thing) -> int:
        """A descriptor for reading a regular file's data as it is now; the caller corrects it by the log and closes it."""
        try:
            return open_pinned(thing.fd, os.O_RDONLY)
        except OSError as error:
            raise Unreadable(error) from error

    def _name_record(self, directory: Thing, name: bytes) -> NameRecord | None:
        record = self.log.name(directory.ino, name)
        if (
            record is not None
            and directory.removed_epoch is not None
            and record.epoch > directory.removed_epoch
        ):
            return None
        return record

    def _listing(self, directory: Thing) -> Iterator[list[bytes]]:
        """The names that are in the directory now, some at a time. Unreadable."""
        try:
            fd = open_pinned(directory.fd, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise Unreadable(error) from error
        try:
            with os.scandir(fd) as entries:
                while True:
                    try:
                        names = [os.fsencode(entry.name) for entry in islice(entries, _LISTED)]
                    except OSError as error:
                        raise Unreadable(error) from error
                    if not names:
                        return
                    yield names
        finally:
            os.close(fd)

    def _pin(self, name: bytes, dir_fd: int, extra_flags: int = 0) -> Thing:
        fd = os.open(name, _PIN | extra_flags, dir_fd=dir_fd)
        try:
            # Before anything is asked of it: the user who serves it may never answer, and no other root would be captured.
            if self._user_mounts and mount_id(fd) in self._user_mounts:
                raise PermissionError(errno.EACCES, "a user's FUSE file system is mounted here")
            return Thing(fd, os.fstat(fd).st_ino)
        except BaseException:
            os.close(fd)
            raise

    def _held(self, record: NameRecord) -> Thing:
        """The inode that a name record speaks of: by the worker's descriptor, by its hold link, or by records alone.

        A removed directory has no descriptor: it was empty when it went, so every name that it had at the cut has a
        record, and so have its attributes.
        """
        if _is_removed_directory(record):
            return Thing(-1, record.ino, record.epoch)
        if record.fd >= 0:
            return self._pin_undo(b"/proc/%d/fd/%d" % (self.worker_pid, record.fd), record.ino, follow=True)
        return self._pin_undo(os.fsencode(hold_name(record.ino)), record.ino)

    def _before_swap(self, thing: Thing) -> Thing:
        """The inode that stood in this one's place at the cut, when a truncation put a new one there since."""
        swap = self.log.swapped(thing.ino)
        if swap is None:
            return thing
        thing.close()
        return self._pin_undo(os.fsencode(hold_name(swap.ino)), swap.ino)

    def _pin_undo(self, path: bytes, ino: int, *, follow: bool = False) -> Thing:
        try:
            fd = _open_patiently(path, _PIN & ~os.O_NOFOLLOW if follow else _PIN, self.undo_fd)
        except OSError as error:
            self.log.poll()  # raises when the reason is that the epoch was given up
            raise UndoLost(f"inode {ino} is not where the undo log keeps it: {error}") from error
        found = os.fstat(fd).st_ino
        if found != ino:
            os.close(fd)
            self.log.poll()
            raise UndoLost(f"the undo log keeps inode {found} where {ino} should be")
        return Thing(fd, ino)

    def _finish(self, thing: Thing) -> Thing:
        """Attributes of a pinned inode at the cut."""
        if thing.fd < 0:
            return self._finish_removed(thing)
        try:
            st, hold_links = self._stat(thing)
            thing.mountpoint = st.st_dev != self.device
            xattrs = {} if thing.mountpoint else _readable_xattrs(thing.fd)
            if stat.S_ISLNK(st.st_mode):
                thing.target = os.readlink(b"", dir_fd=thing.fd)
        except OSError as error:
            thing.close()
            raise Unreadable(error) from error
        except BaseException:
            thing.close()
            raise
        self.log.poll()
        record = None if thing.mountpoint else self.log.inode(thing.ino)
        if record is None:
            thing.stat = OldStat.of(st, hold_links=hold_links)
            thing.xattrs = xattrs
        else:
            thing.stat = record.stat
            thing.xattrs = record.xattrs
        return thing

    def _finish_removed(self, thing: Thing) -> Thing:
        record = self.log.inode(thing.ino)
        if record is None:
            raise UndoLost(f"removed directory {thing.ino} has no record of its attributes")
        thing.stat = record.stat
        thing.xattrs = record.xattrs
        return thing

    def _stat(self, thing: Thing) -> tuple[os.stat_result, int]:
        """Attributes now, and how many of the links are the overlay's own hold link."""
        for _ in range(_STAT_RETRIES):
            st = os.fstat(thing.fd)
            if st.st_nlink < 2 or not self.exact or stat.S_ISDIR(st.st_mode):
                return st, 0
            held = self._is_held(thing.ino)
            if os.fstat(thing.fd).st_nlink == st.st_nlink:
                return st, int(held)
        return st, int(held)

    def _is_held(self, ino: int) -> bool:
        try:
            return os.stat(hold_name(ino), dir_fd=self.undo_fd, follow_symlinks=False).st_ino == ino
        except FileNotFoundError:
            return False


def _readable_xattrs(fd: int) -> dict[bytes, bytes]:
    """Return the extended attributes that may be read, none where even listing them is denied: the file itself is captured."""
    with suppress(PermissionError):
        return read_xattrs(b"/proc/self/fd/%d" % fd)
    return {}


def _is_removed_directory(record: NameRecord) -> bool:
    return record.fd < 0 and record.file_type << 12 == stat.S_IFDIR


def _open_patiently(path: bytes, flags: int, dir_fd: int) -> int:
    """Without CAP_SYS_PTRACE the worker's descriptors are closed to us for the microseconds in which one of its threads
    takes another user's ids (syscalls.set_fs_ids).
    """
    for _ in range(_PATIENCE):
        try:
            return os.open(path, flags, dir_fd=dir_fd)
        except PermissionError:
            time.sleep(_PATIENCE_SECONDS)
    return os.open(path, flags, dir_fd=dir_fd)


def open_log(undo_fd: int, epoch: int) -> LogReader:
    """The undo log in this directory, for capture of `epoch`."""
    return LogReader(f"/proc/self/fd/{undo_fd}/{LOG_NAME}", epoch)


def open_pinned(fd: int, flags: int) -> int:
    """Opens what an O_PATH descriptor leads to, without moving its access time where we may."""
    path = b"/proc/self/fd/%d" % fd
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOATIME)
    except PermissionError:  # not the owner and not root: only offline, by hand
        return os.open(path, flags | os.O_CLOEXEC)
