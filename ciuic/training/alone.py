"""Whether another process trains under the same name in the same repository: then each would resume from, and remove, the other's snapshots.

Nothing is refused for it: who resumes while the earlier process is still ending, or trains two parts of one thing, knows what he does. It
is said. The sign is a lock on one byte of the file `trainings`, which the kernel takes away with its process (fcntl(2), POSIX
locks: no child inherits them, and two managers of one process do not see each other's).
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
_FLOCK: Final = struct.Struct("hhqqi4x")
"""struct flock of 64-bit Linux."""
_PLACES: Final = 1 << 62
_users: dict[str, list[Alone]] = {}
"""Of each file that is open: to close it would let go of all locks that this process has on it."""


class Alone:
    """For one name in one repository."""

    def __init__(self, repository: str, name: str) -> None:
        self._path = f"{repository}/{FILE_NAME}"
        self._name = name
        self._place = xxhash.xxh64_intdigest(name.encode("utf-8", "surrogateescape")) % _PLACES
        self._fd = -1

    def make_sure(self) -> None:
        """From the first call on the name is this process's, as long as it lives; a warning where it is another's already. A repository in
        which that cannot be found out is as good as any."""
        if self._fd >= 0:
            return
        try:
            self._open()
            other = self._holder()
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._place)
        except BlockingIOError:
            log.warning(
                "ciuic: another process%s saves its training as %r in this repository, too: each would resume from the other's snapshots "
                "and remove them; give each a save_dir or a name= of its own",
                f" ({other})" if other else "",
                self._name,
            )
        except OSError as error:
            log.debug("ciuic: whether another training saves there is not known: %s", error)

    def release(self) -> None:
        """Others may have the name."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        users = _users[self._path]
        users.remove(self)
        if not users:
            del _users[self._path]
            os.close(fd)
        elif all(one._place != self._place for one in users):
            with suppress(OSError):
                fcntl.lockf(fd, fcntl.LOCK_UN, 1, self._place)

    def _open(self) -> None:
        users = _users.get(self._path, [])
        self._fd = (
            users[0]._fd if users else os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        )
        _users[self._path] = [*users, self]

    def _holder(self) -> int:
        """The pid of who has it; 0 if nobody has or that is in another namespace."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, self._place, 1, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_GETLK, asked))
        return int(pid) if kind != fcntl.F_UNLCK else 0
