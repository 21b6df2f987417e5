"""One save on its way from the gathered state to its end: stage -> submit -> outcome.

=======  =====================================================================================================
stage    the state is copied at one instant into an arena, from devices perhaps beside the next step: all of
         what a save costs the training
submit   an arena whose copies have arrived goes to the writer (`writer.client`), in the order of the saves
outcome  how the save ended, for counts, the log, the program's `Save` and its callbacks
=======  =====================================================================================================

Guarantees: failures are logged, counted in `stats` and never raised into the training, except for errors of the
program itself (`Unsaveable`), which a call of the program raises and never a step. A failed save leaves `changed` set, so that the next boundary knows of something to
save. While the `CriticalSection` is entered, signal handlers only leave a flag, so that no method is entered twice.

The writer gets a state only when all of it has arrived from devices and nothing of it was changed on the way, and in
the order of the saves; otherwise the save fails. Only a save that may wait, `wait` and `close` make the host wait.

The layout of an arena is kept as long as names, shapes and dtypes stay, so that a save is one copy of each tensor
and little else. The arena holds the files of the snapshot as they will be restored: safetensors, `state.json`,
`snapshot.json`.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from enum import Enum
from typing import Any, Final, NamedTuple

import msgspec

from ciuic.repository.locks import Claim
from ciuic.training.device_copy import AsyncCopy, DeviceTensor, Overlap, capturing, device_stream_of
from ciuic.training.format.layout import Layout, lay_out
from ciuic.training.format.reading import FACTS_FILE, STATE_FILE, Facts, encode_facts
from ciuic.training.format.structure import Leaf
from ciuic.training.format.tensors import Array, ArrayBuffer, Unsaveable, outside_inference_mode
from ciuic.training.logs import log, warn_once
from ciuic.training.remote.copies import RemoteCopies
from ciuic.training.results import EXIT_SECONDS, Save, SaveCallbacks, SaveResult, Stats
from ciuic.training.save_schedule import SaveCosts
from ciuic.training.writer.client import FORKED, Slot, WriterClient, manifest_files
from ciuic.training.writer.messages import (
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
# Pause between two looks at a device while there is a deadline: no device offers a wait with one.
_DEVICE_POLL_SECONDS: Final = 0.001
_MIN_BACK_OFF_SECONDS: Final = 1.0
"""First pause after a state could not be staged; doubled with each failure up to `_MAX_BACK_OFF_SECONDS`."""
_MAX_BACK_OFF_SECONDS: Final = 60.0
# Factor of the expected write time after which a save stops waiting for an arena: a writer that hangs must
# not hang the training.
_WAIT_FACTOR: Final = 3.0
_SIZE_MARGIN: Final = 1.01
# Room for headers and documents beside the tensors: the arena is prepared before they are known.
_SIZE_MARGIN_BYTES: Final = 1 << 20


class GatheredState(NamedTuple):
    """Everything of this rank that is saved at once. Tensors still belong to the trainer."""

    leaves: dict[str, list[Leaf]]
    document: bytes
    """Content of `state.json`; empty if another rank stores it."""
    part: str = ""
    """Suffix of this rank's files whose names other ranks use too."""

    @property
    def size_bytes(self) -> int:
        """Size of all tensors."""
        return sum(leaf.array.size_bytes for leaves in self.leaves.values() for leaf in leaves)


class NotStaged(Enum):
    """Why there is no save."""

    SKIPPED = "every arena is still being written"
    FAILED = "the state could not be copied, or not be handed over; its outcome was recorded"


class _UnderWay(NamedTuple):
    """A save that was staged and whose end is not known."""

    save: Save
    facts: Facts | None
    """Facts to tell callbacks; None for a part of a snapshot of which rank 0 tells."""


