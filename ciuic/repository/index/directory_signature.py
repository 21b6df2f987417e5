"""Detect an unchanged directory by its ctime, to skip reading every pack and snapshot on open.

Guarantee: a time that `settled_ns` returned is not that of any later change, on a local file system whose
clock is the machine's and is not set back. A copy of the repository has other times, and is read completely
once.
"""

from __future__ import annotations

import os
import time
from typing import Final

# CLOCK_REALTIME_COARSE of clock_gettime(2): the clock of file systems, which moves by ticks of some
# milliseconds.
_REALTIME_COARSE: Final = 5
# Five waits of 2 ms cover a tick of 10 ms (100 Hz), the longest that kernels are built with.
_TICK_SECONDS: Final = 0.002
_MAX_TICKS: Final = 5


def changed_ns(directory: str) -> int:
    """Return when a name in the directory was last made, removed or replaced."""
    return os.stat(directory).st_ctime_ns


def settled_ns(directory: str, *, wait: bool) -> int:
    """Return `changed_ns` once every later change must have another time, else 0; waits at most 10 ms."""
    for left in range(_MAX_TICKS if wait else 0, -1, -1):
        found_ns = changed_ns(directory)
        # Within one tick of the file system's clock a later change would get the same ctime and pass unseen.
        if time.clock_gettime_ns(_REALTIME_COARSE) > found_ns:
            return found_ns
        if left:
            time.sleep(_TICK_SECONDS)
    return 0
