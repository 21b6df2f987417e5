"""Locks on files by flock(2), which the kernel releases when the process ends, however it ends.

flock and not fcntl: an fcntl lock is lost when any descriptor of the file is closed in this process. Who the
holder is, and what a file system without locks means, is left to the caller.
"""

from __future__ import annotations

import errno
import fcntl
import os


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock an open file without waiting; return whether it is locked now.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        # EINTR: a signal came first; the caller may try again.
        if error.errno in (errno.EWOULDBLOCK, errno.EINTR):
            return False
        raise
    return True


def open_locked(
    path: str | bytes | os.PathLike[str], *, mode: int = 0o600, dir_fd: int | None = None, wait: bool = False
) -> int:
    """Open a file, made if it is missing, with an exclusive lock, which ends with the descriptor.

    Args:
        path: File, no symbolic link; with ``dir_fd`` a name in this directory.
        mode: Permissions of a new file, as far as the umask leaves them.
        dir_fd: Descriptor of the directory; None for a path.
        wait: Whether to wait for the lock.

    Raises:
        BlockingIOError: another process has the lock.
        OSError: the file cannot be opened, or the file system has no locks.
    """
    while True:
        fd = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=dir_fd
        )
        try:
            fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder before may have removed or replaced the file meanwhile: a lock on that one excludes nobody.
            if os.path.samestat(os.fstat(fd), os.stat(path, dir_fd=dir_fd, follow_symlinks=False)):
                return fd
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
