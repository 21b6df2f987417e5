"""Opener of files that another program has written, and that somebody else may still change.

Guarantees: what is opened is a regular file of the directory itself. No link is followed, so that content from elsewhere (a file that
only root may read) does not get into a snapshot; a pipe is not waited for and a device not opened. Refusals name the file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

_LINK: Final = (
    "a symbolic link, which is not followed; copy the directory with `cp -rL` if you trust its links"
)
_KINDS: Final[tuple[tuple[Callable[[int], bool], str], ...]] = (
    (stat.S_ISLNK, _LINK),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


class ForeignDirectory:
    """An open directory; names are those of its own files.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> ForeignDirectory:
        """Return the directory."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        os.close(self._fd)

    def names(self) -> list[str]:
        """Return all names in the directory, sorted."""
        return sorted(os.listdir(self._fd))

    def has(self, name: str) -> bool:
        """Return whether there is anything of this name."""
        try:
            os.lstat(name, dir_fd=self._fd)
        except FileNotFoundError:
            return False
        return True

    def is_directory(self, name: str) -> bool:
        """Return whether this is a directory itself."""
        return stat.S_ISDIR(os.lstat(name, dir_fd=self._fd).st_mode)

    def size_bytes(self) -> int:
        """Return the size of all regular files in it, without those in its directories."""
        found = (os.lstat(name, dir_fd=self._fd) for name in self.names())
        return sum(status.st_size for status in found if stat.S_ISREG(status.st_mode))

    def open(self, name: str, max_bytes: int | None = None) -> IO[bytes]:
        """Open a file.

        Args:
            name: Its name, which a document of the directory may have given.
            max_bytes: Largest size that is accepted.

        Raises:
            ValueError: It lies elsewhere, is no regular file, or is larger.
            OSError: It cannot be opened.
        """
        # A path could lead to any file.
        if not name or "/" in name or "\0" in name or name in (".", ".."):
            raise ValueError(f"{self.path} names a file outside of its directory: {name!r}")
        try:
            os.fsencode(name)
        except UnicodeEncodeError:
            raise ValueError(f"{self.path} names a file by what is no text: {name!r}") from None
        return _open(self.path / name, name, self._fd, max_bytes)


def open_foreign(path: Path) -> IO[bytes]:
    """Open a file that the user named; links that lead to it were the user's choice.

    Raises:
        ValueError: It is no regular file.
        OSError: It cannot be opened.
    """
    return _open(path, os.path.realpath(path), None, None)


def _open(path: Path, name: str, dir_fd: int | None, max_bytes: int | None) -> IO[bytes]:
    # Before it is opened, because that alone may have effects on a device.
    _check(path, os.lstat(name, dir_fd=dir_fd), max_bytes)
    # And after, because another may have taken its place: O_NONBLOCK, so that a pipe is not waited for.
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        _check(path, os.fstat(fd), max_bytes)
    except ValueError:
        os.close(fd)
        raise
    return os.fdopen(fd, "rb")


def _check(path: Path, status: os.stat_result, max_bytes: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = next((text for is_kind, text in _KINDS if is_kind(status.st_mode)), "a device")
        raise ValueError(f"{path} must be a regular file, and is {kind}")
    if max_bytes is not None and status.st_size > max_bytes:
        raise ValueError(f"{path} must have at most {max_bytes} bytes, and has {status.st_size}")
