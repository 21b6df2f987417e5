"""Decide when states before the newest are coded, and how much processor time that takes from a training.

Guarantees: while the training leaves processors idle, everything that waits is coded between saves, in idle
time. On a machine that it keeps busy, `MAX_WAITING_WHEN_BUSY` states wait for better times. What waits beyond
them is coded by slices of idle-class threads with pauses in between, the longer the fewer wait, so that the
share of all processors is at most `_SHARES`. A training that saves faster than that pays with
processor time: from `OVERDUE` states on, one is coded after each save without pauses, and the next save waits
for it. So `OVERDUE` states wait at most, unless coding one takes longer than the repository's lock may be held
for it (`max_coding_seconds`); what was coded until then counts for the next turn.

A save for which the training stands still, or after which it has to be gone, never waits for this. The
repository is not locked in the pauses.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from ciuic.repository.codecs.codec import Pace
from ciuic.training.writer.codecs import max_coding_seconds
from ciuic.training.writer.reverse_deltas import ReverseDeltas

MAX_WAITING_WHEN_BUSY: Final = 2
"""States that wait for idle time on a busy machine, beside the newest, which is never coded."""
# Share of all processors, by the number of states beyond those.
_SHARES: Final = (0.01, 0.02, 0.04)
OVERDUE: Final = MAX_WAITING_WHEN_BUSY + len(_SHARES) + 1
"""Waiting states of which the oldest is coded before the next save."""
# Processor time between two pauses, more for large states: each slice looks up all chunks of the state anew.
_SLICE_SECONDS: Final = 0.25
_SLICE_BYTES_PER_SECOND: Final = 1e9
_MIN_PAUSE_SECONDS: Final = 0.5


class Trainer(NamedTuple):
    """State of the trainer while earlier states are coded."""

    has_message: Callable[[], bool]
    """Returns True if a message has arrived or the trainer has ended."""
    stands_still: Callable[[], bool]
    """Returns True if the trainer waits for a save, or is ending."""
    pause: Callable[[float], None]
    """Wait for so many seconds, or until there is a message."""


class Clock(NamedTuple):
    """Time in seconds."""

    now: Callable[[], float] = time.monotonic
    used: Callable[[], float] = time.process_time
    """Processor time of this process."""
    processors: int = len(os.sched_getaffinity(0))


class CodingTurns:
    """Turns of one writer."""

    def __init__(self, trainer: Trainer, clock: Clock | None = None) -> None:
        self._trainer = trainer
        self._clock = Clock() if clock is None else clock

    def run(self, deltas: ReverseDeltas, *, is_busy: bool, size_bytes: int) -> None:
        """Code earlier states after a save, until the next message or until enough is done.

        Args:
            deltas: the states.
            is_busy: whether the training keeps all processors busy.
            size_bytes: size of a state.

        Raises:
            CiuicError: the repository is damaged.
            OSError: the repository cannot be read or written.
        """
        deltas.adopt()
        if not is_busy:
            self._run_until(deltas, self._trainer.has_message, "patient", max_coding_seconds(size_bytes), 0)
        if deltas.waiting >= OVERDUE:
            seconds = max_coding_seconds(size_bytes)
            self._run_until(deltas, self._trainer.stands_still, "soon", seconds, OVERDUE - 1)
        while is_busy and deltas.waiting > MAX_WAITING_WHEN_BUSY and not self._trainer.has_message():
            self._run_slice(deltas, size_bytes)

    def _run_slice(self, deltas: ReverseDeltas, size_bytes: int) -> None:
        """Code for a moment, then pause so long that the share of the processors is kept."""
        clock = self._clock
        beyond = deltas.waiting - MAX_WAITING_WHEN_BUSY
        share = _SHARES[min(beyond, len(_SHARES)) - 1]
        slice_seconds = _SLICE_SECONDS + size_bytes / _SLICE_BYTES_PER_SECOND
        began, used = clock.now(), clock.used()
        self._run_until(
            deltas,
            lambda: self._trainer.has_message() or clock.used() - used >= slice_seconds,
            "patient",
            max_coding_seconds(size_bytes),
            MAX_WAITING_WHEN_BUSY,
        )
        end = began + (clock.used() - used) / (share * clock.processors)
        self._trainer.pause(max(_MIN_PAUSE_SECONDS, end - clock.now()))

    def _run_until(
        self, deltas: ReverseDeltas, stop: Callable[[], bool], pace: Pace, seconds: float, leave: int
    ) -> None:
        end = self._clock.now() + seconds
        deltas.run(lambda: "now" if stop() or self._clock.now() > end else pace, leave=leave)
