"""What a root remembers of the repository that its snapshots are in, so that an absent disk is no new beginning.

The mark lies in the root's state directory (state_directory.py): it is on the disk that matters, goes with it, and goes when the
root is unprotected. It says where the repository was and where that file system was mounted. A path that leads to another
file system now leads to the empty directory below a mount point, most likely, and a repository made there would fill
the system's disk while the real one waits to be mounted.

Guarantees: a mark is replaced durably and at once. One that cannot be read counts as none: it is a safety catch, and
nothing that is needed depends on it. Leaves to others when to write it and what to do about an absent disk.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from ciuic.config.places import mount_holding
from ciuic.errors import CiuicError
from ciuic.mountinfo import Mount
from ciuic.state_directory import find_state

_NAME = "repository"
_TEMPORARY = "repository.tmp"
_LONGEST_BYTES = 64 << 10


class RepositoryMark(msgspec.Struct, frozen=True):
    """One root's memory of one repository."""

    path: bytes
    mount_point: bytes
    """Of the file system that the repository was on."""
    id: str


def mark_of(path: Path, repository_id: str, mounts: Sequence[Mount]) -> RepositoryMark:
    """The mark for the repository that is at ``path`` now."""
    return RepositoryMark(os.fsencode(path), _mount_point(path, mounts), repository_id)


def absent_mount_point(path: Path, marks: Iterable[RepositoryMark], mounts: Sequence[Mount]) -> bytes | None:
    """Where the file system that a mark remembers for ``path`` should be mounted and is not; None: nothing is known.

    A repository that vanished from the file system it was on is not absent but gone.
    """
    here = _mount_point(path, mounts)
    wanted = (mark.mount_point for mark in marks if mark.path == os.fsencode(path))
    return next((mount_point for mount_point in wanted if mount_point != here), None)


def read_mark(root_fd: int) -> RepositoryMark | None:
    """The mark of the root whose backing directory ``root_fd`` (O_PATH suffices) is; None when there is none to be read."""
    try:
        with _state_directory(root_fd) as directory:
            fd = os.open(_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
            with open(fd, "rb") as file:
                return msgspec.msgpack.decode(file.read(_LONGEST_BYTES), type=RepositoryMark)
    except (OSError, CiuicError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def read_mark_at(root: Path) -> RepositoryMark | None:
    """The same of a root that is not mounted; None of one that is."""
    try:
        fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return read_mark(fd)
    finally:
        os.close(fd)


def write_mark(root_fd: int, mark: RepositoryMark) -> None:
    """Replaces it unless it says so already. OSError: a full or read-only disk."""
    if read_mark(root_fd) == mark:
        return
    with _state_directory(root_fd) as directory:
        with suppress(FileNotFoundError):
            os.unlink(_TEMPORARY, dir_fd=directory)  # of a process that was killed here
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(_TEMPORARY, flags, 0o600, dir_fd=directory), "wb") as file:
            file.write(msgspec.msgpack.encode(mark))
            file.flush()
            os.fsync(file.fileno())
        os.rename(_TEMPORARY, _NAME, src_dir_fd=directory, dst_dir_fd=directory)
        os.fsync(directory)


@contextmanager
def _state_directory(root_fd: int) -> Iterator[int]:
    fd = find_state(root_fd)
    if fd is None:
        raise FileNotFoundError(errno.ENOENT, "the root has no state directory")
    try:
        yield fd
    finally:
        os.close(fd)


def _mount_point(path: Path, mounts: Sequence[Mount]) -> bytes:
    mount = mount_holding(os.path.realpath(path), mounts)
    return mount.mount_point if mount is not None else b"/"
