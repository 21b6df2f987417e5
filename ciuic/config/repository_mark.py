"""Repository mark in a root's state directory: an absent disk is not taken for a new beginning.

The mark lies in the root's state directory (state_directory.py): it is on the disk that matters, moves with
it, and is deleted when the root is unprotected. It says where the repository was and where that file system
was mounted. If the path now leads to another file system, it most likely leads to the empty directory below a
mount point; a repository made there would fill the system's disk while the real one waits to be mounted.

Guarantees: a mark is replaced atomically and durably. An unreadable one counts as none: it is a safety catch,
and nothing else depends on it. When to write it and what to do about an absent disk is left to the daemon.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from ciuic.config.places import mount_holding
from ciuic.errors import CiuicError
from ciuic.protocol.state_directory import find_state
from ciuic.structs import decode_msgpack
from ciuic.system.disk import Disk, read_regular
from ciuic.system.mountinfo import Mount

_NAME = "repository"
# A mark has a few hundred bytes: a larger file is none.
_MAX_MARK_BYTES = 64 << 10


class RepositoryMark(msgspec.Struct, frozen=True):
    """Repository that the snapshots of one root are in."""

    path: bytes
    mount_point: bytes
    """Mount point of the file system with the repository."""
    id: str


def mark_of(path: Path, repository_id: str, mounts: Sequence[Mount]) -> RepositoryMark:
    """Return the mark for the repository that is at ``path`` now."""
    return RepositoryMark(os.fsencode(path), _mount_point(path, mounts), repository_id)


def absent_mount_point(path: Path, marks: Iterable[RepositoryMark], mounts: Sequence[Mount]) -> bytes | None:
    """Return the mount point that a mark names for ``path`` and that is not mounted; None if unknown.

    A repository that vanished from the file system it was on is not absent but gone.
    """
    here = _mount_point(path, mounts)
    wanted = (mark.mount_point for mark in marks if mark.path == os.fsencode(path))
    return next((mount_point for mount_point in wanted if mount_point != here), None)


def read_mark(root_fd: int) -> RepositoryMark | None:
    """Return the mark of the root with this backing directory (O_PATH suffices); None if unreadable."""
    try:
        with _state_directory(root_fd) as directory:
            return decode_msgpack(read_regular(_NAME, _MAX_MARK_BYTES, dir_fd=directory), RepositoryMark)
    except (OSError, CiuicError, msgspec.DecodeError):
        return None


def read_mark_at(root: Path) -> RepositoryMark | None:
    """Return the mark of a root that is not mounted; None if it is mounted."""
    try:
        fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        return read_mark(fd)
    finally:
        os.close(fd)


def write_mark(root_fd: int, mark: RepositoryMark) -> None:
    """Replace the mark unless it is equal already. OSError: a full or read-only disk."""
    # An equal mark, as nearly always, costs no write and no sync.
    if read_mark(root_fd) == mark:
        return
    with _state_directory(root_fd) as directory:
        Disk().replace_file(_NAME, msgspec.msgpack.encode(mark), dir_fd=directory)


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
