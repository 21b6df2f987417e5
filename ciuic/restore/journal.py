"""The mark that a restore of a directory is under way: `.ciuic-restore` in that directory.

Guarantees: while it is locked no second restore works there; when it is found unlocked, the run that made it was cut
short, so what that run restored is recognised (it is no conflict) and its temporary files are removed. Where it cannot
be made, a restore works all the same, but one that is cut short must then be repeated with an overwrite mode.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
from dataclasses import dataclass

from ciuic.errors import Busy
from ciuic.lookup import readable
from ciuic.restore.destination import unlink_if_there

JOURNAL_NAME = b".ciuic-restore"
_MAX_BYTES = 65536
_SOMETHING_ELSE = (errno.EISDIR, errno.ENXIO, errno.ENODEV, errno.ENOTDIR)
"""What open(2) says of a directory, a socket or a pipe by the name of the journal, which anybody may put there."""
_RUN = re.compile(r"[0-9a-f]{16}\Z")


@dataclass(frozen=True)
class Mark:
    """What a journal says."""

    snapshot: str
    source: bytes
    run: str
    """16 hexadecimal digits in the names of the run's temporary files."""

    def encode(self) -> bytes:
        document = {"snapshot": self.snapshot, "source": self.source.hex(), "run": self.run}
        return json.dumps(document).encode("ascii")

    @classmethod
    def decode(cls, data: bytes) -> Mark | None:
        """None for anything that is not a whole mark: it was being written when the run was cut short."""
        try:
            document = json.loads(data)
            mark = cls(str(document["snapshot"]), bytes.fromhex(document["source"]), str(document["run"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        return mark if _RUN.match(mark.run) else None


def read_mark(folder: int) -> Mark | None:
    """The mark in a directory, None if there is none that can be read."""
    try:
        fd = _open(folder, os.O_RDONLY)
    except OSError:  # absent, not ours to read, or something else by that name: no mark
        return None
    try:
        return Mark.decode(os.pread(fd, _MAX_BYTES, 0))
    finally:
        os.close(fd)


def new_run() -> str:
    return os.urandom(8).hex()


class Journal:
    """Held by a running restore; `finish` when everything is restored, `close` when it is not."""

    def __init__(self, folder: int, fd: int, mark: Mark, resumed: bool) -> None:
        self._folder = os.dup(folder)
        self._fd = fd
        self.mark = mark
        self.resumed = resumed
        """The same restore was begun before and cut short."""

    @classmethod
    def begin(cls, folder: int, path: bytes, snapshot: str, source: bytes) -> Journal | None:
        """Busy if another restore works there; None where no journal can be kept."""
        try:
            fd = _open(folder, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno in (
                errno.EACCES,
                errno.EPERM,
                errno.EROFS,
                errno.ENOSPC,
                errno.EDQUOT,
                errno.ELOOP,
                *_SOMETHING_ELSE,
            ):
                return None
            raise
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise Busy(
                f"another restore into {readable(path)} is running", hint="wait for it to end"
            ) from None
        except OSError:  # a file system without locks: two restores at once are the caller's business there
            pass
        before = Mark.decode(os.pread(fd, _MAX_BYTES, 0))
        mark = Mark(snapshot, source, before.run if before else new_run())
        try:
            data = mark.encode()
            os.ftruncate(fd, 0)
            os.pwrite(fd, data, 0)
            os.fsync(fd)
        except OSError:  # a full disk: the restore will say so of the files
            unlink_if_there(folder, JOURNAL_NAME)
            os.close(fd)
            return None
        return cls(folder, fd, mark, before is not None and before == mark)

    def finish(self) -> None:
        unlink_if_there(self._folder, JOURNAL_NAME)
        self.close()

    def close(self) -> None:
        """Leaves it there for the next run."""
        os.close(self._fd)
        os.close(self._folder)


def _open(folder: int, flags: int) -> int:
    fd = os.open(JOURNAL_NAME, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=folder)
    st = os.fstat(fd)
    others = st.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISREG(st.st_mode) or st.st_nlink != 1 or st.st_uid != os.geteuid() or others:
        os.close(fd)
        raise OSError(errno.ELOOP, "not a journal of ours")
    return fd
