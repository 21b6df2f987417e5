"""Private directories in which new files get ready beside names that somebody else may replace.

In a directory where another user may rename, a name that was just made can lead to something else a moment later: what is
made there by name (a pipe, a symbolic link, a directory) could not be opened for certain, and would give its recorded owner to
whatever was put in its place. So new things are made in a directory of mode 0700 that only the caller enters, get their
attributes there, and are renamed from there.

Guarantees: on return the descriptor is that of an empty directory which nobody but the caller and root can enter, or of the
shared directory itself where the file system has no owners of its own (FAT, SMB, NFS that maps root to nobody).
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import NamedTuple

from ciuic.restore.destination import new_temporary_name, open_directory, proc_path

_NOT_OWNER = stat.S_IRWXG | stat.S_IRWXO


class PrivateDir(NamedTuple):
    """A directory for unfinished files. Closed with `remove`."""

    shared: int
    """The directory that it lies in."""
    name: bytes
    """Empty if the file system has no owners, so that `fd` is that of the shared directory."""
    fd: int

    def remove(self) -> None:
        """Close it, and remove it if it is empty."""
        os.close(self.fd)
        if self.name:
            with suppress(
                OSError
            ):  # its name leads elsewhere now, or something could not be cleaned up in it
                os.rmdir(self.name, dir_fd=self.shared)


def is_shared(folder: int) -> bool:
    """Whether somebody other than root and the caller may replace names in this directory.

    An access ACL that lets others write shows in the group bits (acl(5): they are its mask).
    """
    st = os.fstat(folder)
    return st.st_uid not in (0, os.geteuid()) or bool(st.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def make_private_dir(shared: int, run: str) -> PrivateDir:
    """A new private directory in this one. OSError, also when its name was replaced meanwhile."""
    name = new_temporary_name(run)
    os.mkdir(name, 0o700, dir_fd=shared)
    fd = open_directory(shared, name)
    try:
        if _is_private(os.fstat(fd)):
            # Another directory of ours that was moved here is as private, but what is in it must stay.
            if os.listdir(proc_path(fd)):
                raise OSError(errno.EBUSY, "another directory was put in the place of the one just made")
            return PrivateDir(shared, name, fd)
        if _has_owners(shared, run):
            raise OSError(errno.EBUSY, "another directory was put in the place of the one just made")
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    with suppress(OSError):
        os.rmdir(name, dir_fd=shared)
    return PrivateDir(shared, b"", os.dup(shared))


def _is_private(st: os.stat_result) -> bool:
    return st.st_uid == os.geteuid() and not st.st_mode & _NOT_OWNER


def _has_owners(shared: int, run: str) -> bool:
    """Whether the file system keeps the owner and mode of new files: seen on a file that is certainly ours."""
    name = new_temporary_name(run)
    fd = os.open(
        name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=shared
    )
    try:
        return _is_private(os.fstat(fd))
    finally:
        os.close(fd)
        with suppress(OSError):
            os.unlink(name, dir_fd=shared)
