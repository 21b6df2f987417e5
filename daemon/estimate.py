"""When snapshots on their way will be committed, as far as it can be told.

Guarantees: no figure where nothing is known (a first capture does not know how much there is). An estimate assumes that others go on as
they do, and counts with the share that rises until the deadline. Pure but for the durations that it remembers.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final

from ciuic.control_types import Progress
from ciuic.urgency import Urgency

MAX_REMEMBERED: Final = 9
"""Captures whose duration counts for one that has not begun: enough for a median, few enough to follow a change of load."""
_PARTS: Final = 1000
"""Steps in which the time to the deadline is added up."""
_MIN_STEP_SECONDS: Final = 0.5


def done_part(progress: Progress) -> float | None:
    """Return how much of a capture is done, 0 to 1; None where it is not known how much there is."""
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
    """Return how long a running capture will take from now on; None where that is not known.

    Args:
        progress: what it said last.
        elapsed_seconds: time since it began.
        urgency: its terms as of now.
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
    """How long the last captures took."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=MAX_REMEMBERED)

    def add(self, seconds: float) -> None:
        """Remember that a capture was committed after so long."""
        self._seconds.append(seconds)

    @property
    def typical_seconds(self) -> float | None:
        """Return their median; None before the first."""
        return statistics.median(self._seconds) if self._seconds else None
