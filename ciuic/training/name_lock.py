"""Detection of another process that trains under the same name in the same repository.

Two such processes would resume from, and remove, each other's snapshots. That is logged and not refused: an
earlier process may still be ending while its successor resumes, and two parts of one training may share a
name on purpose. The lock is on one byte of the file `trainings`; the kernel releases it when the process ends
(fcntl(2), POSIX locks: no child inherits them, and two managers of one process do not see each other's).
"""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress
from typing import Final

import xxhash

from ciuic.training.logs import log

FILE_NAME: Final = "trainings"
# struct flock of 64-bit Linux.
_FLOCK: Final = struct.Struct("hhqqi4x")
# One byte for each name, far behind the end of the file: a lock needs no content below it (fcntl(2)).
_SLOTS: Final = 1 << 62
_users: dict[str, list[NameLock]] = {}
"""Holders by file. Closing any descriptor of a file releases all locks of the process on it (fcntl(2))."""


class NameLock:
    """Lock of one training name in one repository."""

    def __init__(self, repository: str, name: str) -> None:
        """Create a lock that is not held."""
        self._path = f"{repository}/{FILE_NAME}"
        self.name = name
        self._offset = xxhash.xxh64_intdigest(name.encode("utf-8", "surrogateescape")) % _SLOTS
        self._fd = -1

    def acquire(self) -> None:
        """Hold the name until `release` or the end of the process.

        Log a warning if another process holds it already.

        Where the lock cannot be taken at all, the repository is used without it.
        """
        if self._fd >= 0:
            return
        try:
            self._open()
            # Asked first: a lock that is refused does not tell its holder.
            other = self._holder()
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._offset)
        except BlockingIOError:
            log.warning(
                "ciuic: another process%s saves a training as %r in this repository too: each would resume from, and "
                "remove, snapshots of the other; give each a save_dir or a name= of its own",
                f" ({other})" if other else "",
                self.name,
            )
        except OSError as error:
            log.debug("ciuic: cannot tell whether another training saves in this repository: %s", error)

    def release(self) -> None:
        """Let other processes have the name."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        users = _users[self._path]
        users.remove(self)
        if not users:
            del _users[self._path]
            os.close(fd)
        # Another manager of this process may hold the same byte: one lock stands for both.
        elif all(one._offset != self._offset for one in users):
            with suppress(OSError):
                fcntl.lockf(fd, fcntl.LOCK_UN, 1, self._offset)

    def _open(self) -> None:
        # One descriptor for all managers of this process: closing a second one would release every lock on
        # the file.
        users = _users.get(self._path, [])
        self._fd = users[0]._fd if users else os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        _users[self._path] = [*users, self]

    def _holder(self) -> int:
        """Return the pid of the process that holds the name; 0: none, or one in another pid namespace."""
        # F_GETLK tells of locks of other processes only, never of this one's own.
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, self._offset, 1, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_GETLK, asked))
        return int(pid) if kind != fcntl.F_UNLCK else 0