class SavePipeline:
    """Saves of one manager from the gathered state to their outcome. Only one thread at a time may enter `guard`."""

    def __init__(
        self,
        client: WriterClient,
        guard: CriticalSection,
        callbacks: SaveCallbacks,
        copies: RemoteCopies,
        noticed: Callable[[PreemptionNotice], None],
        *,
        save_ended: Callable[[str], None] = lambda error: None,
        busy: Callable[[], AbstractContextManager[None]] = nullcontext,
        overlap: bool = True,
    ) -> None:
        """Create the pipeline; the writer process starts with the first save.

        Args:
            client: connection to the writer.
            guard: critical section of the manager.
            callbacks: told of each save that ends.
            copies: copies of snapshots on remotes.
            noticed: called with the notice of a metadata service that the writer passed on.
            save_ended: called at the end of each save with the reason of its failure, or "".
            busy: entered while the training stands still for a copy or for the writer.
            overlap: whether device copies may run beside the next training step.
        """
        self.client = client
        self.guard = guard
        self.callbacks = callbacks
        self.copies = copies
        self.stats = Stats()
        self.costs = SaveCosts()
        self.overlap = Overlap(device_stream_of, before_step=self.settle, enabled=overlap)
        self._noticed = noticed
        self._save_ended = save_ended
        self._busy = busy
        self._size_bytes = 0
        self._changed = False
        self._has_void_copy = False
        self._staged: deque[StagedSave] = deque()
        """Saves that have not been submitted, oldest first."""
        self._submitting = False
        self._under_way: dict[int, _UnderWay] = {}
        """Saves by number, from staging to their outcome."""
        self._warned_of_pairs: set[str] = set()
        self._not_before, self._back_off_seconds = 0.0, _MIN_BACK_OFF_SECONDS
        self._ungathered = 0
        """Automatic saves in a row for which the state could not be gathered."""
        self._refusal: Exception | None = None

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
        return self.client.pending + len(self._staged)

    @property
    def size_bytes(self) -> int:
        """Size of the state, as far as it is known."""
        return self._size_bytes

    @property
    def changed(self) -> bool:
        """True if the state changed since the last save that was staged, or if one failed since."""
        return self._changed

    def state_changed(self) -> None:
        """Record that there is something to save."""
        self._changed = True

    def state_saved(self) -> None:
        """Record that the present state is staged, or was loaded."""
        self._changed = False
        self._ungathered, self._refusal = 0, None

    def pop_void_copy(self) -> bool:
        """Return whether a state was given up since the last call because the program changed it under its copy."""
        found, self._has_void_copy = self._has_void_copy, False
        return found

    def estimate_seconds(self) -> float | None:
        """Estimate the time until all unsaved changes are durable; None if nothing was measured."""
        own = self.costs.write_estimate_seconds(self._size_bytes)
        if own is None or not self._size_bytes:
            return None
        # One write for each pending save, and one for changes that are not staged yet.
        return own * (self.pending + self._changed)

    def stalled(self, seconds: float) -> None:
        """Record that the training was stopped for a save."""
        self.stats.last_stall_seconds = seconds
        self.stats.stall_seconds += seconds
        self.costs.stalled(seconds)

    def prepare(self, state: GatheredState) -> None:
        """Allocate memory for a state of this size before a save waits for it."""
        self._size_bytes = state.size_bytes
        lanes = {
            self.overlap.device_stream_of(leaf.value) for leaves in state.leaves.values() for leaf in leaves
        }
        # Page-locking for devices happens once per arena, on the thread that faults its pages in.
        prepared = [lane.prepare for lane in lanes if lane is not None]
        with self._busy():
            self.client.prepare(int(self._size_bytes * _SIZE_MARGIN) + _SIZE_MARGIN_BYTES, prepared)

    # -- stage

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
    ) -> Save | NotStaged:
        """Copy the state, and submit it to the writer once all of it has arrived from devices.

        Args:
            state: the gathered state.
            facts: content of `snapshot.json`.
            manifest: manifest without files.
            may_wait: wait for an arena to become free.
            beside: let copies from devices run on after the return; they are submitted when they arrive
                (`settle`).
            claim: claim on the repository; the writer owns it afterwards.
            request_pair: called right before the copy, once it is certain that there will be one.
        """
        self._size_bytes = state.size_bytes
        joint = manifest.joint_save
        # The end of a sharded save is told by rank 0 alone, whatever other directories have.
        told = facts if joint is None or joint.rank == 0 else None
        end = time.monotonic() + self._max_wait_seconds()
        try:
            with self._busy():
                while True:
                    staged = self._copy_to_arena(
                        state, facts, manifest, beside=beside, claim=claim, request_pair=request_pair
                    )
                    if staged is not None or not may_wait or not self._wait_for_answer(end):
                        break
        except OSError as error:
            # Most often too little memory: attempts after every step would cost the training time.
            self.outcome(error.strerror or str(error), facts=told)
            self._back_off()
            return NotStaged.FAILED
        if staged is None:
            self.count_skip()
            return NotStaged.SKIPPED
        save = Save(self, staged.number)
        # Before it is submitted, which may fail at once.
        self._under_way[staged.number] = _UnderWay(save, told)
        self._staged.append(staged)
        self._submit_arrived()
        if not beside:
            self._finish()
        # Known at once only where nothing was left to copy from a device.
        if save.error is not None:
            self._back_off()
            return NotStaged.FAILED
        self._back_off_seconds = _MIN_BACK_OFF_SECONDS
        return save

    def _copy_to_arena(
        self,
        state: GatheredState,
        facts: Facts,
        manifest: Manifest,
        *,
        beside: bool,
        claim: Claim | None = None,
        request_pair: Callable[[Manifest], PairRequest] | None = None,
    ) -> StagedSave | None:
        """Copy the state into an arena; None while there is no free one. OSError: ENOMEM, or EIO if the device fails."""
        client, overlap = self.client, self.overlap
        plan = _plan_arena(client, state, facts, manifest)
        slot = client.reserve(plan.size_bytes)
        if slot is None:
            return None
        copying = pair_request = None
        try:
            # Before the copy: the cut of the files follows 6 ms later in the median, while the state is still
            # being copied.
            pair_request = None if request_pair is None else request_pair(plan.manifest)
            assert slot.arena is not None
            with outside_inference_mode():
                items, on_host = _split_by_device(state, _places(slot, plan), overlap)
                copying = AsyncCopy(slot.arena, items, overlap, beside=beside) if items else None
                # Filled while devices copy by themselves.
                for place, value in on_host:
                    place.fill(value)
            plan.tail.write_fixed(slot.arena.memory)
            return StagedSave(
                client.next_number(),
                slot,
                plan.manifest,
                plan.tail.end,
                # A state without its document belongs to a snapshot that another rank's writer makes.
                bool(state.document),
                copying,
                claim,
                pair_request,
            )
        # BaseException: a signal handler of the program may raise in the middle of the copy.
        except BaseException as error:
            _undo_staging(client, slot, copying, pair_request)
            # torch reports the failure of a device as a RuntimeError.
            if isinstance(error, RuntimeError):
                raise OSError(errno.EIO, f"copying the state from its device failed: {error}") from None
            raise

    def wait_for_arena(self) -> None:
        """Wait for an arena to become free, as long as a save that may wait does."""
        end = time.monotonic() + self._max_wait_seconds()
        with self._busy():
            while not self.client.can_take and self._wait_for_answer(end):
                pass

    def _wait_for_answer(self, end: float) -> bool:
        """Wait a moment for the writer to return an arena; False if none will come, or not in time."""
        # Bounded: a writer that hangs must not hang the training.
        left = end - time.monotonic()
        if not self.pending or left <= 0:
            return False
        self._finish(left)
        self.process_messages(POLL_SECONDS)
        return True

    def _max_wait_seconds(self) -> float:
        """Return how long to wait for an arena: a writer that hangs must not hang the training."""
        estimate = self.costs.write_estimate_seconds(self._size_bytes)
        return max(EXIT_SECONDS, _WAIT_FACTOR * (estimate or 0.0))

    def _back_off(self) -> None:
        """Suspend attempts to stage for a while."""
        # 1 s, 2 s, ... 60 s: what could not be staged must not cost every step.
        self._not_before = time.monotonic() + self._back_off_seconds
        self._back_off_seconds = min(2 * self._back_off_seconds, _MAX_BACK_OFF_SECONDS)

    def count_skip(self, *, is_logged: bool = False) -> None:
        """Count a save that was skipped because the writer is busy.

        Args:
            is_logged: True if the log has it already.
        """
        self.stats.skipped += 1
        # Logged for the 1st, 2nd, 4th, 8th ... skip: a writer that is too slow may go on so for days.
        if not is_logged and self.stats.skipped.bit_count() == 1:
            log.warning(
                "ciuic: snapshot skipped: the writer is still storing the last %d (%d skipped so far)",
                self.pending,
                self.stats.skipped,
            )

    # -- submit

    def advance(self) -> None:
        """Submit the states that have arrived from devices."""
        if self._staged and self.client.is_ours:
            with self.guard:
                self._submit_arrived()

    def settle(self) -> None:
        """Order the copies on devices before the program's next change of its weights."""
        if self._staged and self.client.is_ours:
            with self.guard:
                self._settle_copies()
                self._submit_arrived()

    def _settle_copies(self) -> None:
        """Make devices order all copies before whatever the program does next."""
        for staged in list(self._staged):
            if staged.copying is not None:
                staged.copying.settle()

    def _submit_arrived(self) -> None:
        """Submit the states that have arrived, oldest first.

        Called again from within itself, by a signal handler of the program that saves, it does nothing: the
        outer call goes on.
        """
        # No thread waits for events of devices. It would share the client, signal handlers and the
        # interpreter lock with the training; whatever the program calls next looks instead
        # (docs/decisions/beside-the-next-step.md).
        if self._submitting:
            return
        self._submitting = True
        try:
            # Querying an event while a CUDA graph is recorded would invalidate the recording.
            while self._staged and not capturing():
                problem = self._arrival_problem(self._staged[0])
                if problem is None:
                    return
                self._submit(self._staged.popleft(), problem)
        finally:
            self._submitting = False

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
                self.overlap.distrust(changed)
                self._has_void_copy = True
            return copying.void
        except RuntimeError as error:
            return f"the device has failed: {error}"

    def _submit(self, staged: StagedSave, problem: str) -> None:
        """Submit the save to the writer, or give it up if there is a problem."""
        submitted = False
        try:
            if not problem:
                self.client.submit(
                    staged.slot,
                    staged.manifest,
                    staged.manifest_offset,
                    commit=staged.commit,
                    claim=staged.claim,
                    pair_request=staged.pair_request,
                    number=staged.number,
                )
                submitted = True
        except OSError as error:
            problem = error.strerror or str(error)
        finally:
            # Also after a KeyboardInterrupt: the arena must be free for later saves.
            if not submitted:
                self.client.release(staged.slot)
            # The writer has a descriptor of the connection by now, or does not need it.
            if staged.pair_request is not None:
                staged.pair_request.close()
            if not submitted:
                self.outcome(problem or "interrupted while it was handed over", number=staged.number)

    def _finish(self, timeout_seconds: float | None = None) -> bool:
        """Wait for all states and submit them; return whether they came in time.

        Returns False at once where it may not wait: within `_submit_arrived`, and while a CUDA graph is recorded.

        Args:
            timeout_seconds: time to wait; None for no limit.
        """
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while self._staged:
            # Waiting for a device would invalidate a CUDA graph that is being recorded.
            if self._submitting or capturing():
                return False
            self._settle_copies()
            self._submit_arrived()
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
                    continue  # `_submit_arrived` meets the same error and reports it
        return True

    # -- outcome

    def process_messages(self, timeout_seconds: float = 0.0) -> None:
        """Handle the writer's messages, waiting up to `timeout_seconds` for the first one."""
        self._submit_arrived()
        self._handle(self.client.poll(timeout_seconds))

    def _handle(self, messages: list[FromWriter]) -> None:
        for message in messages:
            if isinstance(message, (Saved, Put)):
                self.outcome(message, number=message.number)
            elif isinstance(message, NotSaved):
                self.outcome(message.reason, number=message.number)
            elif isinstance(message, Note):
                log.warning("ciuic: %s", message.text)
            elif isinstance(message, Measured):
                self.costs.measured_bytes_per_second = message.bytes_per_second
            elif isinstance(message, PreemptionNotice):
                self._noticed(message)

    def not_gathered(self, error: Exception) -> None:
        """Count and log an automatic save for which the state could not be gathered; the program's next call raises why.

        At once if the state has what cannot be stored, otherwise at the second time in a row.
        """
        reason = str(error) or type(error).__name__
        self.stats.failed += 1
        self._save_ended(reason)
        self._changed = True
        self.log_not_gathered(reason)
        self._back_off()
        self._ungathered += 1
        if isinstance(error, Unsaveable) or self._ungathered > 1:
            # Without its frames, which would keep tensors alive.
            self._refusal = error.with_traceback(None)

    def log_not_gathered(self, reason: str) -> None:
        """Log why the state cannot be gathered, once until there is another reason."""
        if reason != self.stats.last_error:
            self.stats.last_error = reason
            log.error("ciuic: a snapshot could not be taken; earlier snapshots are unaffected: %s", reason)

    def raise_refusal(self) -> None:
        """Raise once what kept automatic saves from being taken (`not_gathered`), if none was taken since.

        Raises:
            TypeError: The state has a value that cannot be stored.
            Exception: Whatever the program's objects have raised.
        """
        error, self._refusal = self._refusal, None
        if error is not None:
            raise error

    def outcome(self, end: Saved | Put | str, *, number: int = 0, facts: Facts | None = None) -> None:
        """Record how a save ended: count and log it, note it in the program's `Save`, tell the callbacks.

        Args:
            end: answer of the writer, or the reason of a failure.
            number: number of the save; 0: it failed before it was staged.
            facts: what callbacks are told of a save that failed before it was staged; None: nothing.
        """
        if isinstance(end, Saved):
            self.stats.saved += 1
            self.stats.last_id, self.stats.last_write_seconds = end.id, end.seconds
            # Waiting for codecs is left out of the estimate: a save in a hurry does not wait for them.
            self.costs.wrote(end.size_bytes, end.seconds - end.waited_seconds)
        elif isinstance(end, str):
            self.stats.failed += 1
            # The state of this boundary is not saved: the next boundary tries again.
            self._changed = True
            self.stats.last_error = end
            log.error("ciuic: snapshot failed; earlier snapshots are unaffected: %s", end)
        # A save that was interrupted is reported twice: by the hand-over and by the client.
        known = self._under_way.pop(number, None)
        if known is not None or not number:
            self._save_ended(end if isinstance(end, str) else "")
        if known is not None:
            facts = known.facts
            if isinstance(end, Saved):
                known.save.id = end.id
                known.save.filesystem = end.pair.id or None if end.pair is not None else None
            elif isinstance(end, str):
                known.save.error = end
        if isinstance(end, Saved):
            self._count_pair(end)
        # A part of a snapshot that another rank's writer makes: nothing to tell here.
        if facts is not None and not isinstance(end, Put):
            self.callbacks.notify(
                SaveResult.failed(facts, end)
                if isinstance(end, str)
                else SaveResult.saved(
                    facts,
                    end.id,
                    size_bytes=end.size_bytes,
                    new_bytes=end.new_bytes,
                    write_seconds=end.seconds,
                )
            )
        if isinstance(end, Saved):
            log.debug("ciuic: saved %s, %d new bytes", end.id, end.new_bytes)

    def _count_pair(self, saved: Saved) -> None:
        """Count and log the snapshot of the files that was asked for together with this one."""
        if saved.pair is None:
            return
        self.stats.last_filesystem_id, self.stats.last_filesystem_error = saved.pair.id, saved.pair.problem
        if saved.pair.id:
            self.stats.filesystem += 1
        else:
            self.stats.filesystem_failed += 1
            self._warn_of_pair(
                f"no snapshot of the files was made with {saved.id}: {saved.pair.problem}", saved.pair.problem
            )
        if saved.pair_note:
            self._warn_of_pair(saved.pair_note, saved.pair_note)

    def _warn_of_pair(self, text: str, key: str) -> None:
        """Log a refusal once, until another one comes."""
        if key not in self._warned_of_pairs:
            self._warned_of_pairs.add(key)
            log.warning("ciuic: %s", text)

    # -- waiting and end

    def wait(self, timeout_seconds: float, *, number: int | None = None) -> bool:
        """Wait until what was staged is durable, or one save is; return whether it came in time."""
        with self._busy():
            return self._wait(timeout_seconds, number)

    def _wait(self, timeout_seconds: float, number: int | None) -> bool:
        end = time.monotonic() + timeout_seconds
        with self.guard:
            if self.client.is_ours:
                self._finish(timeout_seconds)
                # The training stands still from here on: codecs may use its processors.
                self.client.awaited()
        while True:
            with self.guard:
                self.process_messages()
            if not (self.pending if number is None else number in self._under_way):
                return True
            left = end - time.monotonic()
            if left <= 0 or not self.client.will_answer:
                return False
            # Waits outside of the guard: another thread may save meanwhile.
            self.client.listen(min(left, POLL_SECONDS))

    def wait_remote(self, id_: str, timeout_seconds: float) -> bool:
        """Wait until every remote has stored a snapshot; return whether that came in time.

        Raises:
            ValueError: There is no remote.
        """
        if not self.copies.orders:
            raise ValueError("the manager has no remote to wait for: pass remote= or a URL as save_dir")
        with self._busy():
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
                self._finish(timeout_seconds)
                # The arenas of what has not arrived stay reserved: a device may still write to them.
                while self._staged:
                    number = self._staged.popleft().number
                    self.outcome("its copy from the device did not end in time", number=number)
            self._handle(self.client.close(timeout_seconds, failed=failed))


