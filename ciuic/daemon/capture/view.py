"""View of a root as of the cut, read while the job goes on changing it.

Guarantees: what this module returns is true at the end of the epoch that its log reader was made for. The
reason is the order of every read: read the backing directory, then poll the undo log, then let the log
override. The overlay writes a record before the change that the record protects against, so what was read too
late has its record by then. Inodes are pinned by O_PATH descriptors before the poll, so that the inode of a
name cannot change between the look-up and the use.

With `OfflineLog` (no overlay) the same code reads the current state, which is not exact where a process
writes meanwhile.

Leaves to others: which names to visit (walk.py) and file content (content.py).
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

from ciuic import STATE_DIR_NAME
from ciuic.fuse_layer.undo_format import LOG_NAME, LogReader, NameRecord, OldStat, UndoLost, hold_name
from ciuic.system import mountinfo
from ciuic.system.disk import PIN, read_xattrs
from ciuic.system.mountinfo import mount_id, place_of
from ciuic.system.spill import NameTable, Spill

# Attempts to open a worker's descriptor while one of its threads has another user's ids, which takes
# microseconds.
_PATIENCE: Final = 100
_PATIENCE_SECONDS: Final = 0.005
# Attempts to read link count and hold link without a change in between.
_STAT_RETRIES: Final = 100
# Names of one batch of a listing.
_LISTED: Final = 4096


class BackingUnreadable(Exception):
    """The backing file system refused to read an entry. `error` is its error."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror or str(error))
        self.error = error


class OfflineLog(LogReader):
    """Empty undo log, for a directory that no overlay serves."""

    def __init__(self) -> None:
        super().__init__("", 0)

    def poll(self) -> int:
        """Return 0: there are never new records."""
        return 0


