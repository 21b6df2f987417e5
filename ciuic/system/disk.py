"""File operations: how files that others may have made are opened, what makes a change of files durable, locks and attributes.

Opening: regular files only, whatever lies under their names. No symbolic link is followed, so that a
directory made by another user leads no reader and no writer to a file outside; nothing waits for a pipe, a
device or a socket, and none of them is read.

Replacing: a reader, also after a crash, sees either the whole old content or the whole new content. Until then the new
one has a temporary name in the same directory: `<name>.tmp` where one process at a time writes the file, and a
process that was killed leaves one at most, which the next removes; otherwise `.<name>.<random>.tmp`, which
`remove_leftovers` removes.

Durable operations are in one object, `Disk`, so that a test can fail any of them, tear a write, or lose
unsynced ones. Everything that must survive a crash goes through it, and the order that makes a file durable
under its name is written once (`replacing`). SQLite is the exception: the index can be rebuilt, so nothing
durable depends on it.

Locks are those of flock(2), which the kernel releases when the process ends, however it ends. flock and not fcntl: an fcntl lock is lost
when any descriptor of the file is closed in this process. Who the holder is, and what a file system without locks means, is left to
the caller.

A `LinkedPath` that is longer than any that the kernel takes (PATH_MAX) costs its last name and a reference to the path above, and is
joined on request. Stored completely, the paths of 2,048 levels of long names take half a gigabyte.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock an open file without waiting; return whether it is locked now.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        # EINTR: a signal came first; the caller may try again.
        if error.errno in (errno.EWOULDBLOCK, errno.EINTR):
            return False
        raise
    return True


def open_locked(
    path: str | bytes | os.PathLike[str], *, mode: int = 0o600, dir_fd: int | None = None, wait: bool = False
) -> int:
    """Open a file, made if it is missing, with an exclusive lock, which ends with the descriptor.

    Args:
        path: File, no symbolic link; with ``dir_fd`` a name in this directory.
        mode: Permissions of a new file, as far as the umask leaves them.
        dir_fd: Descriptor of the directory; None for a path.
        wait: Whether to wait for the lock.

    Raises:
        BlockingIOError: another process has the lock.
        OSError: the file cannot be opened, or the file system has no locks.
    """
    while True:
        fd = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=dir_fd
        )
        try:
            fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder before may have removed or replaced the file meanwhile: a lock on that one excludes nobody.
            if os.path.samestat(os.fstat(fd), os.stat(path, dir_fd=dir_fd, follow_symlinks=False)):
                return fd
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


MAX_KEPT_BYTES: Final = 4096
"""Length up to which a path is stored completely."""


class LinkedPath:
    """A path. ``above`` is the path of its directory; a path without ``above`` is stored completely, however long."""

    __slots__ = ("_above", "_text")

    def __init__(self, path: bytes, above: LinkedPath | None = None) -> None:
        is_long = above is not None and len(path) > MAX_KEPT_BYTES
        self._above = above if is_long else None
        self._text = path.rpartition(b"/")[2] if is_long else path

    def __bytes__(self) -> bytes:
        """Return the complete path."""
        if self._above is None:
            return self._text
        names: list[bytes] = []
        at = self
        while at._above is not None:
            names.append(at._text)
            at = at._above
        return b"/".join([at._text, *reversed(names)])


# Errors of a file system that has no extended attributes; ENOTSUP is the same number as EOPNOTSUPP.
_NO_XATTRS: Final = (errno.EOPNOTSUPP, errno.ENOSYS)
_ACL_DUPLICATES: Final = frozenset({b"trusted.SGI_ACL_FILE", b"trusted.SGI_ACL_DEFAULT"})
"""Attributes as which XFS shows its POSIX ACLs a second time. On another file system they are ordinary ones, which an ACL
that is changed or removed later does not reach: carried back to XFS, they would set the older ACL."""
# Errors of an attribute that this process may not read.
_NOT_ADMITTED: Final = (errno.EACCES, errno.EPERM)


def read_xattrs(
    target: int | bytes, *, follow: bool = True, skip_unreadable: bool = True
) -> dict[bytes, bytes]:
    """Return every attribute of a descriptor or a path, but `is_acl_duplicate`; none where the file system has none.

    Args:
        target: descriptor or path.
        follow: follow a symbolic link at the end of a path.
        skip_unreadable: leave out an attribute whose value this process may not read, instead of raising PermissionError.

    Raises:
        PermissionError: the attributes may not be listed, or a value may not be read and is not to be skipped.
        OSError: they cannot be read for another reason.
    """
    # Python raises ValueError for follow_symlinks=False beside a descriptor.
    options = {} if isinstance(target, int) else {"follow_symlinks": follow}
    skipped = (*_NO_XATTRS, *_NOT_ADMITTED) if skip_unreadable else _NO_XATTRS
    try:
        names = os.listxattr(target, **options)
    except OSError as error:
        if error.errno in _NO_XATTRS:
            return {}
        raise
    found = {}
    for name in map(os.fsencode, names):
        if is_acl_duplicate(name):
            continue
        try:
            found[name] = os.getxattr(target, name, **options)
        except OSError as error:
            # ENODATA: removed since it was listed.
            if error.errno not in (errno.ENODATA, *skipped):
                raise
    return found


def is_acl_duplicate(name: bytes) -> bool:
    """Return whether an attribute says what the POSIX ACL attributes say, in a file system's own way."""
    return name in _ACL_DUPLICATES


