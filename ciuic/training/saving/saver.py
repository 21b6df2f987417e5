"""Saves of one manager on their way: staged, copied from devices, handed to the writer, answered, counted, told to callbacks.

Guarantees: failures are logged, counted in `stats` and never raised into the training, except for errors of
the program itself (`Unsaveable`). A failed save leaves `changed` set, so that the next boundary knows of
something to save. While `guard` is entered, signal handlers only leave a flag, so that no method is entered
twice.

The writer gets a state only when all of it has arrived from devices and nothing of it was changed on the way,
and in the order of the saves; otherwise the save fails. Only `PendingSaves.finish` makes the host wait.

Each callback of `SnapshotManager.on_saved` gets each result once, on a thread of its own, in the order in which the
saves ended, and only one call runs at a time. Nothing that a callback raises leaves the thread. No call begins after
`SaveCallbacks.close` has returned.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from ciuic.repository.writing.shared_write_claim import Claim
from ciuic.training.device_copy import Overlap
from ciuic.training.device_streams import capturing
from ciuic.training.format.reading import Facts
from ciuic.training.logs import log, warn_once
from ciuic.training.policy.save_schedule import SaveCosts
from ciuic.training.remote.copies import RemoteCopies
from ciuic.training.results import EXIT_SECONDS, Save, SaveResult, Stats
from ciuic.training.saving.staging import GatheredState, StagedSave, stage
from ciuic.training.writer.client import FORKED, WriterClient
from ciuic.training.writer.messages import (
    Begin,
    FromWriter,
    Manifest,
    Measured,
    Note,
    NotSaved,
    PreemptionNotice,
    Put,
    Saved,
)
from ciuic.training.writer.paired_files import PairRequest

POLL_SECONDS: Final = 0.2
"""Longest pause between two looks at the writer's messages."""
_MIN_BACK_OFF_SECONDS: Final = 1.0
"""First pause after a state could not be staged; doubled with each failure up to `_MAX_BACK_OFF_SECONDS`."""
_MAX_BACK_OFF_SECONDS: Final = 60.0
# Factor of the expected write time after which a save stops waiting for an arena: a writer that hangs must
# not hang the training.
_WAIT_FACTOR: Final = 3.0
_SIZE_MARGIN: Final = 1.01
# Room for headers and documents beside the tensors: the arena is prepared before they are known.
_SIZE_MARGIN_BYTES: Final = 1 << 20


class SaveEvents(Protocol):
    """Events that a `Saver` reports to the rest of its manager."""

    def snapshot_saved(self, message: Saved) -> None:
        """A snapshot is durable."""

    def save_ended(self, result: SaveResult) -> None:
        """A save of this rank's snapshots is durable, or has failed."""

    def preemption_noticed(self, message: PreemptionNotice) -> None:
        """A metadata service told the writer that the machine is going away."""

    def guard_released(self) -> None:
        """Signals may act again: the outermost critical section has ended without an exception."""


