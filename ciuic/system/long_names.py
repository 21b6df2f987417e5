"""Locate a directory whose path is longer than the kernel reports (PATH_MAX).

Guarantee: the work is bounded, however many such directories a process holds and however deep they are. A climb goes up 1,365 levels
with one system call, and makes at most `MAX_JUMPS` of these calls; all climbs together end at a deadline. What could not be located
by then is reported as unknown.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

LEVELS_PER_JUMP: Final = 1365
"""Levels of one system call: so many times ``..`` make a path of 4,095 bytes, the longest that the kernel takes."""
MAX_JUMPS: Final = 64
"""Limit of system calls of one climb; they reach 87,000 levels, which take a process minutes to create."""
CLIMBS_SECONDS: Final = 2.0
"""Time for all climbs of a scan, enough for some ten thousand."""
_FLAGS: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


class Climber:
    """Locates directories during one scan of /proc."""

    def __init__(
        self, *, seconds: float = CLIMBS_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._left_seconds = seconds
        """Time left for climbs. Only climbs count: the rest of the scan takes as long as it needs."""

    def nearest_name(self, link: Path) -> bytes | None:
        """Return the path of the nearest directory, at or above the one that a link of /proc leads to, that has a reportable path.

        Returns None where that is not known: for what is no directory, below too many levels, or when the time is over.
        """
        if self._left_seconds <= 0:
            return None
        began = self._clock()
        try:
            return self._climb(link)
        finally:
            self._left_seconds -= self._clock() - began

    def _climb(self, link: Path) -> bytes | None:
        try:
            here = os.open(link, _FLAGS)
        except NotADirectoryError:
            # A file has no `..` by which to climb.
            return None
        try:
            for _ in range(MAX_JUMPS):
                above = _up(here, LEVELS_PER_JUMP)
                if _name(above) is not None:
                    os.close(above)
                    return _lowest_named(here)
                os.close(here)
                here = above
            return None
        finally:
            os.close(here)


def _lowest_named(here: int) -> bytes | None:
    """Return the path of the lowest directory above ``here`` that has a reportable path."""
    # Bisection in 11 steps: from some level on, all directories above have a path short enough.
    low, high, best = 0, LEVELS_PER_JUMP, None
    while low < high:
        middle = (low + high) // 2
        above = _up(here, middle)
        try:
            name = _name(above)
        finally:
            os.close(above)
        if name is None:
            low = middle + 1
        else:
            high, best = middle, name
    if best is not None:
        return best
    above = _up(here, low)
    try:
        return _name(above)
    finally:
        os.close(above)


def _up(fd: int, levels: int) -> int:
    return os.open(b"/".join([b".."] * levels) or b".", _FLAGS, dir_fd=fd)


def _name(fd: int) -> bytes | None:
    """Return the path of a descriptor; None where it is too long."""
    try:
        return os.readlink(b"/proc/self/fd/%d" % fd)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return None
