"""Share of idle processor time, by the kernel's own count (/proc/stat, proc_stat(5)).

Only the processors count that this process may run on. Waiting for a disk counts as idle. A processor limit
of a control group is not seen.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final, NamedTuple

_STAT: Final = "/proc/stat"
# Half a second of one processor (a tick is 10 ms): a shorter period tells nothing.
_MIN_TICKS: Final = 50


class _Ticks(NamedTuple):
    """Clock ticks since boot, summed over the processors of this process."""

    idle: int
    all: int


class CpuIdle:
    """Measures the idle share since `begin`."""

    def __init__(self, path: str = _STAT) -> None:
        """Begin the first measurement."""
        self._path = path
        self._before = self._ticks()

    def begin(self) -> None:
        """Begin another measurement."""
        self._before = self._ticks()

    def share(self) -> float | None:
        """Return the idle share since `begin`, 0 to 1.

        The result is None if the period is too short or the kernel does not tell.
        """
        before, now = self._before, self._ticks()
        if before is None or now is None or now.all - before.all < _MIN_TICKS:
            return None
        return (now.idle - before.idle) / (now.all - before.all)

    def _ticks(self) -> _Ticks | None:
        mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        idle = all_ = 0
        with suppress(OSError, ValueError, IndexError):
            with open(self._path, encoding="ascii") as file:
                for line in file:
                    name, *fields = line.split()
                    if name in mine:
                        # user nice system idle iowait irq softirq steal; guest time is in user time already.
                        ticks = [int(field) for field in fields[:8]]
                        idle, all_ = idle + ticks[3] + ticks[4], all_ + sum(ticks)
            return _Ticks(idle, all_) if all_ else None
        return None