class CriticalSection:
    """Reentrant critical section: other threads wait for its end, signal handlers defer their work to it.

    It is reentrant because a handler of the program's own may save in the middle of another save.
    """

    def __init__(self, released: Callable[[], None]) -> None:
        """Create a section that nobody is in.

        Args:
            released: Called after the outermost section has ended without an exception.
        """
        self.depth = 0
        self._released = released
        self._lock = threading.RLock()
        self._pid = os.getpid()

    def __enter__(self) -> None:
        # A child that was forked inside of the section has a lock that no thread of it will ever release.
        if self._pid != os.getpid():
            self._lock, self._pid, self.depth = threading.RLock(), os.getpid(), 0
        self._lock.acquire()
        self.depth += 1

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.depth -= 1
        self._lock.release()
        # Not while an exception is on its way out: what was deferred may raise SystemExit in its place.
        if not self.depth and error is None:
            self._released()


_Signature = tuple[tuple[str, tuple[tuple[str, Array], ...]], ...]
"""Names, shapes and dtypes of a state, for which a layout is valid."""


class _SlotLayout(NamedTuple):
    """Layout that an arena was filled with, and the buffers of its tensors."""

    signature: _Signature
    layout: Layout
    places: list[ArrayBuffer]


class StagedSave(NamedTuple):
    """State that is in an arena, or on its way there from devices: what the writer will get."""

    number: int
    """Number of the save. Taken before the hand-over: the save is known by it while devices still copy."""
    slot: Slot
    manifest: Manifest
    manifest_offset: int
    """Offset in the arena with room for the encoded manifest."""
    commit: bool
    """True if the writer makes a snapshot of this arena; False if another rank's writer does."""
    copying: AsyncCopy | None
    """Copies from devices; None if all of the state is in the arena."""
    claim: Claim | None
    pair_request: PairRequest | None


