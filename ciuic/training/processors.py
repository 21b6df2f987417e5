"""Whether the machine's processors had nothing to do, by the kernel's own count (/proc/stat, proc_stat(5)).

Of those this process may run on. Waiting for a disk counts as nothing to do. A limit of a control group is not seen.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final, NamedTuple

_STAT: Final = "/proc/stat"
_LEAST_TICKS: Final = 50
"""Half a second of one processor: with fewer nothing can be told."""


class _Ticks(NamedTuple):
    idle: int
    all: int


class Idleness:
    """Between two calls."""

    def __init__(self, path: str = _STAT) -> None:
        self._path = path
        self._before = self._ticks()

    def begin(self) -> None:
        """From here on it is measured."""
        self._before = self._ticks()

    def share(self) -> float | None:
        """Since `begin`; None where that is too short or nobody can tell."""
        before, now = self._before, self._ticks()
        if before is None or now is None or now.all - before.all < _LEAST_TICKS:
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
                        ticks = [int(field) for field in fields[:8]]
                        idle, all_ = idle + ticks[3] + ticks[4], all_ + sum(ticks)
            return _Ticks(idle, all_) if all_ else None
        return None
