"""Files and folders that appear at their path whole and durable, or not at all.

Guarantees: until the end everything is under a hidden name beside the destination; an error removes it. A
process that is killed leaves the destination as it was, and perhaps that hidden name.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Final

from ciuic.errors import DestinationExists, UsageError

# Of a long name, so that the temporary name fits into NAME_MAX (255 bytes).
_MAX_STEM_BYTES: Final = 200
_PART: Final = ".part"
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
    temporary = _temporary(path)
    # O_EXCL follows no link, so that a name which another user planted is refused, not written through.
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(fd, "w+b") as file:
            yield file
            file.flush()
            # Before the rename: a name must never lead to content that a power cut can take away.
            os.fsync(file.fileno())
        if overwrite:
            os.replace(temporary, path)
        else:
            _link(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    _sync(path.parent)


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
    temporary = _temporary(path)
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


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files that killed processes have left beside this destination.

    For a destination that one process alone writes.
    """
    start = _temporary_start(path)
    for name in os.listdir(path.parent):
        if name.startswith(start) and name.endswith(_PART) and len(name) == len(start) + 12 + len(_PART):
            os.unlink(path.parent / name)


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


def _temporary(path: Path) -> Path:
    return path.parent / f"{_temporary_start(path)}{os.urandom(6).hex()}{_PART}"


def _temporary_start(path: Path) -> str:
    return f".{os.fsdecode(os.fsencode(path.name)[:_MAX_STEM_BYTES])}."


def _link(temporary: Path, path: Path) -> None:
    """Give the file its name, unless the name was taken meanwhile."""
    try:
        # Unlike rename(2) it replaces nothing.
        os.link(temporary, path, follow_symlinks=False)
    except FileExistsError:
        raise _exists(path) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _refuse(path, overwrite=False)
        os.replace(temporary, path)
        return
    os.unlink(temporary)


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
