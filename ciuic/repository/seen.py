"""Whether a directory is still as the index has it, told by its time of change: so that who opens the repository need not look at
every pack and every snapshot when nothing came or went.

Guarantee: a time that `settled_ns` returned is not that of any later change, on a local file system whose clock is the machine's and
is not set back. A copy of the repository has other times, and is looked at as a whole once.
"""

from __future__ import annotations

import os
import time
from typing import Final

_REALTIME_COARSE: Final = 5
"""CLOCK_REALTIME_COARSE of clock_gettime(2): the clock of file systems, which moves by ticks of some milliseconds."""
_TICK_SECONDS: Final = 0.002
_MOST_TICKS: Final = 5


def changed_ns(directory: str) -> int:
    """When a name in it was last made, removed or replaced."""
    return os.stat(directory).st_ctime_ns


def settled_ns(directory: str, *, wait: bool) -> int:
    """The same, once every later change must have another time; 0 as long as it need not. Waits 10 ms at the most."""
    for left in range(_MOST_TICKS if wait else 0, -1, -1):
        found_ns = changed_ns(directory)
        if time.clock_gettime_ns(_REALTIME_COARSE) > found_ns:
            return found_ns
        if left:
            time.sleep(_TICK_SECONDS)
    return 0
