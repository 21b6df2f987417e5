"""The files of a directory as they are now, in the form in which snapshots hold them; for comparison.

Guarantees: no symbolic link is followed, and the reserved state directory is not shown. What cannot be read is
`Unreadable`, with the reason. Nothing is changed, access times where the kernel lets us.
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
from ciuic.types import Entry
from ciuic.xattrs import read_xattrs

_INODE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NOTHING = -1


class Unreadable(Exception):
    """Something that is there cannot be looked at."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@contextmanager
def _reading() -> Iterator[None]:
    """Turns what the kernel refuses into `Unreadable`."""
    try:
        yield
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from error


class LiveNode:
    """An open directory of the live files."""

    def __init__(self, fd: int, name: bytes = b"") -> None:
        self._fd = fd
        self.name = name
        """For the one that `at` makes: the name in it that was asked for."""

    @classmethod
    def at(cls, path: bytes) -> LiveNode:
        """The directory that a path is in, links on the way followed: a root is where its path leads."""
        parent, name = posixpath.split(path)
        try:
            return cls(os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), name)
        except OSError:  # no such directory, or not ours to read: then nothing is there to be seen
            return cls(_NOTHING, name)

    @classmethod
    def nothing(cls) -> LiveNode:
        """The live side of a directory that is not there."""
        return cls(_NOTHING)

    def __enter__(self) -> LiveNode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._fd != _NOTHING:
            os.close(self._fd)
            self._fd = _NOTHING

    @property
    def entry(self) -> Entry | None:
        return self.child_entry(self.name)

    @property
    def device(self) -> int:
        return self.child_device(self.name)

    def child_entry(self, name: bytes) -> Entry | None:
        """Attributes without xattrs and content; None if there is no such name."""
        if self._fd == _NOTHING:
            return None
        with _reading():
            st = stat_at(self._fd, name)
            if st is None:
                return None
            target = os.readlink(name, dir_fd=self._fd) if stat.S_ISLNK(st.st_mode) else b""
        return live_entry(name, st, target)

    def child_device(self, name: bytes) -> int:
        """Number of the file system that the name is on; -1 if there is no such name."""
        if self._fd == _NOTHING:
            return -1
        with _reading():
            st = stat_at(self._fd, name)
        return -1 if st is None else st.st_dev

    def child_xattrs(self, name: bytes) -> tuple[tuple[bytes, bytes], ...]:
        with _reading():
            fd = os.open(name, _INODE, dir_fd=self._fd)
            try:
                return tuple(sorted(read_xattrs(proc_path(fd)).items()))
            finally:
                os.close(fd)

    def descend(self, name: bytes) -> LiveNode:
        with _reading():
            return LiveNode(os.open(name, OPEN_DIRECTORY, dir_fd=self._fd))

    def names(self) -> list[bytes]:
        """In byte order."""
        with _reading():
            found = map(os.fsencode, os.listdir(self._fd))
            return sorted(name for name in found if name != STATE_DIR_NAME)

    @contextmanager
    def open_file(self, name: bytes) -> Iterator[int]:
        with _reading():
            try:
                fd = os.open(name, _READ | os.O_NOATIME, dir_fd=self._fd)
            except PermissionError:  # O_NOATIME is for owners
                fd = os.open(name, _READ, dir_fd=self._fd)
        try:
            with _reading():
                yield fd
        finally:
            os.close(fd)


def live_entry(name: bytes, st: os.stat_result, target: bytes = b"") -> Entry:
    """A live file's attributes as an entry."""
    is_device = stat.S_ISCHR(st.st_mode) or stat.S_ISBLK(st.st_mode)
    return Entry(
        name=name,
        mode=st.st_mode,
        uid=st.st_uid,
        gid=st.st_gid,
        rdev=st.st_rdev if is_device else 0,
        ino=st.st_ino,
        size_bytes=st.st_size if stat.S_ISREG(st.st_mode) else len(target),
        mtime_ns=st.st_mtime_ns,
        ctime_ns=st.st_ctime_ns,
        atime_ns=st.st_atime_ns,
        target=target,
    )
