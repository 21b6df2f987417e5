"""The saves of one manager on their way: staged, handed to the writer, answered, counted.

Guarantees: what goes wrong here is logged, counted in `stats` and never raised into the training, but for what the program itself has
wrong (`Unsaveable`). A save that fails leaves `changed` set, so that the next boundary knows of something to save. While `guard` is
entered, signals only leave word: nothing of it is entered twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final

from ciuic.repository.claim import Claim
from ciuic.training.costs import Costs
from ciuic.training.filesystem import Asked
from ciuic.training.guard import Guard
from ciuic.training.logs import log, warn_once
from ciuic.training.messages import (
    Begin,
    FromWriter,
    Manifest,
    Measured,
    Note,
    Notice,
    NotSaved,
    Put,
    Saved,
)
from ciuic.training.outcome import EXIT_SECONDS, Save, Stats
from ciuic.training.overlap import Overlap
from ciuic.training.reading import Facts
from ciuic.training.staging import State, stage
from ciuic.training.underway import Underway
from ciuic.training.writer_client import FORKED, WriterClient

POLL_SECONDS: Final = 0.2
_FIRST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 60.0
_PATIENCE: Final = 3.0
"""Times what a snapshot is known to take."""
_ROOM: Final = 1.01
_ROOM_BYTES: Final = 1 << 20
"""For headers and documents beside the tensors."""


class Saver:
    """Not for several threads at once."""

    def __init__(self, begin: Begin, begin_fds: tuple[int, ...] = ()) -> None:
        """``begin``: what the writer is told when it is started, with these descriptors."""
        self.client = WriterClient(begin, begin_fds=begin_fds)
        self.guard = Guard()
        self.stats = Stats()
        self.costs = Costs()
        self.size_bytes = 0
        """Of the state, as far as it is known."""
        self.changed = False
        """Since the last save that was staged, or since one failed."""
        self.noticed: Callable[[Notice], None] = lambda notice: None
        """Called with what a metadata service told the writer."""
        self.saved: Callable[[Saved], None] = lambda saved: None
        """Called with each that is durable."""
        self.overlap = Overlap()
        self.overlap.before_step = self.settle
        self.underway = Underway(self.overlap, self._not_saved)
        self._saves: dict[int, Save] = {}
        self._not_before, self._pause_seconds = 0.0, _FIRST_PAUSE_SECONDS

    @property
    def is_ours(self) -> bool:
        """Whether this process has the writer; in one that was forked from it that is said."""
        if not self.client.is_ours:
            warn_once(FORKED)
        return self.client.is_ours

    @property
    def pauses(self) -> bool:
        """What could not be staged must not be tried again after every step."""
        return time.monotonic() < self._not_before

    @property
    def pending(self) -> int:
        """Saves that were staged, and not answered yet."""
        return self.client.pending + len(self.underway)

    def estimate_seconds(self) -> float | None:
        """Until all would be durable that is not; None where nothing was measured."""
        own = self.costs.write_estimate_seconds(self.size_bytes)
        if own is None or not self.size_bytes:
            return None
        return own * (self.pending + self.changed)

    def prepare(self, state: State) -> None:
        """Makes room for a state of that size, before there is a save to wait for it."""
        self.size_bytes = state.size_bytes
        lanes = {self.overlap.lane_of(leaf.value) for leaves in state.leaves.values() for leaf in leaves}
        prepared = [lane.prepare for lane in lanes if lane is not None]
        self.client.prepare(int(self.size_bytes * _ROOM) + _ROOM_BYTES, prepared)

    def stage(
        self,
        state: State,
        facts: Facts,
        manifest: Manifest,
        *,
        may_wait: bool,
        beside: bool,
        claim: Claim | None = None,
        at_instant: Callable[[Manifest], Asked] | None = None,
    ) -> tuple[Save | None, bool]:
        """Copies the state and hands it over: the save, and whether it was skipped because both arenas are being written.

        ``manifest``: without its files. ``may_wait``: for an arena to become free. ``beside``: what is on a device may still be on its
        way on return, and is handed over when it has arrived (`settle`). ``claim``: becomes the writer's. ``at_instant``: called when it is
        sure that the state will be copied, and before.
        """
        self.size_bytes = state.size_bytes
        begin = partial(
            stage,
            self.client,
            state,
            facts,
            manifest,
            self.overlap,
            beside=beside,
            claim=claim,
            at_instant=at_instant,
        )
        try:
            staged = begin()
            end = time.monotonic() + self._patience_seconds()
            while staged is None and may_wait and self.pending and time.monotonic() < end:
                self.underway.finish(max(0.0, end - time.monotonic()))
                self.hear(POLL_SECONDS)
                staged = begin()
        except OSError as error:
            self.failed(error.strerror or str(error))
            self._pause()
            return None, False
        if staged is None:
            self.stats.skipped += 1
            if (
                self.stats.skipped.bit_count() == 1
            ):  # the first, the second, the fourth: it may go on for days
                log.warning(
                    "ciuic: a snapshot is skipped: the last two are still being written (%d so far)",
                    self.stats.skipped,
                )
            return None, True
        save = self._saves[staged.number] = Save(self, staged.number)
        self.underway.add(staged)
        if not beside:
            self.underway.finish()
        if save.error is not None:
            self._pause()
            return None, False
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        return save, False

    def wait_for_room(self) -> None:
        """Until an arena can be filled, as long as a save that may wait does."""
        end = time.monotonic() + self._patience_seconds()
        while not self.client.can_take and self.pending and time.monotonic() < end:
            self.underway.finish(max(0.0, end - time.monotonic()))
            self.hear(POLL_SECONDS)

    def _patience_seconds(self) -> float:
        """For so long an arena is waited for: a writer that hangs must not hang the training."""
        estimate = self.costs.write_estimate_seconds(self.size_bytes)
        return max(EXIT_SECONDS, _PATIENCE * (estimate or 0.0))

    def _pause(self) -> None:
        self._not_before = time.monotonic() + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)

    def advance(self) -> None:
        """Hands over what has arrived from devices."""
        if self.underway and self.client.is_ours:
            with self.guard:
                self.underway.advance()

    def settle(self) -> None:
        """The program is about to change its weights: from here on that comes after their copy."""
        if self.underway and self.client.is_ours:
            with self.guard:
                self.underway.settle()
                self.underway.advance()

    def stalled(self, seconds: float) -> None:
        """The training stood still so long for a save."""
        self.stats.last_stall_seconds = seconds
        self.stats.stall_seconds += seconds
        self.costs.stalled(seconds)

    def wait(self, timeout_seconds: float, *, number: int | None = None) -> bool:
        """Until everything that was staged is durable (or one save is); whether that came in time."""
        end = time.monotonic() + timeout_seconds
        with self.guard:
            if self.client.is_ours:
                self.underway.finish(timeout_seconds)
            self.client.awaited()
        while self.pending if number is None else number in self._saves:
            left = end - time.monotonic()
            if left <= 0 or not self.client.will_answer:
                return False
            self.client.listen(
                min(left, POLL_SECONDS)
            )  # not under the guard: another thread may save meanwhile
            with self.guard:
                self.hear()
        with self.guard:
            self.hear()
        return True

    def hurry(self) -> None:
        """What was staged is to be durable as soon as that can be."""
        with self.guard:
            self.client.awaited(at_once=True)

    def close(self, timeout_seconds: float) -> None:
        """Waits so long; what is not done by then is finished by the writer all the same."""
        with self.guard:
            if self.client.is_ours:
                self.underway.finish(timeout_seconds)
                self.underway.abandon()
            self._hear(self.client.close(timeout_seconds))

    def hear(self, timeout_seconds: float = 0.0) -> None:
        """What the writer has said since; waits so long for the first of it."""
        self.underway.advance()
        self._hear(self.client.poll(timeout_seconds))

    def _hear(self, said: list[FromWriter]) -> None:
        for message in said:
            if isinstance(message, Saved):
                self.stats.saved += 1
                self.stats.last_id, self.stats.last_write_seconds = message.id, message.seconds
                self.costs.wrote(message.size_bytes, message.seconds - message.waited_seconds)
                if (save := self._saves.pop(message.number, None)) is not None:
                    save.id = message.id
                    save.filesystem = message.pair.id or None if message.pair is not None else None
                self.saved(message)
                log.debug("ciuic: %s is saved, %d bytes new", message.id, message.new_bytes)
            elif isinstance(message, Put):
                self._saves.pop(message.number, None)
            elif isinstance(message, NotSaved):
                self._not_saved(message.number, message.reason)
            elif isinstance(message, Note):
                log.warning("ciuic: %s", message.text)
            elif isinstance(message, Measured):
                self.costs.measured_bytes_per_second = message.bytes_per_second
            elif isinstance(message, Notice):
                self.noticed(message)

    def _not_saved(self, number: int, reason: str) -> None:
        self.failed(reason)
        if (save := self._saves.pop(number, None)) is not None:
            save.error = reason

    def failed(self, reason: str) -> None:
        """Counts and logs it."""
        self.stats.failed += 1
        self.changed = True
        self.stats.last_error = reason
        log.error("ciuic: a snapshot was not saved, earlier ones are as they were: %s", reason)