# Flags of open(2) for what others may have put there: none follows a symbolic link at the end of the path. They have
# O_CLOEXEC for calls other than os.open, which sets it itself (PEP 446).
# O_PATH opens an inode without a permission to read, and wakes no device.
PIN: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
PIN_DIRECTORY: Final = PIN | os.O_DIRECTORY
READ_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a pipe does not wait for its other end. O_NOCTTY: a terminal that lies there does not
# become the controlling terminal of a daemon (open(2)).
READ_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a pipe that nobody reads is an error (ENXIO) and not waited for.
APPEND_FILE: Final = (
    os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
)
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# Errors of open(2) for a symbolic link, a pipe or socket, a device without driver and a directory.
_OTHER_KINDS = (errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EISDIR)
_TEMPORARY: Final = ".tmp"
# Of a long name, so that the temporary name fits into NAME_MAX (255 bytes).
_MAX_STEM_BYTES: Final = 200
# linux/fs.h: source descriptor, its offset, length, offset in the target.
_FICLONERANGE: Final = 0x4020940D
_RANGE: Final = struct.Struct("=qQQQ")


def open_regular(
    path: str | bytes | os.PathLike[str], flags: int, mode: int = 0o600, *, dir_fd: int | None = None
) -> int:
    """Open a file like os.open. OSError (EINVAL) for anything but a regular file."""
    try:
        fd = os.open(path, flags | READ_FILE, mode, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in _OTHER_KINDS:
            raise _irregular(path) from None
        raise
    # O_NONBLOCK makes open(2) return for a pipe or a device, so the type can be checked here.
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _irregular(path)
    return fd


def read_regular(
    path: str | bytes | os.PathLike[str], limit_bytes: int, *, dir_fd: int | None = None
) -> bytes:
    """Return the first bytes of a file, at most ``limit_bytes``. OSError, also (EINVAL) for anything but a regular file."""
    fd = open_regular(path, os.O_RDONLY, dir_fd=dir_fd)
    with os.fdopen(fd, "rb") as file:
        # read() allocates what it is asked for, so the request is limited to the size of the file.
        return file.read(min(limit_bytes, os.fstat(fd).st_size))


def open_to_write(path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> int:
    """Open a file for writing; refuse one with a second name where others may make names.

    Such a file may be a file of root elsewhere. In the caller's own directory it is a copy made with `cp -l`.
    """
    fd = open_regular(path, flags, mode)
    if os.fstat(fd).st_nlink > 1 and who_else_writes(os.path.dirname(os.fspath(path))):
        os.close(fd)
        raise OSError(errno.EINVAL, "it has a second hard link, so it is not written to", os.fspath(path))
    return fd


def who_else_writes(path: str) -> str:
    """Return why another user than root and the caller may write here.

    Empty if no other user may, or if it is missing. Only the file or directory itself is checked, for what is
    opened often; `ciuic.system.ownership` also checks the way to it.
    """
    try:
        st = os.stat(path)
    except OSError:
        # Missing or unreadable: the caller's open reports it.
        return ""
    if st.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to user {st.st_uid}"
    if st.st_mode & _OTHERS_WRITE:
        return f"others may write to {path} (mode {stat.S_IMODE(st.st_mode):04o})"
    return ""


def _irregular(path: str | bytes | os.PathLike[str]) -> OSError:
    return OSError(errno.EINVAL, "it must be a regular file, but is not", os.fspath(path))


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at an offset, in as many calls as that takes."""
    # pwrite(2) may write less than asked for, after a signal or on a disk that is nearly full.
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def clone_range(source: int, offset: int, length: int, target: int, target_offset: int) -> None:
    """Share the extents of the source's range with the target. OSError where that is not possible."""
    fcntl.ioctl(target, _FICLONERANGE, _RANGE.pack(source, offset, length, target_offset))


def temporary_name(path: str | os.PathLike[str]) -> str:
    """Return a name beside ``path`` that no other process uses."""
    return f"{_temporary_start(path)}{os.urandom(6).hex()}{_TEMPORARY}"


def remove_leftovers(path: str | os.PathLike[str]) -> None:
    """Remove the temporary files that killed processes have left beside this file.

    For a file that no other process writes now. Earlier versions called them ``.part``.
    """
    directory, start = os.path.split(_temporary_start(path))
    is_leftover = re.compile(re.escape(start) + r"[0-9a-f]{12}(\.tmp|\.part)").fullmatch
    for name in filter(is_leftover, os.listdir(directory or ".")):
        os.unlink(os.path.join(directory, name))


def _temporary_start(path: str | os.PathLike[str]) -> str:
    directory, name = os.path.split(os.fspath(path))
    return os.path.join(directory, f".{os.fsdecode(os.fsencode(name)[:_MAX_STEM_BYTES])}.")


# The kernel takes 1024 at most (UIO_MAXIOV).
_IOVECS = 512


class Disk:
    """The real disk. Descriptors are plain integers; errors are OSError."""

    def make_dir(self, path: str, mode: int = 0o700) -> None:
        """Make a directory."""
        os.mkdir(path, mode)

    def create(self, path: str, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
        """Create a file that must not exist; return a descriptor for reading and writing."""
        # O_EXCL follows no link, so a name that another user planted is refused, not written through
        # (open(2)).
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=dir_fd)

    def open_write(self, path: str) -> int:
        """Open an existing file; return a descriptor for reading and writing."""
        return open_to_write(path, os.O_RDWR)

    def write_at(self, fd: int, parts: Iterable[bytes | bytearray | memoryview], offset: int) -> int:
        """Write all parts one after the other from ``offset``; return the offset after the last."""
        # Reversed, so that finished parts are popped from the end: pop(0) would be quadratic.
        pending = [memoryview(part).cast("B") for part in parts if len(part)]
        pending.reverse()
        while pending:
            batch = pending[: -_IOVECS - 1 : -1]
            written = os.pwritev(fd, batch, offset)
            offset += written
            # pwritev(2) may stop anywhere, inside a part as well: what is left of it is written next.
            while written:
                head = pending.pop()
                if written < len(head):
                    pending.append(head[written:])
                    break
                written -= len(head)
        return offset

    def share(self, source: int, offset: int, length: int, fd: int, target_offset: int) -> bool:
        """Share a range of ``source`` with ``fd`` and return True; False where that is not possible."""
        try:
            clone_range(source, offset, length, fd, target_offset)
        except OSError:
            # The caller writes the bytes instead; a real disk error shows up there.
            return False
        return True

    def truncate(self, fd: int, size_bytes: int) -> None:
        """Truncate or extend the file."""
        os.ftruncate(fd, size_bytes)

    def sync(self, fd: int) -> None:
        """Make the file's content durable."""
        os.fsync(fd)

    def start_writing(self, fd: int, offset: int, length: int) -> None:
        """Start writeback of the range, so that `sync` does not send everything at once.

        This makes nothing durable.
        """
        # Imported here: readers import this module, and need no ctypes (5 ms).
        from ciuic.system import page_cache

        page_cache.start_writing(fd, offset, length)

    def uncache(self, fd: int, offset: int, length: int) -> None:
        """Drop synced pages from the page cache, which belongs to the job.

        Packs are rarely read again soon.
        """
        # Drops only clean pages (posix_fadvise(2)), so it has to follow a sync.
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)

    def close(self, fd: int) -> None:
        """Close the descriptor."""
        os.close(fd)

    def rename(self, source: str, target: str, *, dir_fd: int | None = None) -> None:
        """Rename; durable after `sync_dir`."""
        os.rename(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        """Remove a name; durable after `sync_dir`."""
        os.unlink(path, dir_fd=dir_fd)

    def sync_dir(self, path: str) -> None:
        """Make the names in a directory durable: fsync(2) of a file says nothing about its name."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    @contextmanager
    def replacing(
        self,
        path: str | bytes | os.PathLike[str],
        *,
        mode: int | None = 0o600,
        dir_fd: int | None = None,
        durable: bool = True,
        shared: bool = False,
    ) -> Iterator[int]:
        """Open a new file, which takes the place of ``path`` when the block ends without an error.

        Args:
            path: File to replace; with ``dir_fd`` a name in this directory.
            mode: Permissions whatever the umask is; None for those that the umask leaves of 0666.
            dir_fd: Descriptor of the directory; None for a path.
            durable: Whether content and name survive a power cut once the block has ended. Otherwise the file
                may be missing, old, or empty afterwards.
            shared: Whether other processes may replace the file at the same time; the last wins.

        Yields:
            A descriptor for reading and writing, which is closed at the end.
        """
        name = os.fsdecode(path)
        temporary = temporary_name(name) if shared else name + _TEMPORARY
        permissions = 0o666 if mode is None else mode
        try:
            fd = self.create(temporary, permissions, dir_fd=dir_fd)
        except FileExistsError:
            # Left by a process that was killed before its rename.
            self.unlink(temporary, dir_fd=dir_fd)
            fd = self.create(temporary, permissions, dir_fd=dir_fd)
        try:
            try:
                # The umask takes permissions of group and others away.
                if mode is not None and mode & 0o077:
                    os.fchmod(fd, mode)
                yield fd
                # Before the rename: a name must never lead to content that a power cut can take away.
                if durable:
                    self.sync(fd)
            finally:
                self.close(fd)
            self.rename(temporary, name, dir_fd=dir_fd)
        except BaseException:
            # On a full disk the incomplete copy takes space that the next deletion needs.
            with suppress(OSError):
                self.unlink(temporary, dir_fd=dir_fd)
            raise
        # The rename itself is durable only with the directory (fsync(2)).
        if durable and dir_fd is not None:
            self.sync(dir_fd)
        elif durable:
            self.sync_dir(os.path.dirname(name) or ".")

    def replace_file(
        self,
        path: str | bytes | os.PathLike[str],
        data: bytes,
        *,
        mode: int | None = 0o600,
        dir_fd: int | None = None,
        durable: bool = True,
        shared: bool = False,
    ) -> None:
        """Replace the content of a file; `replacing` has the arguments."""
        with self.replacing(path, mode=mode, dir_fd=dir_fd, durable=durable, shared=shared) as fd:
            self.write_at(fd, [data], 0)

    def remove_file(self, path: str) -> None:
        """Remove the name, durably."""
        self.unlink(path)
        self.sync_dir(os.path.dirname(path))

    def touch_dir(self, path: str) -> None:
        """Give the directory a new mtime, durably.

        Readers detect changes by it, and would miss one inside a file.
        """
        os.utime(path)
        self.sync_dir(path)
