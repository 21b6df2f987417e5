"""Where a directory lies whose path is longer than the kernel says (PATH_MAX).

Guarantee: bounded work, whoever holds how many of such directories how deep. A climb goes up 1,365 levels with one system call, at
most `MAX_JUMPS` of these; all climbs together end at a deadline. What was not judged then is not known, and said to be.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

LEVELS_PER_JUMP: Final = 1365
"""So many times ``..`` make a path of 4,095 bytes, the longest that the kernel takes."""
MAX_JUMPS: Final = 64
"""87,000 levels: making them takes a process minutes."""
CLIMBS_SECONDS: Final = 2.0
"""For all climbs of a scan: some ten thousand."""
_FLAGS: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


class Climber:
    """For one scan of /proc."""

    def __init__(
        self, *, seconds: float = CLIMBS_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._left_seconds = seconds
        """The scan goes on between climbs for as long as it takes: only climbs are paid for by who makes them necessary."""

    def nearest_name(self, link: Path) -> bytes | None:
        """The path of the nearest directory at or above the one that a link of /proc leads to that can be said. None where
        that is not known: for what is no directory, below too many levels, or when the time is over."""
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
    """By bisection: 11 steps. Of the directories above ``here``, those from some level on have a name that can be said."""
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
    """None where it is too long."""
    try:
        return os.readlink(b"/proc/self/fd/%d" % fd)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return None
