"""One save on its way: take -> stage -> submit -> outcome.

=========  ===================================================================================================
take       `SnapshotTaker`: what is saved, by this process alone or in agreement with the other ranks
stage      `SavePipeline.stage`: the state is copied into an arena, from devices perhaps beside the next step
submit     an arena whose copies have arrived goes to the writer (`writer.client`), in the order of the saves
outcome    `SavePipeline.outcome`: how it ended, for counts, the log, the program's `Save` and its callbacks
=========  ===================================================================================================

Guarantees: failures are logged, counted in `stats` and never raised into the training, except for errors of the
program itself (`Unsaveable`). A failed save leaves `changed` set, so that the next boundary knows of something to
save. While the `CriticalSection` is entered, signal handlers only leave a flag, so that no method is entered twice.

The writer gets a state only when all of it has arrived from devices and nothing of it was changed on the way, and in
the order of the saves; otherwise the save fails. Only a save that may wait, `wait` and `close` make the host wait.

On several ranks all count from the step of a snapshot, even if it fails.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec

from ciuic.repository.writing.shared_write_claim import Claim
from ciuic.training import arguments
from ciuic.training.device_copy import Overlap
from ciuic.training.device_streams import capturing, device_stream_of
from ciuic.training.format.reading import Facts, facts_summary, framework_versions, metric_floats
from ciuic.training.format.shards import are_sharded
from ciuic.training.logs import log, quietly, warn_once
from ciuic.training.name_lock import NameLock
from ciuic.training.policy.save_schedule import SaveCosts, SaveSchedule
from ciuic.training.ranks import Ranks, RanksApart
from ciuic.training.remote.copies import RemoteCopies
from ciuic.training.results import EXIT_SECONDS, Save, SaveCallbacks, SaveResult, Stats
from ciuic.training.save_agreement import (
    AgreedSave,
    GatheredStates,
    RanksGone,
    agree,
    decode_states,
    gather_part,
)
from ciuic.training.staging import GatheredState, StagedSave, gather, stage
from ciuic.training.state import randomness, rank_state
from ciuic.training.state.rank_state import RankState
from ciuic.training.state.registered import Registered
from ciuic.training.state.stateful import unregistered
from ciuic.training.writer.client import FORKED, WriterClient
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
from ciuic.training.writer.paired_files import FilesystemPairing, PairRequest, Roots, planned_id
from ciuic.training.writer.rank_parts import report_failure

TAG: Final = "training"
"""Tag of every snapshot of a training state."""
_AT_END: Final = "skipped before the end"
"""Reason in a snapshot that was due while the writer was busy, and is taken when the manager is closed."""
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


class RunProgress:
    """Progress of the run."""

    def __init__(self) -> None:
        self.id = os.urandom(16).hex()
        """Id of the run; a resumed run keeps it."""
        self.step = 0
        self.epoch: int | None = None
        """Epoch that the program named last."""


class BoundaryState(NamedTuple):
    """State at the last boundary, as far as an evaluation changes it."""

    random: dict[str, Any]
    positions: dict[str, Any]
    epoch: int | None


class SnapshotSpec(NamedTuple):
    """Properties of a snapshot that is to be taken."""

    reason: str
    epoch: int | None = None
    metrics: Mapping[str, float] = MappingProxyType({})
    plain: Mapping[str, Any] = MappingProxyType({})
    tags: tuple[str, ...] = ()
    hold: str = ""
    """Reason for which the snapshot is held; empty if it is not."""
    filesystem: Roots | None = None
    """Directories whose files are wanted with it; None for the manager's default."""
    is_explicit: bool = False
    """True if the program asked for it, perhaps on this rank alone."""
    may_wait: bool = False
    """True if it may wait for the writer to finish an earlier one."""
    boundary_state: BoundaryState | None = None
    """State to save in place of the current generators and positions."""


def explicit_request(
    model: Any,
    optimizer: Any,
    epoch: Any,
    others: Mapping[str, Any],
    metrics: Mapping[str, Any],
    tags: Any,
    hold: Any,
    filesystem: Roots | None,
) -> tuple[dict[str, Any], SnapshotSpec]:
    """Validate the arguments of `save_snapshot`.

    Returns:
        The objects by name, and the properties of the snapshot.

    Raises:
        TypeError: an argument has the wrong type.
    """
    objects, plain = arguments.objects_and_values(model, optimizer, others)
    return objects, SnapshotSpec(
        "asked for",
        None if epoch is None else arguments.whole_number(epoch, "epoch"),
        arguments.numbers(metrics),
        plain,
        arguments.texts(tags),
        arguments.reason(hold),
        filesystem,
        is_explicit=True,
        may_wait=True,
    )


