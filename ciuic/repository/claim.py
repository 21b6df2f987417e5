"""Content that several processes store, one after the other, before one of them makes a snapshot of it all.

Between two of them nobody holds the repository's lock and no snapshot refers to what was stored, so that a prune would free it. Who
will make the snapshot holds a claim from before the first of them until after the snapshot: a shared flock(2) on the file `claim`,
which the kernel lets go of with its process. While there is one, nothing is swept.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from typing import Final

from ciuic.repository.opening import open_to_write

CLAIM_NAME: Final = "claim"


class Claim:
    """Held from `acquire` to `release`. Several may be held at once."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def acquire(cls, directory: str) -> Claim:
        """Waits for nobody but those who look whether there is a claim. OSError."""
        fd = open_to_write(f"{directory}/{CLAIM_NAME}", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd)

    @classmethod
    def taken_over(cls, fd: int) -> Claim:
        """What another process handed over with its descriptor."""
        return cls(fd)

    def fileno(self) -> int:
        return self._fd

    def hand_over(self) -> None:
        """A process that has the descriptor as well holds it from now on, and releases it."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def release(self) -> None:
        """Also where a forked child has the descriptor as well."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


def is_claimed(directory: str) -> bool:
    """Whether somebody's content must not be swept. To be asked under the repository's lock: who claims after that stores after that."""
    try:
        fd = open_to_write(f"{directory}/{CLAIM_NAME}", os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EINTR):
            return True
        raise
    finally:
        os.close(fd)
    return False
