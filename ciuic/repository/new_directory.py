"""Directories of a new repository: made, checked, and never taken from another user.

A crash leaves directories that the next attempt takes up again; without its configuration none of them is a
repository.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress

from ciuic.errors import NotFound, NotPermitted
from ciuic.repository.config import CONFIG_NAMES
from ciuic.repository.disk import Disk
from ciuic.repository.errors import RepositoryExists
from ciuic.repository.index_database import INDEX_NAME
from ciuic.repository.locks import CLAIM_NAME, LOCK_NAME, Lock
from ciuic.repository.snapshots import MARKS_DIR, SNAPSHOTS_DIR

PACKS_DIR = "packs"
# All that a crashed `create` may have left, which is taken up again.
_OWN = {
    PACKS_DIR,
    SNAPSHOTS_DIR,
    MARKS_DIR,
    LOCK_NAME,
    CLAIM_NAME,
    "config.tmp",
    "config.copy.tmp",
    "config.copy",
}
# The index of packs that are not there; SQLite's own files beside it.
_REBUILT = {INDEX_NAME, *(f"{INDEX_NAME}{suffix}" for suffix in ("-journal", "-wal", "-shm"))}


def exists(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a repository at this path, healthy or not."""
    return any(os.path.lexists(os.path.join(path, name)) for name in CONFIG_NAMES)


def unmake_empty(where: str, disk: Disk | None = None) -> bool:
    """Take the configuration away from a repository that holds nothing, so that `create` can make another one there.

    A crash leaves the repository as it was, or a directory that `create` takes up.

    Args:
        where: Absolute path of the repository.
        disk: Durable operations; None for the real disk.

    Returns:
        False if it holds, or may hold, snapshots, promises or chunks; then nothing was changed.

    Raises:
        Busy: a writer is at work.
        NotPermitted: the directory cannot be written.
    """
    disk = disk or Disk()
    try:
        # Against a writer that stores the first chunks just now.
        lock = Lock.acquire(where, command="ciuic: replacing an empty repository")
        try:
            found = set(os.listdir(where))
            if found - _OWN - set(CONFIG_NAMES) - _REBUILT:
                return False
            if any(os.listdir(f"{where}/{name}") for name in found & {PACKS_DIR, SNAPSHOTS_DIR, MARKS_DIR}):
                return False
            # The configuration first, and durably: without it the rest is nothing.
            for name in CONFIG_NAMES:
                if name in found:
                    disk.remove_file(f"{where}/{name}")
            for name in found & _REBUILT:
                disk.remove_file(f"{where}/{name}")
        finally:
            lock.release()
    except PermissionError as error:
        raise NotPermitted(f"cannot change {where}: {error.strerror}", hint="Run as root.") from None
    return True


def _make_dir(disk: Disk, path: str) -> None:
    # Another process makes the same repository.
    with suppress(FileExistsError):
        disk.make_dir(path)


def make_directories(disk: Disk, where: str, refuse_foreign: bool) -> None:
    """Make the directory with its empty parts.

    Raises:
        RepositoryExists: it is neither missing, nor empty, nor begun by a crashed `create`.
    """
    try:
        if not os.path.isdir(where):
            _make_dir(disk, where)
        fd = _open_directory(where, refuse_foreign)
        try:
            _make_parts(disk, where, fd)
        finally:
            os.close(fd)
    except FileNotFoundError:
        raise NotFound(f"cannot make a repository at {where}: its parent directory is missing") from None
    except PermissionError as error:
        raise NotPermitted(
            f"cannot make a repository at {where}: {error.strerror}", hint="Run as root."
        ) from None


def _make_parts(disk: Disk, where: str, fd: int) -> None:
    found = set(os.listdir(fd))
    # Packs are data, even where the configuration is lost: nothing is made over them.
    if found - _OWN or any(os.listdir(f"{where}/{PACKS_DIR}") for _ in found & {PACKS_DIR}):
        what = "is a repository already" if exists(where) else "is not empty"
        raise RepositoryExists(f"{where} {what}")
    # By descriptor, like the check of the owner: another user may exchange what the name means.
    os.fchmod(fd, 0o700)
    for name in (PACKS_DIR, SNAPSHOTS_DIR, MARKS_DIR):
        if name not in found:
            # Durable with the name of the configuration, which is written later into the same directory.
            _make_dir(disk, f"{where}/{name}")


def _open_directory(where: str, refuse_foreign: bool) -> int:
    """Return a descriptor of the directory, with ``refuse_foreign`` of one's own.

    Owner and mode are checked by descriptor: between two lookups of the name another user may exchange the
    directory where everybody may make names (/tmp). A directory of one's own keeps its name, there as well.

    Raises:
        NotPermitted: another user owns it or may write to it.
        OSError: the disk failed.
    """
    # Without O_NOFOLLOW, the save_dir of a training may be a link, as its user has made it.
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if refuse_foreign else 0)
    try:
        fd = os.open(where, flags)
    except OSError as error:
        if refuse_foreign and error.errno in (errno.ELOOP, errno.ENOTDIR) and os.path.islink(where):
            raise NotPermitted(f"{where} became a link while a repository was made there") from None
        raise
    status = os.fstat(fd)
    if refuse_foreign and (status.st_uid != os.geteuid() or status.st_mode & 0o022):
        os.close(fd)
        raise NotPermitted(
            f"a repository must be made in a directory of one's own: {where} belongs to uid {status.st_uid}, "
            f"mode {status.st_mode & 0o7777:04o}",
            hint="remove it, or name another place",
        )
    return fd
