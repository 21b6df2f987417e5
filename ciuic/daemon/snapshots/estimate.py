"""Estimate when pending snapshots will be committed.

Guarantees: no figure where nothing is known (a first capture does not know how much there is). An estimate
assumes that other load stays as it is, and takes into account that the capture's share rises until the
deadline. Pure, except for the remembered durations.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final

from ciuic.protocol.control_types import Progress
from ciuic.system.urgency import Urgency

# Captures whose duration counts for one that has not begun: enough for a median, and few enough to follow a
# change of load.
MAX_REMEMBERED: Final = 9
# Steps of the sum over the time to the deadline.
_PARTS: Final = 1000
# Shortest step of that sum: progress, which it starts from, comes twice a second.
_MIN_STEP_SECONDS: Final = 0.5


def done_part(progress: Progress) -> float | None:
    """Return the part of a capture that is done, 0 to 1; None where the total is not known."""
    parts = [
        min(1.0, done / total)
        for done, total in (
            (progress.bytes_done, progress.bytes_total),
            (progress.files_done, progress.files_total),
        )
        if total
    ]
    return min(parts) if parts else None


def seconds_left(progress: Progress, elapsed_seconds: float, urgency: Urgency) -> float | None:
    """Return the remaining time of a running capture; None where that is not known.

    Args:
        progress: its last progress.
        elapsed_seconds: time since its start.
        urgency: its deadline and share as of now.
    """
    part = done_part(progress)
    worked_seconds = elapsed_seconds - progress.paused_seconds
    if not part or worked_seconds <= 0:
        return None
    work_seconds = worked_seconds * (1 - part) / part
    step_seconds = max(_MIN_STEP_SECONDS, work_seconds / _PARTS, urgency.finish_within_seconds / _PARTS)
    left_seconds = 0.0
    while work_seconds > 0:
        share = max(progress.share, urgency.least_share(left_seconds))
        if share >= 1:
            return left_seconds + work_seconds
        step = min(step_seconds, work_seconds / share)
        work_seconds -= step * share
        left_seconds += step
    return left_seconds


class Durations:
    """Durations of the last captures."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=MAX_REMEMBERED)

    def add(self, seconds: float) -> None:
        """Remember the duration of a committed capture."""
        self._seconds.append(seconds)

    @property
    def typical_seconds(self) -> float | None:
        """Median of the durations; None before the first."""
        return statistics.median(self._seconds) if self._seconds else None