class PinnedInode:
    """Inode as of the cut, pinned by a descriptor. Close it, or use it as a context manager."""

    __slots__ = ("fd", "ino", "mountpoint", "removed_epoch", "stat", "target", "xattrs")

    def __init__(self, fd: int, ino: int, removed_epoch: int | None = None) -> None:
        self.fd = fd
        """O_PATH descriptor of the inode; -1 for a directory that was removed since, of which only records
        are left."""
        self.ino = ino
        self.removed_epoch = removed_epoch
        """Epoch, for a removed directory, of the record of its removal. Its number may be reused after
        that, and records of a later epoch may belong to another directory with the number."""
        self.mountpoint = False
        """True if another file system is mounted here; the attributes are those of its root then."""
        self.stat: OldStat
        self.xattrs: dict[bytes, bytes] = {}
        self.target = b""

    @property
    def is_dir(self) -> bool:
        """True for a directory."""
        return stat.S_ISDIR(self.stat.mode)

    @property
    def is_file(self) -> bool:
        """True for a regular file."""
        return stat.S_ISREG(self.stat.mode)

    def close(self) -> None:
        """Close the descriptor. A second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> PinnedInode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ListedNames:
    """Iterator over names in byte order."""

    def __init__(self, names: NameTable, *, left_out: bytes = b"", room_bytes: int = sys.maxsize) -> None:
        if names.held_bytes > room_bytes:
            names.write_out()
        self.held_bytes = names.held_bytes
        """Memory that they take until the last one was returned."""
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
    """A root as of the cut. Not thread-safe. Every method may raise UndoLost or UndoDamaged."""

    def __init__(
        self, backing_fd: int, *, log: LogReader, spill: Spill, undo_fd: int = -1, worker_pid: int = 0
    ) -> None:
        """Prepare to read. Descriptors stay the caller's.

        Args:
            backing_fd: descriptor of the backing directory.
            log: reader of the undo log.
            spill: temporary storage for lists of names.
            undo_fd: descriptor of the undo directory; -1: offline.
            worker_pid: process whose descriptors the log mentions.
        """
        self._spill = spill
        self.backing_fd = backing_fd
        self.log = log
        self.undo_fd = undo_fd
        self.worker_pid = worker_pid
        self.exact = undo_fd >= 0
        """True if concurrent changes are in the log."""
        self.device = os.fstat(backing_fd).st_dev
        # As of now: a file system that a user mounts below the root during the capture can block it
        # (docs/security.md, limits).
        self._user_mounts = frozenset(
            mount.mount_id
            for mount in mountinfo.read()
            if mountinfo.is_served_by_a_user(mount.fs_type, mount.super_options)
        )

    def root(self) -> PinnedInode:
        """Return the root directory itself. May raise BackingUnreadable."""
        return self._finish(self._pin(b".", self.backing_fd, os.O_DIRECTORY))

    def names(
        self, directory: PinnedInode, *, is_root: bool = False, room_bytes: int = sys.maxsize
    ) -> ListedNames:
        """Return the names that may have been in a directory at the cut, sorted.

        `child` tells which of them were.

        Args:
            directory: the directory.
            is_root: the directory is the root, whose state directory is omitted.
            room_bytes: memory for the names; more of them wait in a temporary file.

        Raises:
            BackingUnreadable: the directory cannot be read.
        """
        names = self._spill.names()
        for listed in self._listing(directory) if directory.fd >= 0 else ():
            for name in listed:
                names.put(name)
        self.log.poll()
        # Names that were removed since the cut are in the log alone.
        for name in self.log.names(directory.ino):
            record = self._name_record(directory, name)
            if record is not None and record.ino:
                names.put(name)
        return ListedNames(names, left_out=STATE_DIR_NAME if is_root else b"", room_bytes=room_bytes)

    def child(self, directory: PinnedInode, name: bytes) -> PinnedInode | None:
        """Return the inode that a name led to at the cut, with its attributes then.

        Return None when the name did not exist.

        Raises:
            BackingUnreadable: it cannot be read.
        """
        inode: PinnedInode | None = None
        refused: BackingUnreadable | None = None
        try:
            inode = self._pin(name, directory.fd) if directory.fd >= 0 else None
        except FileNotFoundError:
            pass
        except OSError as error:
            # Raised only where the log has no record: the name may have led to another inode at the cut.
            refused = BackingUnreadable(error)
        self.log.poll()
        record = self._name_record(directory, name)
        if record is not None:
            if inode is not None and (inode.ino != record.ino or _is_removed_directory(record)):
                inode.close()
                inode = None
            if record.ino == 0:
                return None
            if inode is None:
                inode = self._held(record)
        elif inode is not None:
            inode = self._before_swap(inode)
        elif refused is not None:
            raise refused
        return None if inode is None else self._finish(inode)

    def open_content(self, inode: PinnedInode) -> int:
        """Return a descriptor of a regular file's current data.

        The caller corrects what it reads by the log, and closes the descriptor.
        """
        try:
            return open_pinned(inode.fd, os.O_RDONLY)
        except OSError as error:
            raise BackingUnreadable(error) from error

    def _name_record(self, directory: PinnedInode, name: bytes) -> NameRecord | None:
        record = self.log.name(directory.ino, name)
        if (
            record is not None
            and directory.removed_epoch is not None
            and record.epoch > directory.removed_epoch
        ):
            return None
        return record

    def _listing(self, directory: PinnedInode) -> Iterator[list[bytes]]:
        """Yield the names that are in a directory now, in batches. May raise BackingUnreadable."""
        try:
            fd = open_pinned(directory.fd, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise BackingUnreadable(error) from error
        try:
            with os.scandir(fd) as entries:
                while True:
                    try:
                        names = [os.fsencode(entry.name) for entry in islice(entries, _LISTED)]
                    except OSError as error:
                        raise BackingUnreadable(error) from error
                    if not names:
                        return
                    yield names
        finally:
            os.close(fd)

    def _pin(self, name: bytes, dir_fd: int, extra_flags: int = 0) -> PinnedInode:
        # O_PATH sends no request to a file system that is mounted here, and opens no device or fifo.
        fd = os.open(name, PIN | extra_flags, dir_fd=dir_fd)
        try:
            # Before any call that reaches it: the user who serves it may never answer, and no other root
            # would be captured.
            if self._user_mounts and mount_id(fd) in self._user_mounts:
                raise PermissionError(errno.EACCES, "a user's FUSE file system is mounted here")
            st = os.fstat(fd)
            inode = PinnedInode(fd, st.st_ino)
            # Of the directory and not of the root: what the undo log holds may be reached through another mount of the file system.
            here, above = place_of(fd), place_of(dir_fd)
            inode.mountpoint = here != above
            # On one mount only a subvolume's top, a directory, has another device. Overlayfs gives a file the one of its layer,
            # and with it an inode number that another file may have: it would be recorded as a mount point, without content.
            if inode.mountpoint and here[1] == above[1] and not stat.S_ISDIR(st.st_mode):
                raise OSError(
                    errno.EXDEV, "it lies in a layer of overlayfs on another file system than the root"
                )
            return inode
        except BaseException:
            os.close(fd)
            raise

    def _held(self, record: NameRecord) -> PinnedInode:
        """Return the inode of a name record.

        It is reached through the worker's descriptor, its hold link, or records alone.
        """
        # A removed directory has no descriptor: it was empty when it was removed, so every name that it had
        # at the cut has a record, and so have its attributes.
        if _is_removed_directory(record):
            return PinnedInode(-1, record.ino, record.epoch)
        if record.fd >= 0:
            return self._pin_undo(b"/proc/%d/fd/%d" % (self.worker_pid, record.fd), record.ino, follow=True)
        return self._pin_undo(os.fsencode(hold_name(record.ino)), record.ino)

    def _before_swap(self, inode: PinnedInode) -> PinnedInode:
        """Return the inode that this one replaced at a truncation since the cut.

        The inode itself where there is none.
        """
        swap = self.log.swapped(inode.ino)
        if swap is None:
            return inode
        inode.close()
        return self._pin_undo(os.fsencode(hold_name(swap.ino)), swap.ino)

    def _pin_undo(self, path: bytes, ino: int, *, follow: bool = False) -> PinnedInode:
        try:
            fd = _open_patiently(path, PIN & ~os.O_NOFOLLOW if follow else PIN, self.undo_fd)
        except OSError as error:
            self.log.poll()  # raises when the reason is that the epoch was given up
            raise UndoLost(f"inode {ino} is not where the undo log keeps it: {error}") from error
        found = os.fstat(fd).st_ino
        if found != ino:
            os.close(fd)
            self.log.poll()
            raise UndoLost(f"the undo log keeps inode {found} where {ino} should be")
        return PinnedInode(fd, ino)

    def _finish(self, inode: PinnedInode) -> PinnedInode:
        """Set the attributes of a pinned inode as of the cut, and return it."""
        if inode.fd < 0:
            return self._finish_removed(inode)
        try:
            st, hold_links = self._stat(inode)
            inode.mountpoint = inode.mountpoint or st.st_dev != self.device
            # Another file system is asked for nothing but the attributes of its top.
            xattrs = {} if inode.mountpoint else _readable_xattrs(inode.fd)
            if stat.S_ISLNK(st.st_mode):
                # An empty path reads the symbolic link that the descriptor pins (readlinkat(2)).
                inode.target = os.readlink(b"", dir_fd=inode.fd)
        except OSError as error:
            inode.close()
            raise BackingUnreadable(error) from error
        except BaseException:
            inode.close()
            raise
        self.log.poll()
        record = None if inode.mountpoint else self.log.inode(inode.ino)
        if record is None:
            inode.stat = OldStat.of(st, hold_links=hold_links)
            inode.xattrs = xattrs
        else:
            inode.stat = record.stat
            inode.xattrs = record.xattrs
        return inode

    def _finish_removed(self, inode: PinnedInode) -> PinnedInode:
        record = self.log.inode(inode.ino)
        if record is None:
            raise UndoLost(f"removed directory {inode.ino} has no record of its attributes")
        inode.stat = record.stat
        inode.xattrs = record.xattrs
        return inode

    def _stat(self, inode: PinnedInode) -> tuple[os.stat_result, int]:
        """Return the current attributes, and the number of the overlay's own hold links among the links."""
        for _ in range(_STAT_RETRIES):
            st = os.fstat(inode.fd)
            if st.st_nlink < 2 or not self.exact or stat.S_ISDIR(st.st_mode):
                return st, 0
            held = self._is_held(inode.ino)
            # An unchanged link count means that the hold link was neither made nor dropped in between.
            if os.fstat(inode.fd).st_nlink == st.st_nlink:
                return st, int(held)
        return st, int(held)

    def _is_held(self, ino: int) -> bool:
        try:
            return os.stat(hold_name(ino), dir_fd=self.undo_fd, follow_symlinks=False).st_ino == ino
        except FileNotFoundError:
            return False


