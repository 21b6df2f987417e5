"""Detection of a clock that was set, by comparing wall time with the time since boot, which cannot be set.

Guarantees: a host that slept does not count as a clock that was set (CLOCK_BOOTTIME counts sleep), nor does a
clock that NTP adjusts a little at a time. Leaves the consequences to schedule.py and ciuic.retention.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# Less than this is clock discipline (NTP), not a clock that was set.
_STEP_SECONDS = 60.0


class ClockWatch:
    """Comparison of both clocks from one call to the next."""

    def __init__(
        self,
        now_ns: Callable[[], int],
        boot_ns: Callable[[], int] = lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME),
    ) -> None:
        self._now_ns = now_ns
        self._boot_ns = boot_ns
        self._difference_ns = now_ns() - boot_ns()

    def moved_seconds(self) -> float:
        """Return how far the clock was put forward (positive) or back since the last call.

        Return 0 for less than a minute.
        """
        before, self._difference_ns = self._difference_ns, self._now_ns() - self._boot_ns()
        moved = (self._difference_ns - before) / 1e9
        return moved if abs(moved) >= _STEP_SECONDS else 0.0