def _undo_staging(
    client: WriterClient, slot: Slot, copying: AsyncCopy | None, pair_request: PairRequest | None
) -> None:
    """Free the arena of a state that could not be staged."""
    if pair_request is not None:
        pair_request.close()
    if copying is not None:
        # The arena will be used again: no device may still be writing to it.
        with suppress(RuntimeError):
            copying.wait()
    client.release(slot)


def _split_by_device(
    state: GatheredState, places: list[ArrayBuffer], overlap: Overlap
) -> tuple[list[DeviceTensor], list[tuple[ArrayBuffer, Any]]]:
    """Return the tensors on devices and those on the host, each with its place in the arena."""
    items: list[DeviceTensor] = []
    on_host: list[tuple[ArrayBuffer, Any]] = []
    leaves = [(name, leaf) for name, of_one in state.leaves.items() for leaf in of_one]
    for place, (name, leaf) in zip(places, leaves, strict=True):
        # Empty tensors need no copy from a device.
        if leaf.array.size_bytes and overlap.device_stream_of(leaf.value) is not None:
            items.append(DeviceTensor(f"{name}.{leaf.name}", place, leaf.value, leaf.array.size_bytes))
        else:
            on_host.append((place, leaf.value))
    return items, on_host


class _ArenaPlan(NamedTuple):
    """Contents of an arena, known before one is reserved."""

    signature: _Signature
    layout: Layout
    """Layout of the tensors."""
    tail: Layout
    """Documents behind the tensors, whose sizes change from save to save."""
    manifest: Manifest
    """Manifest with all files."""

    @property
    def size_bytes(self) -> int:
        """Size that the arena must have: the manifest is written to it too, behind all files."""
        return self.tail.end + len(msgspec.msgpack.encode(self.manifest))


