"""What snapshots have cost a training so far, and what they will: measured, not assumed.

A snapshot costs the stall, and then what steps lose while the writer works beside them: the median time between two boundaries
while something is being written, compared to that while nothing is. Medians, because an evaluation between two boundaries is no step.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

_SAVES: Final = 5
_STEPS: Final = 64
_ENOUGH: Final = 8
"""Steps of each kind before their medians are compared."""


class Costs:
    def __init__(self) -> None:
        self._first_stall: float | None = None
        """It includes taking the memory, and counts only until there are others."""
        self._stalls: deque[float] = deque(maxlen=_SAVES)
        self._writes: deque[tuple[int, float]] = deque(maxlen=_SAVES)
        self._steps: dict[bool, deque[float]] = {False: deque(maxlen=_STEPS), True: deque(maxlen=_STEPS)}
        self._last: float | None = None
        self.measured_bytes_per_second = 0.0
        """What the writer found at its start, before there was a snapshot; 0: not known."""

    def stalled(self, seconds: float) -> None:
        """Of one save."""
        if self._first_stall is None:
            self._first_stall = seconds
        else:
            self._stalls.append(seconds)
        self._last = None

    def wrote(self, size_bytes: int, seconds: float) -> None:
        """A snapshot of this size is durable, so long after it was staged."""
        self._writes.append((size_bytes, seconds))

    def boundary(self, now: float, *, writing: bool) -> None:
        """To be called at each."""
        if self._last is not None:
            self._steps[writing].append(now - self._last)
        self._last = now

    @property
    def write_seconds(self) -> float:
        """For one snapshot, as it was lately; 0 before the first."""
        return median(seconds for _, seconds in self._writes) if self._writes else 0.0

    @property
    def slowdown(self) -> float:
        """The share of their speed that steps lose while something is written."""
        quiet, busy = self._steps[False], self._steps[True]
        if min(len(quiet), len(busy)) < _ENOUGH:
            return 0.0
        return max(0.0, 1.0 - median(quiet) / max(median(busy), 1e-9))

    @property
    def seconds(self) -> float | None:
        """Of one snapshot; None before the first."""
        if self._first_stall is None:
            return None
        return median(self._stalls or [self._first_stall]) + self.slowdown * self.write_seconds

    def write_estimate_seconds(self, size_bytes: int) -> float | None:
        """How long a snapshot of this size will take to be durable, carefully: the slowest of those of late. None: nothing is known."""
        if self._writes:
            return max(seconds * max(1.0, size_bytes / max(1, size)) for size, seconds in self._writes)
        if self.measured_bytes_per_second:
            return size_bytes / self.measured_bytes_per_second
        return None
