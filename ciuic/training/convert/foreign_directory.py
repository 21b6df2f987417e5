"""Opener of files that another program has written, and that somebody else may still change.

Guarantees: what is opened is a regular file of the directory itself. No link in it is followed, so that content from elsewhere (a file that
only root may read) does not get into a snapshot; those that lead to it are followed by the rule of a restore's destination
(`ciuic.restore.destination`), also while they are exchanged. A pipe is not waited for and a device not opened. What was changed or
exchanged while it was read is refused. Refusals name the file.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, NamedTuple

from ciuic.errors import CiuicError
from ciuic.restore.destination import open_way
from ciuic.system.disk import PIN, READ_FILE

_LINK: Final = (
    "a symbolic link, which is not followed; copy the directory with `cp -rL` if you trust its links"
)
_CHANGED: Final = "{} was changed while it was read: import it when its writer is done, or a copy of it"
_MAX_LINKS: Final = 40
_KINDS: Final[tuple[tuple[Callable[[int], bool], str], ...]] = (
    (stat.S_ISLNK, _LINK),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


class ForeignDirectory:
    """An open directory; names are those of its own files.

    Raises:
        CiuicError: Another user's link leads to a directory of somebody else.
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = open_way(os.fsencode(path.absolute()))
        self._opened: dict[str, _Version] = {}

    def __enter__(self) -> ForeignDirectory:
        return self

    def __exit__(self, *_: object) -> None:
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
        file = _open(self.path / name, name, self._fd, max_bytes)
        found = _version(os.fstat(file.fileno()))
        if self._opened.setdefault(name, found) != found:
            file.close()
            raise ValueError(_CHANGED.format(self.path / name))
        return file

    def require_unchanged(self) -> None:
        """Check that the files that were opened are there as they were; files of two checkpoints are none.

        Raises:
            ValueError: One was changed or exchanged meanwhile.
        """
        for name, before in self._opened.items():
            try:
                found = _version(os.lstat(name, dir_fd=self._fd))
            except FileNotFoundError:
                found = None
            if found != before:
                raise ValueError(_CHANGED.format(self.path / name))


@contextmanager
def open_foreign(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that the user named, to be read as a whole; links that lead to it are followed as those to a directory are.

    Raises:
        ValueError: It is no regular file, or was changed while it was read.
        CiuicError: Another user's link leads to a file of somebody else.
        OSError: It cannot be opened.
    """
    with _named(path) as file:
        before = _version(os.fstat(file.fileno()))
        yield file
        if _version(os.fstat(file.fileno())) != before:
            raise ValueError(_CHANGED.format(path))


def _named(path: Path) -> IO[bytes]:
    """Open the file at a path, following links at its end."""
    at = str(path.absolute())
    owners: set[int] = set()
    for _ in range(_MAX_LINKS):
        above, name = os.path.split(at)
        folder = open_way(os.fsencode(above))
        try:
            # Owner and target are read from one descriptor: the name may be exchanged.
            link = os.open(name or ".", PIN, dir_fd=folder)
            try:
                status = os.fstat(link)
                if not stat.S_ISLNK(status.st_mode):
                    file = _open(path, name or ".", folder, None)
                    break
                owners.add(status.st_uid)
                at = os.path.join(above, os.fsdecode(os.readlink(b"", dir_fd=link)))
            finally:
                os.close(link)
        finally:
            os.close(folder)
    else:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    owner = os.fstat(file.fileno()).st_uid
    foreign = owners - {0, os.geteuid(), owner}
    if foreign:
        file.close()
        raise CiuicError(
            f"{path} leads through a symbolic link of user {min(foreign)} to a file of user {owner}",
            hint="name the file itself, not a link to it",
        )
    return file


class _Version(NamedTuple):
    """Identity of a file's content at one moment, as far as its writers set the time as the kernel does."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int


def _version(status: os.stat_result) -> _Version:
    return _Version(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _open(path: Path, name: str, dir_fd: int | None, max_bytes: int | None) -> IO[bytes]:
    # Before it is opened, because that alone may have effects on a device.
    _check(path, os.lstat(name, dir_fd=dir_fd), max_bytes)
    # And after, because another may have taken its place: O_NONBLOCK, so that a pipe is not waited for.
    fd = os.open(name, READ_FILE, dir_fd=dir_fd)
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
