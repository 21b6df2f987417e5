"""Open the files of a repository: regular files only, whatever lies under their names.

Guarantees: no symbolic link is followed, so that a repository made by another user leads no reader and no
writer to a file outside; nothing waits for a pipe, a device or a socket, and none of them is read.
"""

from __future__ import annotations

import errno
import os
import stat

# O_NONBLOCK: opening a pipe does not wait for its other end. O_NOCTTY: a terminal that lies there does not
# become the controlling terminal of a daemon (open(2)).
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# Errors of open(2) for a symbolic link, a pipe or socket, a device without driver and a directory.
_OTHER_KINDS = (errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EISDIR)


def open_regular(path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> int:
    """Open a file like os.open. OSError (EINVAL) for anything but a regular file."""
    try:
        fd = os.open(path, flags | _FLAGS, mode)
    except OSError as error:
        if error.errno in _OTHER_KINDS:
            raise _irregular(path) from None
        raise
    # O_NONBLOCK makes open(2) return for a pipe or a device, so the type can be checked here.
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _irregular(path)
    return fd


def open_to_write(path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> int:
    """Open a file for writing; refuse one with a second name where others may make names.

    Such a file may be a file of root elsewhere. In the caller's own directory it is a copy made with `cp -l`.
    """
    fd = open_regular(path, flags, mode)
    if os.fstat(fd).st_nlink > 1 and who_else_writes(os.path.dirname(os.fspath(path))):
        os.close(fd)
        raise OSError(errno.EINVAL, "it has a second hard link, so it is not written to", os.fspath(path))
    return fd


def who_else_writes(path: str) -> str:
    """Return why another user than root and the caller may write here.

    Empty if no other user may, or if it is missing. Only the file or directory itself is checked, for what is
    opened often; `ciuic.system.ownership` also checks the way to it.
    """
    try:
        st = os.stat(path)
    except OSError:
        # Missing or unreadable: the caller's open reports it.
        return ""
    if st.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to user {st.st_uid}"
    if st.st_mode & _OTHERS_WRITE:
        return f"others may write to {path} (mode {stat.S_IMODE(st.st_mode):04o})"
    return ""


def _irregular(path: str | os.PathLike[str]) -> OSError:
    return OSError(errno.EINVAL, "it must be a regular file, but is not", os.fspath(path))