class Saver:
    """Staging and tracking of one manager's saves. Only one thread at a time may enter `guard`."""

    def __init__(
        self, begin: Begin, begin_fds: tuple[int, ...], events: SaveEvents, *, overlap: bool = True
    ) -> None:
        """Create the saver; the writer process starts with the first save.

        Args:
            begin: First message to the writer.
            begin_fds: Descriptors that go with it.
            events: Receiver of what the writer reports.
            overlap: Whether device copies may run beside the next training step.
        """
        self.client = WriterClient(begin, begin_fds=begin_fds)
        self.copies = RemoteCopies(begin.repository, begin.uploads)
        self.guard = _Guard(events.guard_released)
        self.stats = Stats()
        self.costs = SaveCosts()
        self.size_bytes = 0
        """Size of the state, as far as it is known."""
        self.changed = False
        """True if the state changed since the last save that was staged, or if one failed since."""
        self.overlap = Overlap(before_step=self.settle, enabled=overlap)
        self._events = events
        self.pending_saves = PendingSaves(self.overlap, self._record_failure)
        self._saves: dict[int, Save] = {}
        self._facts: dict[int, Facts] = {}
        """Facts of the saves whose end is still to be told. Parts for a snapshot of rank 0 have none."""
        self._not_before, self._back_off_seconds = 0.0, _MIN_BACK_OFF_SECONDS

    @property
    def is_ours(self) -> bool:
        """True if this process owns the writer; a forked child is warned once."""
        if not self.client.is_ours:
            warn_once(FORKED)
        return self.client.is_ours

    @property
    def is_backing_off(self) -> bool:
        """True if a state could not be staged so recently that another attempt would be wasted."""
        return time.monotonic() < self._not_before

    @property
    def pending(self) -> int:
        """Number of saves that were staged and not answered."""
        return self.client.pending + len(self.pending_saves)

    def estimate_seconds(self) -> float | None:
        """Estimate the time until all unsaved changes are durable; None if nothing was measured."""
        own = self.costs.write_estimate_seconds(self.size_bytes)
        if own is None or not self.size_bytes:
            return None
        # One write for each pending save, and one for changes that are not staged yet.
        return own * (self.pending + self.changed)

    def prepare(self, state: GatheredState) -> None:
        """Allocate memory for a state of this size before a save waits for it."""
        self.size_bytes = state.size_bytes
        lanes = {
            self.overlap.device_stream_of(leaf.value) for leaves in state.leaves.values() for leaf in leaves
        }
        # Page-locking for devices happens once per arena, on the thread that faults its pages in.
        prepared = [lane.prepare for lane in lanes if lane is not None]
        self.client.prepare(int(self.size_bytes * _SIZE_MARGIN) + _SIZE_MARGIN_BYTES, prepared)

    def stage(
        self,
        state: GatheredState,
        facts: Facts,
        manifest: Manifest,
        *,
        may_wait: bool,
        beside: bool,
        claim: Claim | None = None,
        request_pair: Callable[[Manifest], PairRequest] | None = None,
    ) -> tuple[Save | None, bool]:
        """Copy the state and hand it over to the writer.

        Args:
            state: the gathered state.
            facts: content of `snapshot.json`.
            manifest: manifest without files.
            may_wait: wait for an arena to become free.
            beside: let copies from devices run on after the return; they are handed over when they arrive
                (`settle`).
            claim: claim on the repository; the writer owns it afterwards.
            request_pair: called right before the copy, once it is certain that there will be one.

        Returns:
            The save, or None if it failed; and whether it was skipped because every arena is still being
                written.
        """
        self.size_bytes = state.size_bytes
        joint = manifest.joint_save
        # The end of a sharded save is told by rank 0 alone, whose writer makes the snapshot.
        told = facts if joint is None or joint.rank == 0 else None
        begin = partial(
            stage,
            self.client,
            state,
            facts,
            manifest,
            self.overlap,
            beside=beside,
            claim=claim,
            request_pair=request_pair,
        )
        try:
            staged = begin()
            if may_wait:
                staged = self._stage_when_free(staged, begin)
        except OSError as error:
            # Most often too little memory: attempts after every step would cost the training time.
            reason = error.strerror or str(error)
            self.failed(reason)
            self.tell_failed(told, reason)
            self._back_off()
            return None, False
        if staged is None:
            self._count_skip()
            return None, True
        return self._track(staged, told, beside=beside), False

    def _track(self, staged: StagedSave, told: Facts | None, *, beside: bool) -> Save | None:
        """Follow a staged save to the writer; None if its state did not arrive from the devices."""
        # Registered before `add`, which may report a failure of it at once.
        if told is not None:
            self._facts[staged.number] = told
        save = self._saves[staged.number] = Save(self, staged.number)
        self.pending_saves.add(staged)
        if not beside:
            self.pending_saves.finish()
        # Known at once only where nothing was left to copy from a device.
        if save.error is not None:
            self._back_off()
            return None
        self._back_off_seconds = _MIN_BACK_OFF_SECONDS
        return save

    def _stage_when_free(
        self, staged: StagedSave | None, begin: Callable[[], StagedSave | None]
    ) -> StagedSave | None:
        """Stage again when an arena becomes free; None if that takes too long."""
        end = time.monotonic() + self._max_wait_seconds()
        # Bounded: a writer that hangs must not hang the training.
        while staged is None and self.pending and time.monotonic() < end:
            self.pending_saves.finish(max(0.0, end - time.monotonic()))
            self.hear(POLL_SECONDS)
            staged = begin()
        return staged

    def _count_skip(self) -> None:
        self.stats.skipped += 1
        # Logged for the 1st, 2nd, 4th, 8th ... skip: a writer that is too slow may go on so for days.
        if self.stats.skipped.bit_count() == 1:
            log.warning(
                "ciuic: snapshot skipped: the writer is still storing the last two (%d skipped so far)",
                self.stats.skipped,
            )

    def wait_for_room(self) -> None:
        """Wait for an arena to become free, as long as a save that may wait does."""
        end = time.monotonic() + self._max_wait_seconds()
        while not self.client.can_take and self.pending and time.monotonic() < end:
            self.pending_saves.finish(max(0.0, end - time.monotonic()))
            self.hear(POLL_SECONDS)

    def _max_wait_seconds(self) -> float:
        """Return how long to wait for an arena: a writer that hangs must not hang the training."""
        estimate = self.costs.write_estimate_seconds(self.size_bytes)
        return max(EXIT_SECONDS, _WAIT_FACTOR * (estimate or 0.0))

    def _back_off(self) -> None:
        """Suspend attempts to stage for a while."""
        # 1 s, 2 s, ... 60 s: what could not be staged must not cost every step.
        self._not_before = time.monotonic() + self._back_off_seconds
        self._back_off_seconds = min(2 * self._back_off_seconds, _MAX_BACK_OFF_SECONDS)

    def advance(self) -> None:
        """Hand over the states that have arrived from devices."""
        if self.pending_saves and self.client.is_ours:
            with self.guard:
                self.pending_saves.advance()

    def settle(self) -> None:
        """Order the copies on devices before the program's next change of its weights."""
        if self.pending_saves and self.client.is_ours:
            with self.guard:
                self.pending_saves.settle()
                self.pending_saves.advance()

    def stalled(self, seconds: float) -> None:
        """Record that the training was stopped for a save."""
        self.stats.last_stall_seconds = seconds
        self.stats.stall_seconds += seconds
        self.costs.stalled(seconds)

    def wait(self, timeout_seconds: float, *, number: int | None = None) -> bool:
        """Wait until what was staged is durable, or one save is; return whether it came in time."""
        end = time.monotonic() + timeout_seconds
        with self.guard:
            if self.client.is_ours:
                self.pending_saves.finish(timeout_seconds)
                # The training stands still from here on: codecs may use its processors.
                self.client.awaited()
        while self.pending if number is None else number in self._saves:
            left = end - time.monotonic()
            if left <= 0 or not self.client.will_answer:
                return False
            # Waits outside of the guard: another thread may save meanwhile.
            self.client.listen(min(left, POLL_SECONDS))
            with self.guard:
                self.hear()
        with self.guard:
            self.hear()
        return True

    def wait_remote(self, id_: str, timeout_seconds: float) -> bool:
        """Wait until every remote has stored a snapshot; return whether that came in time.

        Raises:
            ValueError: There is no remote.
        """
        if not self.copies.orders:
            raise ValueError("the manager has no remote to wait for: pass remote= or a URL as save_dir")
        return self.copies.wait(id_, timeout_seconds)

    def hurry(self) -> None:
        """Tell the writer that only durability counts for what was staged: the process is about to end."""
        with self.guard:
            self.client.awaited(at_once=True)

    def close(self, timeout_seconds: float, *, failed: bool) -> None:
        """Wait for pending saves and close the connection; the writer finishes the rest by itself.

        Args:
            timeout_seconds: longest wait.
            failed: True if the program ends by an error.
        """
        with self.guard:
            if self.client.is_ours:
                self.pending_saves.finish(timeout_seconds)
                # The arenas of what has not arrived stay: a device may still write to them.
                self.pending_saves.abandon()
            self._hear(self.client.close(timeout_seconds, failed=failed))

    def hear(self, timeout_seconds: float = 0.0) -> None:
        """Handle the writer's messages, waiting up to `timeout_seconds` for the first one."""
        self.pending_saves.advance()
        self._hear(self.client.poll(timeout_seconds))

    def _hear(self, messages: list[FromWriter]) -> None:
        for message in messages:
            if isinstance(message, Saved):
                self.stats.saved += 1
                self.stats.last_id, self.stats.last_write_seconds = message.id, message.seconds
                # Waiting for codecs is left out of the estimate: a save in a hurry does not wait for them.
                self.costs.wrote(message.size_bytes, message.seconds - message.waited_seconds)
                if (save := self._saves.pop(message.number, None)) is not None:
                    save.id = message.id
                    save.filesystem = message.pair.id or None if message.pair is not None else None
                self._events.snapshot_saved(message)
                if (facts := self._facts.pop(message.number, None)) is not None:
                    self._events.save_ended(SaveResult.of(facts, id_=message.id))
                log.debug("ciuic: saved %s, %d new bytes", message.id, message.new_bytes)
            # A part of a snapshot that another rank's writer makes: nothing to count here.
            elif isinstance(message, Put):
                self._saves.pop(message.number, None)
            elif isinstance(message, NotSaved):
                self._record_failure(message.number, message.reason)
            elif isinstance(message, Note):
                log.warning("ciuic: %s", message.text)
            elif isinstance(message, Measured):
                self.costs.measured_bytes_per_second = message.bytes_per_second
            elif isinstance(message, PreemptionNotice):
                self._events.preemption_noticed(message)

    def _record_failure(self, number: int, reason: str) -> None:
        self.failed(reason)
        if (save := self._saves.pop(number, None)) is not None:
            save.error = reason
        # A save that was interrupted is reported twice: by the hand-over and by the client.
        self.tell_failed(self._facts.pop(number, None), reason)

    def tell_failed(self, facts: Facts | None, reason: str) -> None:
        """Tell the manager that the save with these facts failed; None: a save that another rank tells of."""
        if facts is not None:
            self._events.save_ended(SaveResult.of(facts, error=reason))

    def failed(self, reason: str) -> None:
        """Count and log a failed save."""
        self.stats.failed += 1
        # The state of this boundary is not saved: the next boundary tries again.
        self.changed = True
        self.stats.last_error = reason
        log.error("ciuic: snapshot failed; earlier snapshots are unaffected: %s", reason)


