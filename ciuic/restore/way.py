"""Opening a directory by its path, with symbolic links followed only where they cannot mislead.

Guarantees: a link on the way is followed if it belongs to root, to the caller, or to the owner of the directory that it leads
to (the rule of Apache's SymLinksIfOwnerMatch). So the owner of a destination cannot send a restore by root to a directory that
is not their own, also not while it runs: every step starts from the descriptor of the one before. Directories that are missing
are made, but none behind a link.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from ciuic.errors import CiuicError
from ciuic.lookup import readable

_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_LINKS = 40
"""As many as the kernel follows in one path (path_resolution(7))."""


def open_way(path: bytes, *, make: bool = False) -> int:
    """Descriptor for reading of the directory at an absolute path. FileNotFoundError, unless ``make``; OSError; CiuicError
    for a link that is not to be followed.
    """
    at = _Walk(path).walk(os.open("/", _STEP | os.O_DIRECTORY), path, make)
    try:
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=at)
    finally:
        os.close(at)


class _Walk:
    """One walk from the top of the file system."""

    def __init__(self, path: bytes) -> None:
        self._path = path
        self._links = 0

    def walk(self, at: int, path: bytes, make: bool) -> int:
        """The directory at ``path`` from ``at``, whose descriptor is closed."""
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
            fd = os.open(name, _STEP, dir_fd=at)
        except FileNotFoundError:
            if not make:
                raise
            with suppress(FileExistsError):  # another process made it meanwhile
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
        there = self.walk(start, target, make=False)
        owner = os.fstat(there).st_uid
        if st.st_uid in (0, os.geteuid(), owner):
            return there
        os.close(there)
        raise CiuicError(
            f"{readable(self._path)} leads through a symbolic link of user {st.st_uid} to {readable(target)},"
            f" which belongs to user {owner}",
            hint="name the directory itself, not a link to it",
        )