def _readable_xattrs(fd: int) -> dict[bytes, bytes]:
    """Return the extended attributes that may be read; none where listing them is denied.

    The file itself is captured anyway.
    """
    with suppress(PermissionError):
        return read_xattrs(b"/proc/self/fd/%d" % fd)
    return {}


def _is_removed_directory(record: NameRecord) -> bool:
    return record.fd < 0 and record.file_type << 12 == stat.S_IFDIR


def _open_patiently(path: bytes, flags: int, dir_fd: int) -> int:
    """Open a path, and retry for half a second where permission is denied."""
    # Without CAP_SYS_PTRACE the worker's descriptors cannot be opened in the microseconds in which one of its
    # threads has another user's ids (syscalls.set_fs_ids).
    for _ in range(_PATIENCE):
        try:
            return os.open(path, flags, dir_fd=dir_fd)
        except PermissionError:
            time.sleep(_PATIENCE_SECONDS)
    return os.open(path, flags, dir_fd=dir_fd)


def open_log(undo_fd: int, epoch: int) -> LogReader:
    """Return a reader of the undo log in this directory for the capture of `epoch`."""
    return LogReader(f"/proc/self/fd/{undo_fd}/{LOG_NAME}", epoch)


def open_pinned(fd: int, flags: int) -> int:
    """Open the inode of an O_PATH descriptor, without changing its access time where that is permitted."""
    # An O_PATH descriptor cannot be read; its inode is opened anew through /proc, whatever its name is by
    # now.
    path = b"/proc/self/fd/%d" % fd
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOATIME)
    except PermissionError:  # not the owner and not root: only offline, by hand
        return os.open(path, flags | os.O_CLOEXEC)