def _plan_arena(client: WriterClient, state: GatheredState, facts: Facts, manifest: Manifest) -> _ArenaPlan:
    """Lay out the files of a state and complete its manifest with them."""
    signature = tuple(
        (name, tuple((leaf.name, leaf.array) for leaf in leaves)) for name, leaves in state.leaves.items()
    )
    # Equal signatures mean equal headers and offsets.
    layout = _layout_for(client, signature, state)
    tail = Layout(layout.end)
    if state.document:
        tail.add_file(STATE_FILE, state.document)
        tail.add_file(FACTS_FILE, encode_facts(facts))
    manifest = msgspec.structs.replace(manifest, files=manifest_files((*layout.files, *tail.files)))
    return _ArenaPlan(signature, layout, tail, manifest)


def _layout_for(client: WriterClient, signature: _Signature, state: GatheredState) -> Layout:
    """Return the layout of a state, from an arena that has it already if there is one."""
    for slot in client.slots:
        # The layout of an unchanged signature is kept, headers in the arena included: a save then is one copy
        # per tensor.
        if isinstance(slot.layout, _SlotLayout) and slot.layout.signature == signature:
            return slot.layout.layout
    return lay_out(state.leaves, state.part)


def _places(slot: Slot, plan: _ArenaPlan) -> list[ArrayBuffer]:
    """Return the buffers of the tensors; writes the headers before them if the arena has another layout."""
    filled = slot.layout
    if isinstance(filled, _SlotLayout) and filled.signature == plan.signature:
        return filled.places
    assert slot.arena is not None
    memory = slot.arena.memory
    plan.layout.write_fixed(memory)
    places = [
        ArrayBuffer(memory[tensor.offset : tensor.offset + tensor.array.size_bytes], tensor.array)
        for in_object in plan.layout.tensors.values()
        for tensor in in_object
    ]
    slot.layout = _SlotLayout(plan.signature, plan.layout, places)
    return places