class _SkippedSave(NamedTuple):
    """The last save that was due and was skipped because the writer was busy."""

    step: int
    request: SnapshotSpec
    """Properties of the snapshot, with the generators and positions of its boundary."""
    parts: list[RankState] | None
    """States of the ranks at that boundary; None: of this process alone, or sharded."""


class SnapshotTaker:
    """Taking of a manager's snapshots, alone or together with other ranks."""

    def __init__(
        self,
        run: RunProgress,
        registered: Registered,
        schedule: SaveSchedule,
        pipeline: SavePipeline,
        ranks: Ranks | None,
        pairing: FilesystemPairing,
        name_lock: NameLock,
    ) -> None:
        """Connect the parts of a manager that a snapshot needs.

        Args:
            run: progress of the run.
            registered: objects to be saved.
            schedule: counts from the last snapshot.
            pipeline: gets what was taken.
            ranks: connection to the other ranks; None if this process saves for itself.
            pairing: requests of snapshots of files.
            name_lock: lock on the name of the training in the repository.
        """
        self._run = run
        self._registered = registered
        self._schedule = schedule
        self._pipeline = pipeline
        self._ranks = ranks
        self._pairing = pairing
        self._name_lock = name_lock
        self._prepared = self._checked_completeness = self._ranks_met = self._is_silent = False
        self._skipped: _SkippedSave | None = None

    @property
    def ranks(self) -> Ranks | None:
        """Connection to the other ranks; None if this process saves for itself."""
        return self._ranks

    @property
    def writes(self) -> bool:
        """True if this process writes snapshots."""
        return not self._is_silent if self._ranks is None else self._ranks.saves

    @property
    def is_prepared(self) -> bool:
        """True if memory for a first save was allocated, or none is needed."""
        return self._prepared

    @property
    def has_skipped(self) -> bool:
        """True if the last save that was due was skipped, and none was taken since."""
        return self._skipped is not None

    @property
    def _is_sharded(self) -> bool:
        """True if each rank has a part of the state."""
        return self._ranks is not None and are_sharded(self._registered.objects.values())

    # -- the other ranks

    def join_ranks(self, ranks: Ranks) -> None:
        """Save together with the other ranks from now on."""
        self._ranks = ranks
        self._prepared = self._prepared or not ranks.saves
        self._schedule.decide_by(ranks.vote())

    def leave_ranks(self) -> None:
        """Save without the other ranks from now on: rank 0 by itself, others nothing."""
        self._is_silent = not self.writes
        self._ranks = None
        self._schedule.decide_by(None)

    def close_ranks(self) -> None:
        """Close the connection to the other ranks."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def all_at_boundary(self) -> bool:
        """Return whether the other ranks come to boundaries too."""
        # Asked until they have come once: agreements at boundaries would wait for ranks that never come.
        if self._ranks is not None and not self._ranks_met:
            with quietly("the other ranks are gone"):
                self._ranks_met = self._ranks.all_at_boundary()
            return self._ranks_met
        return True

    # -- before the first save, and after the last one

    def acquire_name(self) -> None:
        """Take the lock on the training's name, if this process writes."""
        if self.writes:
            self._name_lock.acquire()

    def release_name(self) -> None:
        """Let other processes have the name of the training."""
        self._name_lock.release()

    def skip_preparation(self) -> None:
        """Leave the memory of a first save to that save: asking the objects for their states is collective."""
        self._prepared = True

    def prepare(self) -> None:
        """Allocate memory for the first save, once the first step has given everything its size."""
        self._prepared = True
        is_sharded = self._is_sharded
        if not self.writes and not is_sharded:
            return
        # Not earlier than the first step, in which optimizers create their state.
        states = self._registered.states()
        if self._ranks is not None and is_sharded:
            self._pipeline.prepare(gather_part(self._registered.objects, states, self._ranks.rank))
        else:
            self._pipeline.prepare(gather(states, {}, {}))
        self._pipeline.hear()

    # -- what the ranks have of their own

    def parts_when_asked(self, place: str) -> GatheredStates:
        """Gather the ranks' states for a snapshot that the program asked for.

        Args:
            place: file and line of the call, to tell calls on several ranks apart.

        Returns:
            As `gather_parts`; None if this rank alone was asked.
        """
        if self._ranks is None:
            return None
        ranks = self._ranks
        ranks.begin_asked(self._run.step, place)
        try:
            if not self._is_sharded:
                return decode_states(ranks.hand_in(rank_state.own_state(self._registered.objects).message()))
            if not ranks.all_asked():
                raise RanksApart(
                    "save_snapshot must be called on every rank, because each has a part of the state"
                )
        except RanksApart as error:
            # Rank 0 alone still has a state to save, unless each rank has a part of it.
            if self._is_sharded:
                return RanksGone(str(error))
            self._pipeline.outcome(str(error))
            return None
        return self._agree(ranks, may_wait=True)

    def gather_parts(self, *, may_wait: bool) -> GatheredStates:
        """Gather what each rank has of its own. Collective.

        Args:
            may_wait: wait for an arena to become free.

        Returns:
            None if this process saves for itself. The states of all ranks on rank 0, and [] on the others.
            For a sharded state `AgreedSave` on all ranks, or [] on all if they skip this one. `RanksGone` if
            another rank has ended or they cannot agree: no snapshot is taken then, since one without that
            rank's generators and position would become the newest, and a resume from it would not be exact.
        """
        if self._ranks is None:
            return None
        # On all alike, whatever becomes of this one: they must find the next one due at the same step.
        self._schedule.begin_at(self._run.step)
        if self._is_sharded:
            return self._agree(self._ranks, may_wait=may_wait)
        try:
            own = rank_state.own_state(self._registered.objects)
            return decode_states(self._ranks.gather(own.message())) or []
        except RanksApart as error:
            return RanksGone(f"the other ranks are gone: {error}")

    def _agree(self, ranks: Ranks, *, may_wait: bool) -> AgreedSave | RanksGone | list[RankState]:
        """Agree on a sharded save; [] if it is skipped."""
        client = self._pipeline.client
        if may_wait:
            self._pipeline.wait_for_arena()
        try:
            objects, states = self._registered.objects, self._registered.states()
            found = agree(ranks, client.repository, objects, states, is_busy=not client.can_take)
            if found is None:
                self._pipeline.stats.skipped += 1
                self._skipped = _SkippedSave(self._run.step, SnapshotSpec(_AT_END), None)
            return found or []
        except (RanksApart, OSError) as error:
            return RanksGone(str(error))

    # -- snapshots

    def take_due(self, request: SnapshotSpec) -> Save | None:
        """Gather what each rank has of its own, and take a snapshot that a rule asks for. Collective.

        Returns:
            As `take`.

        Raises:
            Unsaveable: a value cannot be stored.
        """
        try:
            return self.take(request, self.gather_parts(may_wait=request.may_wait))
        except Exception as error:
            # The program does not see the exception of a save that it did not ask for.
            if self.writes:
                self._pipeline.callbacks.notify(
                    SaveResult.of(self._facts(request, world_size=1), error=str(error))
                )
            raise

    def take(self, request: SnapshotSpec, parts: GatheredStates) -> Save | None:
        """Take a snapshot.

        Returns:
            The save; None if it could not be staged, or if another rank writes.

        Raises:
            Unsaveable: a value cannot be stored.
        """
        if isinstance(parts, RanksGone):
            # Told by the rank that would have written it.
            told = self._facts(request, world_size=1) if self.writes else None
            self._pipeline.outcome(parts.problem, facts=told)
            return None
        if isinstance(parts, AgreedSave):
            with self._pipeline.guard:
                if self.writes:
                    return self._take_whole(request, parts.parts, parts)
                self._take_part(request, parts)
                return None
        # The ranks did not agree, and one rank's part alone is no snapshot.
        if self._is_sharded:
            return None
        if not self.writes:
            self._record_taken(request)
            return None
        with self._pipeline.guard:
            return self._take_whole(request, parts)

    def _take_part(self, request: SnapshotSpec, agreed: AgreedSave) -> None:
        """Take this rank's part of the snapshot that rank 0's writer makes."""
        began = time.monotonic()
        joint_save, self._prepared = agreed.joint_save, True
        states = self._registered.states()
        manifest = Manifest(time_ns=time.time_ns(), message="", tags=(), files=[], joint_save=joint_save)
        state = gather_part(self._registered.objects, states, joint_save.rank)
        # Not beside the next step: rank 0's writer waits for this part, so it is handed over before the step.
        save = self._pipeline.stage(state, Facts(), manifest, may_wait=False, beside=False)
        if isinstance(save, NotStaged):
            # Otherwise rank 0's writer would wait for this part until its deadline.
            with quietly("rank 0 could not be told that this rank has no part"):
                reason = self._pipeline.stats.last_error or "no free arena"
                report_failure(self._pipeline.client.repository, joint_save, reason)
            return
        self._pipeline.stalled(time.monotonic() - began)
        self._record_taken(request)

    def _take_whole(
        self, request: SnapshotSpec, parts: list[RankState] | None, agreed: AgreedSave | None = None
    ) -> Save | None:
        """Take the state of this process, with what the other ranks have of their own."""
        began = time.monotonic()
        # Frees the arenas that the writer has returned since.
        self._pipeline.hear()
        self._warn_incomplete()
        self._prepared = True
        states, random = self._registered.states(), randomness.state()
        if request.boundary_state is not None:
            # Within an evaluation: the resumed run continues from the last boundary and evaluates again.
            states, random = states | request.boundary_state.positions, request.boundary_state.random
        values: dict[str, Any] = {"plain": list(request.plain), "random": random}
        if self._registered.passes is not None:
            values["passes"] = self._registered.passes.state_dict() | {"given": self._run.epoch}
        if parts:
            values["ranks"] = rank_state.differing(parts)
        facts = self._facts(request, world_size=len(parts) if parts else 1)
        request_pair = self._pairing.requester(request.filesystem)
        manifest = Manifest(
            time_ns=time.time_ns(),
            message=facts_summary(facts),
            tags=(TAG, *request.tags),
            hold_reason=request.hold,
            files=[],
            joint_save=None if agreed is None else agreed.joint_save,
            # The snapshot of the files names this one, so its id is chosen before it exists.
            id="" if request_pair is None else planned_id(),
        )
        claim = None if agreed is None else agreed.claim
        try:
            state = gather(states, request.plain, values, with_shards=agreed is not None)
            facts = msgspec.structs.replace(
                facts, size_bytes=state.size_bytes if agreed is None else agreed.size_bytes
            )
            save = self._pipeline.stage(
                state,
                facts,
                manifest,
                may_wait=request.may_wait,
                # What ranks have agreed on is handed over before they go on.
                beside=agreed is None and not request.may_wait,
                claim=claim,
                request_pair=request_pair,
            )
        finally:
            if claim is not None:
                claim.release()  # does nothing if the claim was handed over
        if save is NotStaged.SKIPPED:
            # A skipped save is not tried at every boundary: the next one is due as if it had been taken.
            self._schedule.begin_at(self._run.step)
            at_boundary = BoundaryState(random, self._registered.positions(), facts.epoch)
            again = request._replace(reason=_AT_END, boundary_state=request.boundary_state or at_boundary)
            self._skipped = _SkippedSave(self._run.step, again, parts)
        if isinstance(save, NotStaged):
            return None
        self._pipeline.stalled(time.monotonic() - began)
        self._record_taken(request)
        return save

    def take_skipped(self, *, is_whole: bool) -> None:
        """Save what was skipped, at the end of the program. Collective where the state is sharded.

        Args:
            is_whole: whether the program is between two steps.
        """
        skipped, self._skipped = self._skipped, None
        if skipped is None:
            return
        if self._is_sharded:
            # Every rank knows of the skip, and comes here if it ends in order.
            if self._ranks is not None and is_whole and self._ranks.all_closing():
                self.take(skipped.request, self._agree(self._ranks, may_wait=False))
        elif self._run.step == skipped.step:
            self.take(skipped.request, skipped.parts)
        elif self._ranks is None and is_whole:
            # Steps were made since: the state of now is the better one.
            self.take(SnapshotSpec(_AT_END), None)
        # `_record_taken` has not been called, or another skip was noted.
        if self._skipped is not None or self._pipeline.changed:
            self._skipped = None
            log.warning(
                "ciuic: the snapshot that was due at step %d was skipped, and could not be taken at the end",
                skipped.step,
            )

    def wait_durable(self, save: Save | None, seconds: float) -> None:
        """Wait for the end of a save that the program asked for, durable or failed, on all ranks."""
        if save is not None:
            save.wait()
        if self._ranks is not None:
            with quietly("the other ranks are gone"):
                self._ranks.durable(seconds)

    def _record_taken(self, request: SnapshotSpec) -> None:
        """Record that a snapshot of this boundary was taken, by this rank or by rank 0."""
        self._pipeline.state_saved()
        self._skipped = None
        # The others, which may not have been asked, must find the next one due at the same step.
        alone = request.is_explicit and self._ranks is not None
        self._schedule.taken(None if alone else self._run.step)

    def _facts(self, request: SnapshotSpec, world_size: int) -> Facts:
        """Return the content of `snapshot.json`."""
        epoch = request.epoch if request.boundary_state is None else request.boundary_state.epoch
        return Facts(
            step=self._run.step,
            epoch=self._registered.epoch(self._run.epoch) if epoch is None else epoch,
            metrics=self._schedule.reported | metric_floats(request.metrics),
            reason=request.reason,
            objects=tuple(self._registered.objects),
            run=self._run.id,
            framework=framework_versions(),
            world_size=world_size,
        )

    def _warn_incomplete(self) -> None:
        """Warn once of what a resume would miss, and take the lock on the training's name."""
        if not self._checked_completeness:
            self._checked_completeness = True
            # With the first save, or `resume`: a process that only loads is no second training.
            self._name_lock.acquire()
            for note in unregistered(self._registered.objects, has_position=self._registered.has_position):
                log.warning("ciuic: a resume would not be exact: %s", note)


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
        overlap: bool = True,
    ) -> None:
        """Create the pipeline; the writer process starts with the first save.

        Args:
            client: connection to the writer.
            guard: critical section of the manager.
            callbacks: told of each save that ends.
            copies: copies of snapshots on remotes.
            noticed: called with the notice of a metadata service that the writer passed on.
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
        # The end of a sharded save is told by rank 0 alone, whose writer makes the snapshot.
        told = facts if joint is None or joint.rank == 0 else None
        copy = partial(
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
            staged = copy()
            if staged is None and may_wait:
                end = time.monotonic() + self._max_wait_seconds()
                while staged is None and self._wait_for_answer(end):
                    staged = copy()
        except OSError as error:
            # Most often too little memory: attempts after every step would cost the training time.
            self.outcome(error.strerror or str(error), facts=told)
            self._back_off()
            return NotStaged.FAILED
        if staged is None:
            self._count_skip()
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

    def wait_for_arena(self) -> None:
        """Wait for an arena to become free, as long as a save that may wait does."""
        end = time.monotonic() + self._max_wait_seconds()
        while not self.client.can_take and self._wait_for_answer(end):
            pass

    def _wait_for_answer(self, end: float) -> bool:
        """Wait a moment for the writer to return an arena; False if none will come, or not in time."""
        # Bounded: a writer that hangs must not hang the training.
        left = end - time.monotonic()
        if not self.pending or left <= 0:
            return False
        self._finish(left)
        self.hear(POLL_SECONDS)
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

    def _count_skip(self) -> None:
        self.stats.skipped += 1
        # Logged for the 1st, 2nd, 4th, 8th ... skip: a writer that is too slow may go on so for days.
        if self.stats.skipped.bit_count() == 1:
            log.warning(
                "ciuic: snapshot skipped: the writer is still storing the last two (%d skipped so far)",
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

    def hear(self, timeout_seconds: float = 0.0) -> None:
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

    def outcome(self, end: Saved | Put | str, *, number: int = 0, facts: Facts | None = None) -> None:
        """Record how a save ended: count and log it, note it in the program's `Save`, tell the callbacks.

        Args:
            end: answer of the writer, or the reason of a failure.
            number: number of the save; 0: it failed before it was staged.
            facts: what callbacks are told of a save that failed before it was staged; None: nothing.
        """
        if isinstance(end, Saved):
            self._count_saved(end)
        elif isinstance(end, str):
            self.stats.failed += 1
            # The state of this boundary is not saved: the next boundary tries again.
            self._changed = True
            self.stats.last_error = end
            log.error("ciuic: snapshot failed; earlier snapshots are unaffected: %s", end)
        # A save that was interrupted is reported twice: by the hand-over and by the client.
        if (known := self._under_way.pop(number, None)) is not None:
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
                SaveResult.of(facts, error=end) if isinstance(end, str) else SaveResult.of(facts, id_=end.id)
            )
        if isinstance(end, Saved):
            log.debug("ciuic: saved %s, %d new bytes", end.id, end.new_bytes)

    def _count_saved(self, saved: Saved) -> None:
        self.stats.saved += 1
        self.stats.last_id, self.stats.last_write_seconds = saved.id, saved.seconds
        # Waiting for codecs is left out of the estimate: a save in a hurry does not wait for them.
        self.costs.wrote(saved.size_bytes, saved.seconds - saved.waited_seconds)

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
        end = time.monotonic() + timeout_seconds
        with self.guard:
            if self.client.is_ours:
                self._finish(timeout_seconds)
                # The training stands still from here on: codecs may use its processors.
                self.client.awaited()
        while self.pending if number is None else number in self._under_way:
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
