"""Measured cost of snapshots, and estimates for the next one.

A snapshot costs the stall of the training, and then what steps lose while the writer works beside them: the
median time between two boundaries while something is being written, compared with the median while nothing
is. Medians, because an evaluation between two boundaries is no step.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

_SAVES: Final = 5
_STEPS: Final = 64
# Steps of each kind before their medians are compared.
_MIN_STEPS: Final = 8


class SaveCosts:
    """Durations of the newest saves and steps."""

    def __init__(self) -> None:
        """Begin without any measurement."""
        # The first stall includes allocating the memory, so it counts only until there are others.
        self._first_stall: float | None = None
        self._stalls: deque[float] = deque(maxlen=_SAVES)
        self._writes: deque[tuple[int, float]] = deque(maxlen=_SAVES)
        self._steps: dict[bool, deque[float]] = {False: deque(maxlen=_STEPS), True: deque(maxlen=_STEPS)}
        self._last: float | None = None
        self.measured_bytes_per_second = 0.0
        """Write speed that the writer measured at its start, before there was a snapshot; 0: unknown."""

    def stalled(self, seconds: float) -> None:
        """Record the stall of one save."""
        if self._first_stall is None:
            self._first_stall = seconds
        else:
            self._stalls.append(seconds)
        # The time until the next boundary includes the stall, so it is not counted as a step.
        self._last = None

    def wrote(self, size_bytes: int, seconds: float) -> None:
        """Record that a snapshot of this size was durable so many seconds after it was staged."""
        self._writes.append((size_bytes, seconds))

    def boundary(self, now: float, *, writing: bool) -> None:
        """Record a boundary at this monotonic time.

        Args:
            now: Monotonic clock.
            writing: Whether the writer works on a snapshot.
        """
        if self._last is not None:
            self._steps[writing].append(now - self._last)
        self._last = now

    @property
    def write_seconds(self) -> float:
        """Median time for which the newest snapshots were written; 0 before the first."""
        return median(seconds for _, seconds in self._writes) if self._writes else 0.0

    @property
    def slowdown(self) -> float:
        """Share of their speed that steps lose while a snapshot is written, 0 to 1."""
        quiet, busy = self._steps[False], self._steps[True]
        if min(len(quiet), len(busy)) < _MIN_STEPS:
            return 0.0
        return max(0.0, 1.0 - median(quiet) / max(median(busy), 1e-9))

    @property
    def seconds(self) -> float | None:
        """Cost of one snapshot for the training; None before the first."""
        if self._first_stall is None:
            return None
        return median(self._stalls or [self._first_stall]) + self.slowdown * self.write_seconds

    def write_estimate_seconds(self, size_bytes: int) -> float | None:
        """Return an upper estimate of the time until a snapshot of this size is durable.

        The result is None if nothing was measured.

        It scales the slowest of the newest snapshots.
        """
        if self._writes:
            # Scaled up for a state that has grown, never down: part of the time does not depend on the size.
            return max(seconds * max(1.0, size_bytes / max(1, size)) for size, seconds in self._writes)
        if self.measured_bytes_per_second:
            return size_bytes / self.measured_bytes_per_second
        return None
