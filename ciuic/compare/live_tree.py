"""Live files of a directory, in the form in which snapshots hold them, for comparison.

Guarantees: no symbolic link is followed, and the reserved state directory is not shown. A file that cannot be read raises
`UnreadableFile` with the reason. Nothing is changed, not even access times where the caller may use O_NOATIME (open(2)).
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from ciuic import STATE_DIR_NAME
from ciuic.restore.destination import OPEN_DIRECTORY, proc_path, stat_at
from ciuic.system.mountinfo import MountBorders
from ciuic.system.xattrs import read_xattrs
from ciuic.types import Entry, recorded_time

# O_PATH opens an inode without a read permission and without waking a device or a pipe.
_INODE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a pipe that has taken the place of a file must not block the open.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NOTHING = -1


class UnreadableFile(Exception):
    """A live file or directory exists and cannot be read."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@contextmanager
def _reading() -> Iterator[None]:
    """Turn OSError into `UnreadableFile`."""
    try:
        yield
    except OSError as error:
        raise UnreadableFile(error.strerror or str(error)) from error


class LiveNode:
    """An open directory of the live files."""

    def __init__(self, fd: int, name: bytes = b"") -> None:
        self._fd = fd
        self._borders = None if fd == _NOTHING else MountBorders(fd)
        self.name = name
        """Last component of the path given to `at`; empty otherwise."""

    @classmethod
    def at(cls, path: bytes) -> LiveNode:
        """Open the directory that a path is in. Symbolic links above it are followed: a root is where its path leads."""
        parent, name = posixpath.split(path)
        try:
            return cls(os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), name)
        except OSError:
            # A directory that does not exist or that the caller may not read shows nothing.
            return cls(_NOTHING, name)

    @classmethod
    def nothing(cls) -> LiveNode:
        """Return the live side of a directory that does not exist."""
        return cls(_NOTHING)

    def __enter__(self) -> LiveNode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the directory."""
        if self._fd != _NOTHING:
            os.close(self._fd)
            self._fd = _NOTHING

    @property
    def entry(self) -> Entry | None:
        """Attributes of the path given to `at`; None if it does not exist."""
        return self.child_entry(self.name)

    def child_entry(self, name: bytes) -> Entry | None:
        """Return the attributes of a name, without xattrs and content; None if it does not exist."""
        if self._fd == _NOTHING:
            return None
        with _reading():
            st = stat_at(self._fd, name)
            if st is None:
                return None
            target = os.readlink(name, dir_fd=self._fd) if stat.S_ISLNK(st.st_mode) else b""
        return live_entry(name, st, target)

    def leads_away(self, name: bytes) -> bool:
        """Return whether another file system is mounted at a name."""
        return self._borders is not None and self._borders.at(name)

    def child_xattrs(self, name: bytes) -> tuple[tuple[bytes, bytes], ...]:
        """Return the extended attributes of a name, sorted."""
        with _reading():
            fd = os.open(name, _INODE, dir_fd=self._fd)
            try:
                # Through /proc, because fgetxattr(2) takes no O_PATH descriptor. Sorted, as snapshots have
                # them.
                return tuple(sorted(read_xattrs(proc_path(fd)).items()))
            finally:
                os.close(fd)

    def descend(self, name: bytes) -> LiveNode:
        """Open a subdirectory."""
        with _reading():
            return LiveNode(os.open(name, OPEN_DIRECTORY, dir_fd=self._fd))

    def names(self) -> list[bytes]:
        """Return the names in the directory, in byte order."""
        with _reading():
            found = map(os.fsencode, os.listdir(self._fd))
            # In byte order, because they are merged with the entries of a tree.
            return sorted(name for name in found if name != STATE_DIR_NAME)

    @contextmanager
    def open_file(self, name: bytes) -> Iterator[int]:
        """Open a file for reading; the context is its descriptor."""
        with _reading():
            try:
                fd = os.open(name, _READ | os.O_NOATIME, dir_fd=self._fd)
            except PermissionError:
                # open(2): only the owner and root may use O_NOATIME.
                fd = os.open(name, _READ, dir_fd=self._fd)
        try:
            with _reading():
                yield fd
        finally:
            os.close(fd)


def live_entry(name: bytes, st: os.stat_result, target: bytes = b"") -> Entry:
    """Return a live file's attributes as an entry."""
    is_device = stat.S_ISCHR(st.st_mode) or stat.S_ISBLK(st.st_mode)
    return Entry(
        name=name,
        mode=st.st_mode,
        uid=st.st_uid,
        gid=st.st_gid,
        rdev=st.st_rdev if is_device else 0,
        ino=st.st_ino,
        size_bytes=st.st_size if stat.S_ISREG(st.st_mode) else len(target),
        mtime_ns=recorded_time(st.st_mtime_ns),
        ctime_ns=recorded_time(st.st_ctime_ns),
        atime_ns=recorded_time(st.st_atime_ns),
        target=target,
    )
