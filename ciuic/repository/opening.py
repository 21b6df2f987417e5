"""Opening the files of a repository: regular files only, whatever somebody has put by their names.

Guarantees: no symbolic link is followed, so that a repository made by somebody else leads no reader and no writer to a file
outside; nothing waits for a pipe, a device or a socket, and none of them is read.
"""

from __future__ import annotations

import errno
import os
import stat

_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHER_KINDS = (errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EISDIR)
"""What open(2) says of a symbolic link, a pipe or socket, a device without driver and a directory."""


def open_regular(path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> int:
    """As os.open. OSError (EINVAL) for anything but a regular file."""
    try:
        fd = os.open(path, flags | _FLAGS, mode)
    except OSError as error:
        if error.errno in _OTHER_KINDS:
            raise _irregular(path) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _irregular(path)
    return fd


def open_to_write(path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> int:
    """As `open_regular`; in a directory where others may make names, nor a file with a second name: it may be a file of root
    elsewhere. In a directory of one's own it is a copy that was made with `cp -l`.
    """
    fd = open_regular(path, flags, mode)
    if os.fstat(fd).st_nlink > 1 and who_else_writes(os.path.dirname(os.fspath(path))):
        os.close(fd)
        raise OSError(errno.EINVAL, "it has a second name, so it is not written to", os.fspath(path))
    return fd


def who_else_writes(path: str) -> str:
    """Why somebody other than root and the caller may write here; empty if nobody else may, or nothing is there.

    One look at the file or directory itself, for what is opened often; `ciuic.ownership` looks at the way to it as well.
    """
    try:
        st = os.stat(path)
    except OSError:
        return ""  # missing or unreadable: opening it says so
    if st.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to user {st.st_uid}"
    if st.st_mode & _OTHERS_WRITE:
        return f"others may write to {path} (mode {stat.S_IMODE(st.st_mode):04o})"
    return ""


def _irregular(path: str | os.PathLike[str]) -> OSError:
    return OSError(errno.EINVAL, "it must be a regular file and is something else", os.fspath(path))
