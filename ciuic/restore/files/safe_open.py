"""Open a directory by its path, following only symbolic links that cannot redirect the restore.

Guarantees: a link on the path is followed if it belongs to root, to the caller, or to the owner of the directory that it leads
to (the rule of Apache's SymLinksIfOwnerMatch). The owner of a destination therefore cannot send a restore by root to a directory
of another user, not even while it runs: every step starts from the descriptor of the step before. Missing directories are
created, but none behind a link.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from ciuic.errors import CiuicError
from ciuic.printable import one_line

_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
# The kernel follows as many in one path (path_resolution(7)).
_MAX_LINKS = 40


def open_way(path: bytes, *, make: bool = False) -> int:
    """Open the directory at an absolute path for reading; ``make`` creates missing directories.

    Raises:
        FileNotFoundError: the directory does not exist, without ``make``.
        CiuicError: a symbolic link on the path must not be followed.
        OSError: a step of the path cannot be opened.
    """
    at = _PathWalk(path).walk(os.open("/", _STEP | os.O_DIRECTORY), path, make)
    # O_PATH descriptors cannot be listed or synced, so the directory is opened again, by ".".
    try:
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=at)
    finally:
        os.close(at)


class _PathWalk:
    """A walk from the top of the file system along a path."""

    def __init__(self, path: bytes) -> None:
        self._path = path
        self._links = 0

    def walk(self, at: int, path: bytes, make: bool) -> int:
        """Return a descriptor of the directory at ``path``, relative to ``at``, which is closed."""
        try:
            for name in path.split(b"/"):
                if name in (b"", b"."):
                    continue
                below = self._step(at, name, make)
                os.close(at)
                at = below
        except BaseException:
            os.close(at)
            raise
        return at

    def _step(self, at: int, name: bytes, make: bool) -> int:
        try:
            # O_PATH with O_NOFOLLOW opens a symbolic link itself, whose owner and target are then read from the descriptor.
            fd = os.open(name, _STEP, dir_fd=at)
        except FileNotFoundError:
            if not make:
                raise
            # Another process may create it meanwhile.
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=at)
            fd = os.open(name, _STEP, dir_fd=at)
        try:
            st = os.fstat(fd)
            if not stat.S_ISLNK(st.st_mode):
                if not stat.S_ISDIR(st.st_mode):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name)
                return os.dup(fd)
            return self._follow(at, fd, st)
        finally:
            os.close(fd)

    def _follow(self, at: int, link: int, st: os.stat_result) -> int:
        self._links += 1
        if self._links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        target = os.readlink(b"", dir_fd=link)
        start = os.open("/", _STEP | os.O_DIRECTORY) if target.startswith(b"/") else os.dup(at)
        # make=False, because a directory behind a link would be made where the link's owner wants it.
        there = self.walk(start, target, make=False)
        owner = os.fstat(there).st_uid
        # Checked on the descriptor that is used from here on, so the directory cannot be exchanged after the check.
        if st.st_uid in (0, os.geteuid(), owner):
            return there
        os.close(there)
        raise CiuicError(
            f"{one_line(self._path)} leads through a symbolic link of user {st.st_uid} to {one_line(target)},"
            f" which belongs to user {owner}",
            hint="name the directory itself, not a link to it",
        )
