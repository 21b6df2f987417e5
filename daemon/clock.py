"""Whether somebody set the clock: wall time against the time since the boot, which nobody can set.

Guarantees: a machine that slept is not a clock that was set (CLOCK_BOOTTIME counts sleep); a clock that is being
disciplined, a little at a time, is none either. Leaves what to do about it to schedule.py and ciuic.retention.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_STEP_SECONDS = 60.0


class ClockWatch:
    """Compares from one look to the next."""

    def __init__(
        self,
        now_ns: Callable[[], int],
        boot_ns: Callable[[], int] = lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME),
    ) -> None:
        self._now_ns = now_ns
        self._boot_ns = boot_ns
        self._difference_ns = now_ns() - boot_ns()

    def moved_seconds(self) -> float:
        """How far the clock was put forward (positive) or back since the last look; 0 for less than a minute."""
        before, self._difference_ns = self._difference_ns, self._now_ns() - self._boot_ns()
        moved = (self._difference_ns - before) / 1e9
        return moved if abs(moved) >= _STEP_SECONDS else 0.0
