"""Shared claim on content that several processes store in turn for one snapshot.

Between two of them no process holds the repository's lock and no snapshot refers to what was stored, so a
prune would free it. The process that will make the snapshot holds a claim from before the first of them until
after the snapshot: a shared flock(2) on the file `claim`, which the kernel releases when the process ends.
While there is a claim, nothing is swept. A process that copies the repository holds one too.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from typing import Final

from ciuic.repository.disk.opening import open_to_write

CLAIM_NAME: Final = "claim"


class Claim:
    """Claim held from `acquire` to `release`. Several may be held at once."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def acquire(cls, directory: str) -> Claim:
        """Take a claim, waiting only for processes that check whether there is one.

        Raises:
            OSError: the disk failed.
        """
        fd = open_to_write(f"{directory}/{CLAIM_NAME}", os.O_RDWR | os.O_CREAT)
        try:
            # Shared, because several claims may be held at once; only a check takes it exclusively.
            fcntl.flock(fd, fcntl.LOCK_SH)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd)

    @classmethod
    def taken_over(cls, fd: int) -> Claim:
        """Return the claim that another process handed over with its descriptor."""
        return cls(fd)

    def fileno(self) -> int:
        """Return the descriptor that holds the claim."""
        return self._fd

    def hand_over(self) -> None:
        """Close the descriptor; a process that also has it holds the claim from now on, and releases it."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def release(self) -> None:
        """Release the claim, also if a forked child has the descriptor as well."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            # LOCK_UN, because closing one of several duplicates of a descriptor keeps the lock (flock(2)).
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


def is_claimed(directory: str) -> bool:
    """Return whether there is a claim, so that nothing may be swept.

    Call it under the repository's lock: a process that claims later also stores later.
    """
    try:
        fd = open_to_write(f"{directory}/{CLAIM_NAME}", os.O_RDWR)
    except FileNotFoundError:
        return False
    # A shared claim of any process makes the exclusive lock fail; the lock itself ends with the descriptor.
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EINTR):
            return True
        raise
    finally:
        os.close(fd)
    return False
