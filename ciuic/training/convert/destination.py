"""Files and folders that appear at their path whole and durable, or not at all.

Guarantees: until the end everything is under a hidden name beside the destination; an error removes it. A
process that is killed leaves the destination as it was, and perhaps that hidden name.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Final

from ciuic.errors import DestinationExists, UsageError
from ciuic.system.disk import Disk, temporary_name

# File systems without hard links answer link(2) so.
_NO_LINKS: Final = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@contextmanager
def new_file(path: Path, *, overwrite: bool) -> Iterator[IO[bytes]]:
    """Open a file to write; it is at ``path``, durably, when the block has ended without an error.

    Args:
        path: Destination, in a directory that exists.
        overwrite: Whether to replace a file that is there.

    Raises:
        DestinationExists: There is something at ``path`` that may not be replaced.
    """
    _refuse(path, overwrite)
    disk = Disk() if overwrite else _LinkingDisk()
    with (
        disk.replacing(path, mode=None, shared=True) as fd,
        os.fdopen(fd, "w+b", closefd=False) as file,
    ):
        yield file


@contextmanager
def new_directory(path: Path, *, overwrite: bool, names: Sequence[str]) -> Iterator[Path]:
    """Make a directory to write files into; it is at ``path``, durably, when the block has ended without an error.

    Args:
        path: Destination, in a directory that exists.
        overwrite: Whether to replace a directory that is there.
        names: Patterns of the names that an export of this kind writes. A directory with any other entry is
            not replaced, because it may be anything of the user's.

    Raises:
        DestinationExists: There is something at ``path`` that may not be replaced.
    """
    _refuse(path, overwrite)
    _check_replaceable(path, names)
    temporary = Path(temporary_name(path))
    os.mkdir(temporary, 0o777)
    try:
        yield temporary
        for name in os.listdir(temporary):
            _sync(temporary / name)
        _sync(temporary)
        _move_directory(temporary, path, overwrite)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _refuse(path: Path, overwrite: bool) -> None:
    if not path.name:
        raise UsageError(f"the destination must have a name, got {path}")
    if not overwrite and os.path.lexists(path):
        raise _exists(path)


def _check_replaceable(path: Path, names: Sequence[str]) -> None:
    if not os.path.lexists(path):
        return
    if not path.is_dir() or path.is_symlink():
        raise DestinationExists(
            f"{path} must be a directory to be replaced by one", hint="remove it yourself"
        )
    for name in sorted(os.listdir(path)):
        if not any(fnmatch(name, pattern) for pattern in names) or (path / name).is_dir():
            raise DestinationExists(
                f"{path} has {name}, which no export writes, so it is not replaced",
                hint="choose another path, or remove it yourself",
            )


class _LinkingDisk(Disk):
    """Disk whose files get no name that was taken meanwhile."""

    def rename(self, source: str, target: str, *, dir_fd: int | None = None) -> None:
        """Rename unless there is something at ``target``."""
        try:
            # Unlike rename(2) it replaces nothing.
            os.link(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)
        except FileExistsError:
            raise _exists(Path(target)) from None
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            _refuse(Path(target), overwrite=False)
            super().rename(source, target, dir_fd=dir_fd)
        else:
            self.unlink(source, dir_fd=dir_fd)


def _move_directory(temporary: Path, path: Path, overwrite: bool) -> None:
    old = None
    if overwrite and os.path.lexists(path):
        # rename(2) replaces only an empty directory.
        old = temporary.with_suffix(".old")
        os.rename(path, old)
    try:
        os.rename(temporary, path)
    except OSError as error:
        if old is not None:
            os.rename(old, path)
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise _exists(path) from None
        raise
    _sync(path.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)
        # Otherwise a power cut could bring the hidden old directory back.
        _sync(path.parent)


def _exists(path: Path) -> DestinationExists:
    return DestinationExists(
        f"{path} exists already", hint="choose another path, or replace it with --overwrite"
    )


def _sync(path: Path) -> None:
    """Make a file's content, or the names in a directory, durable."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