# Pause between two looks at a device while `finish` has a deadline: no device offers a wait with one.
_DEVICE_POLL_SECONDS: Final = 0.001


class PendingSaves:
    """Queue of staged saves, oldest first."""

    def __init__(self, overlap: Overlap, failed: Callable[[int, str], None]) -> None:
        """Create an empty queue.

        Args:
            overlap: record of the tensors that may be copied beside the training.
            failed: called with the number of a save that failed, and the reason.
        """
        self.changed = False
        """True if a state was given up because the program changed it during the copy; reset by the caller.
        """
        self._overlap = overlap
        self._failed = failed
        self._staged: deque[StagedSave] = deque()
        self._busy = False

    def __len__(self) -> int:
        """Return the number of saves in the queue."""
        return len(self._staged)

    def add(self, staged: StagedSave) -> None:
        """Append a save, and hand over what has arrived."""
        self._staged.append(staged)
        self.advance()

    def settle(self) -> None:
        """Make devices order all copies before whatever the program does next."""
        for staged in list(self._staged):
            if staged.copying is not None:
                staged.copying.settle()

    def advance(self) -> None:
        """Hand over the states that have arrived.

        Called again from within itself, by a signal handler of the program that saves, it does nothing: the
        outer call goes on.
        """
        # No thread waits for events of devices. It would share the client, signal handlers and the
        # interpreter lock with the training; whatever the program calls next looks instead
        # (docs/decisions/beside-the-next-step.md).
        if self._busy:
            return
        self._busy = True
        try:
            # Querying an event while a CUDA graph is recorded would invalidate the recording.
            while self._staged and not capturing():
                problem = self._arrival_problem(self._staged[0])
                if problem is None:
                    return
                self._hand_over(self._staged.popleft(), problem)
        finally:
            self._busy = False

    def _arrival_problem(self, staged: StagedSave) -> str | None:
        """Return what is wrong with a state that has arrived, or ""; None if it has not arrived."""
        copying = staged.copying
        if copying is None:
            return ""
        try:
            if not copying.done():
                return None
            if changed := copying.changed():
                # From now on the device waits for what changes so: a state that is half changed would load
                # without an error.
                self._overlap.distrust(changed)
                self.changed = True
            return copying.void
        except RuntimeError as error:
            return f"the device has failed: {error}"

    def _hand_over(self, staged: StagedSave, problem: str) -> None:
        """Hand the save over, or give it up if there is a problem."""
        handed_over = False
        try:
            if not problem:
                staged.hand_over()
                handed_over = True
        except OSError as error:
            problem = error.strerror or str(error)
        finally:
            # Also after a KeyboardInterrupt: the arena must be free for later saves.
            if not handed_over:
                staged.give_up()
                self._failed(staged.number, problem or "interrupted while it was handed over")

    def finish(self, timeout_seconds: float | None = None) -> bool:
        """Wait for all states and hand them over; return whether they came in time.

        Returns False at once where it may not wait: within `advance`, and while a CUDA graph is recorded.

        Args:
            timeout_seconds: time to wait; None for no limit.
        """
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while self._staged:
            # Waiting for a device would invalidate a CUDA graph that is being recorded.
            if self._busy or capturing():
                return False
            self.settle()
            self.advance()
            if not self._staged:
                break
            if end is not None:
                if time.monotonic() >= end:
                    return False
                time.sleep(_DEVICE_POLL_SECONDS)
            elif (copying := self._staged[0].copying) is not None:
                try:
                    copying.wait()
                except RuntimeError:
                    continue  # `advance` meets the same error and reports it
        return True

    def abandon(self) -> None:
        """Fail what has not arrived. Its arenas stay reserved: a device may still write to them."""
        while self._staged:
            self._failed(self._staged.popleft().number, "its copy from the device did not end in time")


