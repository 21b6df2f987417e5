"""Rules of succession, which daemon and keeper share: when a successor goes on with the session of a worker that ended."""

from __future__ import annotations

import signal
from typing import Final

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
