"""Private directories, in which new files are prepared when another user may replace names in the destination.

In a directory where another user may rename, a name that was just created can lead to something else a moment later. What is
created there by name (a pipe, a symbolic link, a directory) could not be opened reliably, and whatever was put in its place
would get the recorded owner. New files are therefore created in a directory of mode 0700 that only the caller enters, get their
attributes there, and are renamed from there.

Guarantees: the descriptor returned is that of an empty directory that nobody but the caller and root can enter, or of the shared
directory itself where the file system keeps no owners (FAT, SMB, NFS that maps root to nobody).
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import NamedTuple

from ciuic.restore.files.destination import new_temporary_name, open_directory, proc_path

_NOT_OWNER = stat.S_IRWXG | stat.S_IRWXO


class PrivateDir(NamedTuple):
    """A directory for unfinished files; closed by `remove`."""

    shared: int
    """Descriptor of the directory that it is in."""
    name: bytes
    """Name in the shared directory; empty if the file system keeps no owners and `fd` is the shared directory."""
    fd: int

    def remove(self) -> None:
        """Close it, and remove it if it is empty."""
        os.close(self.fd)
        if self.name:
            # Its name leads elsewhere now, or something in it could not be removed.
            with suppress(OSError):
                os.rmdir(self.name, dir_fd=self.shared)


def is_shared(folder: int) -> bool:
    """Return whether a user other than root and the caller may replace names in this directory.

    An access ACL that lets others write shows in the group bits, which are its mask (acl(5)).
    """
    st = os.fstat(folder)
    return st.st_uid not in (0, os.geteuid()) or bool(st.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def make_private_dir(shared: int, run: str) -> PrivateDir:
    """Create a private directory in a shared one. OSError, also when its name was replaced meanwhile."""
    name = new_temporary_name(run)
    os.mkdir(name, 0o700, dir_fd=shared)
    # The name may lead elsewhere by now, so what was opened is checked by its descriptor.
    fd = open_directory(shared, name)
    try:
        if _is_private(os.fstat(fd)):
            # Another directory of the caller, moved here meanwhile, is as private, but its content must stay.
            if os.listdir(proc_path(fd)):
                raise OSError(errno.EBUSY, "another directory has replaced the one just created")
            return PrivateDir(shared, name, fd)
        # Not private on a file system that keeps owners: another user has exchanged the directory.
        if _has_owners(shared, run):
            raise OSError(errno.EBUSY, "another directory has replaced the one just created")
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
    """Return whether the file system keeps the owner and mode of new files."""
    # Tested with a regular file: O_EXCL returns the descriptor of the file just created, which no other user can replace.
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