class _Guard:
    """Reentrant critical section: other threads wait for its end, signal handlers defer their work to it.

    It is reentrant because a handler of the program's own may save in the middle of another save.
    """

    def __init__(self, released: Callable[[], None]) -> None:
        """Create a guard that nobody holds.

        Args:
            released: Called after the outermost section has ended without an exception.
        """
        self.depth = 0
        self._released = released
        self._lock = threading.RLock()
        self._pid = os.getpid()

    def __enter__(self) -> None:
        """Enter the section."""
        # A child that was forked inside of the section has a lock that no thread of it will ever release.
        if self._pid != os.getpid():
            self._lock, self._pid, self.depth = threading.RLock(), os.getpid(), 0
        self._lock.acquire()
        self.depth += 1

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Leave the section."""
        self.depth -= 1
        self._lock.release()
        # Not while an exception is on its way out: what was deferred may raise SystemExit in its place.
        if not self.depth and error is None:
            self._released()


SaveCallback = Callable[[SaveResult], object]


class SaveCallbacks:
    """Callbacks of one manager, and the thread that calls them."""

    def __init__(self) -> None:
        """Create it without a callback; the thread starts with the first one."""
        self._callbacks: tuple[SaveCallback, ...] = ()
        # Not queue.Queue, whose put() a signal handler must not enter while it is interrupted in one: a
        # handler of the program may save, and hears of earlier saves then.
        self._results: queue.SimpleQueue[SaveResult | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._pid = os.getpid()

    def add(self, callback: SaveCallback) -> None:
        """Call this one too, with the results that come from now on.

        Raises:
            TypeError: It cannot be called.
        """
        if not callable(callback):
            raise TypeError(f"on_saved must get a function, got {callback!r}")
        self._callbacks = (*self._callbacks, callback)
        if self._thread is None:
            # A daemon thread: a callback that hangs must not keep the interpreter from ending.
            self._thread = threading.Thread(target=self._run, name="ciuic-on-saved", daemon=True)
            self._thread.start()

    def notify(self, result: SaveResult) -> None:
        """Queue a result for the callbacks; costs the caller one append."""
        if self._callbacks:
            self._results.put(result)

    def close(self, timeout_seconds: float) -> None:
        """Wait for calls that are due, at most so long, and begin no other.

        Called by a callback, it does not wait.
        """
        # A forked child has no such thread.
        if self._thread is not None and self._pid == os.getpid():
            self._results.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join(timeout_seconds)
                if self._thread.is_alive():
                    log.warning("ciuic: a callback of on_saved is still running; no other is called")
        self._closed.set()

    def _run(self) -> None:
        while (result := self._results.get()) is not None:
            for callback in self._callbacks:
                if self._closed.is_set():
                    return
                try:
                    callback(result)
                # Everything: SystemExit would end this thread, and later results would be lost in silence.
                except BaseException:
                    log.exception("ciuic: a callback of on_saved failed; the training is unaffected")
