"""Succession of workers: when a successor goes on with the session of a worker that ended, and that only one does.

Daemon and keeper share the rules, and may both start a successor, each without knowing of the other. Two
processes that read requests of one session would answer from two tables of nodes; so a worker serves what it
has claimed, and nothing else. A claim is an exclusive flock(2) that ends with the process.

Guarantees: at most one worker serves a session. The claim is on a file of the session, not of the root: a
worker that was detached and still serves open files does not keep the next mount of its root waiting. A
runtime directory that cannot be written costs the claim, never the job's file system.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from ciuic.system.disk import open_locked

log = structlog.get_logger(__name__)

SUCCESSION_SECONDS: Final = (0.0, 0.0, 0.1, 0.5, 1.0, 2.0, 5.0, 5.0)
"""Pause before the successor of a worker that died so many times in a row; after the last one the session is
given up."""
PLAIN_AFTER_DEATHS: Final = 5
"""Deaths in a row from which on successors track nothing: whatever kills workers in tracking is left out
then."""
STABLE_SECONDS: Final = 60.0
"""A worker that served for so long ends a row of deaths."""
SERVED_ELSEWHERE: Final = 75
"""Exit status of a worker that was to go on with a session that another worker serves (EX_TEMPFAIL of
sysexits.h)."""


def counted_deaths(deaths: int, status: int | None, served_seconds: float) -> int:
    """Return the deaths in a row after one more end.

    SIGKILL comes from outside and says nothing against the worker.

    Args:
        deaths: deaths in a row before this end.
        status: exit status, negative for a signal; None where it is not known.
        served_seconds: time for which the worker served.
    """
    # SIGKILL comes from an operator or the out-of-memory killer.
    row = 0 if served_seconds >= STABLE_SECONDS else deaths
    return row + (status != -signal.SIGKILL)


def pause_seconds(deaths: int) -> float | None:
    """Return how long to wait before the next successor; None when the session is to be given up."""
    if deaths > len(SUCCESSION_SECONDS):
        return None
    return SUCCESSION_SECONDS[max(deaths - 1, 0)]


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
        return cls.inherit(path)

    @classmethod
    def inherit(cls, path: Path) -> SessionClaim:
        """Claim the session of a worker that ended.

        Raises:
            SessionServed: it has not ended, or has a successor already.
        """
        try:
            # Not waited for: the holder serves the session, possibly for days.
            return cls(path, open_locked(path))
        except BlockingIOError as error:
            raise SessionServed(f"another worker holds {path}") from error
        except OSError as error:
            log.error("session_not_claimed", path=str(path), error=str(error))
            return cls(path, None)

    def release(self) -> None:
        """End the claim of a session that is over, and remove its file unless another session has one there by now."""
        if self._fd is None:
            return
        with suppress(OSError):
            if os.path.samestat(os.stat(self._path), os.fstat(self._fd)):
                self._path.unlink()
        os.close(self._fd)
        self._fd = None
