"""The right to serve one session with the kernel: an exclusive flock(2) that ends with the process.

Daemon and keeper may both start a successor of a worker that ended, each without knowing of the other. Two
processes that read requests of one session would answer from two tables of nodes; so a worker serves what it
has claimed, and nothing else.

Guarantees: at most one worker serves a session. The claim is on a file of the session, not of the root: a
worker that was detached and still serves open files does not keep the next mount of its root waiting. A
runtime directory that cannot be written costs the claim, never the job's file system.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)


class SessionServed(Exception):
    """Another worker serves the session."""


class SessionClaim:
    """A claim that is held until `release` or the end of the process."""

    def __init__(self, path: Path, fd: int | None) -> None:
        self._path = path
        self._fd = fd

    @classmethod
    def begin(cls, path: Path) -> SessionClaim:
        """Claim a session that was just made. A claim on the session before it is left to its holder."""
        # A new file, because a worker that was detached may hold the lock of the old one for as long as its
        # files are open.
        with suppress(OSError):
            path.unlink()
        return cls._take(path)

    @classmethod
    def inherit(cls, path: Path) -> SessionClaim:
        """Claim the session of a worker that ended.

        Raises:
            SessionServed: it has not ended, or has a successor already.
        """
        return cls._take(path)

    @classmethod
    def _take(cls, path: Path) -> SessionClaim:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            log.error("session_not_claimed", path=str(path), error=str(error))
            return cls(path, None)
        try:
            # Not waited for: the holder serves the session, possibly for days.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise SessionServed(f"another worker holds {path}") from error
        except OSError as error:
            log.error("session_not_claimed", path=str(path), error=str(error))
        return cls(path, fd)

    def release(self) -> None:
        """End the claim of a session that is over, and remove its file unless another session has one there by now."""
        if self._fd is None:
            return
        with suppress(OSError):
            if os.path.samestat(os.stat(self._path), os.fstat(self._fd)):
                self._path.unlink()
        os.close(self._fd)
        self._fd = None
