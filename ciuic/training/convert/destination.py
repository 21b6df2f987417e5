"""Files and folders that appear at their path whole and durable, or not at all.

Guarantees: until the end everything is under a hidden name beside the destination; an error removes it. A
process that is killed leaves the destination as it was, and perhaps that hidden name.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Final

from ciuic.errors import CiuicError, DestinationExists, UsageError
from ciuic.system.disk import NEW_FILE, Disk, temporary_name

_PROBE: Final = ".ciuic-probe"
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
    # Of one directory from here on: its owner may exchange whatever has a name in it, and a link there would lead the writer anywhere.
    with _opened(path.parent) as parent:
        temporary = os.path.basename(temporary_name(path))
        os.mkdir(temporary, 0o777, dir_fd=parent)
        try:
            with _opened(temporary, parent) as made:
                mode = _close_to_others(made, path)
                try:
                    yield Path(f"/proc/self/fd/{made}")
                    for name in os.listdir(made):
                        _sync(name, made)
                    with suppress(OSError):
                        os.fchmod(made, mode)
                    os.fsync(made)
                    _move_directory(parent, temporary, path, names if overwrite else None)
                except BaseException:
                    # Not what has its name already, and may only not be durable.
                    with suppress(OSError):
                        st = os.stat(temporary, dir_fd=parent, follow_symlinks=False)
                        if os.path.samestat(st, os.fstat(made)):
                            _empty(made, ("*",))
                    raise
        except BaseException:
            with suppress(OSError):
                os.rmdir(temporary, dir_fd=parent)
            raise


@contextmanager
def _opened(path: str | Path, dir_fd: int | None = None) -> Iterator[int]:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    fd = os.open(path, flags if dir_fd is None else flags | os.O_NOFOLLOW, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def _close_to_others(made: int, path: Path) -> int:
    """Let only this process's user change a directory that was just made; return the mode that it had.

    Raises:
        CiuicError: another one has its name by now.
    """
    st = os.fstat(made)
    own_uid = os.geteuid()
    if st.st_uid != own_uid:
        # An NFS server may give root's files to nobody.
        with os.fdopen(os.open(_PROBE, NEW_FILE, 0o600, dir_fd=made)) as probe:
            own_uid = os.fstat(probe.fileno()).st_uid
        os.unlink(_PROBE, dir_fd=made)
    # Suppressed: a file system without modes.
    with suppress(OSError):
        os.fchmod(made, 0o700)
    if st.st_uid != own_uid or os.listdir(made):
        raise CiuicError(f"another user exchanges what is beside {path}", hint="export to another directory")
    return stat.S_IMODE(st.st_mode)


def _empty(directory: int, names: Sequence[str]) -> None:
    """Remove the files whose names match these patterns from a directory of an export, which has no directories."""
    for name in os.listdir(directory):
        if any(fnmatch(name, pattern) for pattern in names):
            with suppress(OSError):
                os.unlink(name, dir_fd=directory)


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


def _move_directory(parent: int, temporary: str, path: Path, names: Sequence[str] | None) -> None:
    """Rename to the name of ``path``; with names, in place of a directory of them."""
    old = None
    if names is not None and os.path.lexists(path):
        # rename(2) replaces only an empty directory.
        old = f"{temporary}.old"
        os.rename(path.name, old, src_dir_fd=parent, dst_dir_fd=parent)
    try:
        os.rename(temporary, path.name, src_dir_fd=parent, dst_dir_fd=parent)
    except OSError as error:
        if old is not None:
            os.rename(old, path.name, src_dir_fd=parent, dst_dir_fd=parent)
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise _exists(path) from None
        raise
    os.fsync(parent)
    if names is not None and old is not None:
        # Otherwise a power cut could bring the hidden old directory back.
        with suppress(OSError), _opened(old, parent) as replaced:
            _empty(replaced, names)
            os.rmdir(old, dir_fd=parent)
        os.fsync(parent)


def _exists(path: Path) -> DestinationExists:
    return DestinationExists(
        f"{path} exists already", hint="choose another path, or replace it with --overwrite"
    )


def _sync(name: str, directory: int) -> None:
    """Make the content of a file durable."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
