"""Saved overlay state: every durable call fails, tears or is the last one, in seeded lives."""

from __future__ import annotations

import time

from support.faulty_os import IO_ERROR, NO_SPACE, survive
from torture.figure import Figure

_FAULTS = ((None, False), (NO_SPACE, False), (NO_SPACE, True), (IO_ERROR, False))


def run(seconds: float, seed: int) -> list[Figure]:
    """Run lives until the time is over, one at least with each kind of fault."""
    points = exact = lives = 0
    failures: list[str] = []
    until = time.monotonic() + seconds
    while lives < len(_FAULTS) or time.monotonic() < until:
        error, stay = _FAULTS[lives % len(_FAULTS)]
        try:
            survived, captured = survive(seed + lives // len(_FAULTS), error=error, stay=stay)
            points, exact = points + survived, exact + captured
        except AssertionError as failure:
            failures.append(str(failure))
        lives += 1
    return [
        Figure("fault points in saved overlay state survived", points, tuple(failures)),
        Figure("waiting epochs captured exactly in spite of a fault", exact),
    ]
