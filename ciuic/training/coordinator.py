"""Object graph of one `SnapshotManager`, and the reactions of its parts to steps, boundaries and messages.

Guarantees: each part gets what it uses as constructor arguments, and only this module knows all of them. Failures
of saving are logged and counted, never raised into the training.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ciuic.training import arguments
from ciuic.training.arguments import ManagerOptions
from ciuic.training.device_copy import capturing
from ciuic.training.format.tensors import Unsaveable
from ciuic.training.loading import check_fits, list_snapshots, load_newest, put_back
from ciuic.training.logs import log, quietly
from ciuic.training.name_lock import NameLock
from ciuic.training.preemption import LastSave, rule_of
from ciuic.training.ranks import Ranks
from ciuic.training.remote.copies import RemoteCopies
from ciuic.training.remote.place import uploads_of
from ciuic.training.results import Resumed, SaveCallbacks, State
from ciuic.training.rules import Keep, SaveRules
from ciuic.training.save_pipeline import CriticalSection, SavePipeline
from ciuic.training.save_schedule import Forecast, SaveSchedule, forecast_for
from ciuic.training.snapshot_taker import RunProgress, SnapshotSpec, SnapshotTaker
from ciuic.training.state import stateful
from ciuic.training.state.boundaries import Boundaries
from ciuic.training.state.rank_state import BoundaryState
from ciuic.training.state.registered import Registered
from ciuic.training.trackers import Tracker, TrackerFeeds
from ciuic.training.writer.client import WriterClient
from ciuic.training.writer.heartbeat import TrainerHeartbeat, uncaught
from ciuic.training.writer.messages import COMPRESSIONS, Begin, PreemptionNotice, RetentionRules
from ciuic.training.writer.paired_files import FilesystemPairing, Roots
from ciuic.training.writer.rank_parts import clear_stale

if TYPE_CHECKING:
    from ciuic.config import RemoteConfig


@dataclass(frozen=True)
class Settings:
    """Validated arguments of a manager; `SnapshotManager` documents each."""

    save_dir: Path
    name: str
    rules: SaveRules
    keeps: tuple[Keep, ...]
    compression: str
    options: ManagerOptions
    filesystem: Roots
    remotes: tuple[RemoteConfig, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for a compression or a name that cannot be."""
        arguments.one_of(self.compression, COMPRESSIONS, "compression")
        arguments.file_name(self.name)


class SaveCoordinator:
    """Parts of one manager, wired to each other."""

    def __init__(self, settings: Settings) -> None:
        """Meet the other ranks, create the repository if there is none, and install signal handlers.

        Raises:
            ValueError: An option is out of its range.
            CiuicError: There can be no repository in ``save_dir``.
            OSError: The same, as the file system says it.
        """
        self._settings = settings
        # First: it may refuse the rules, and nothing has been created by then.
        preempted = rule_of(settings.rules)
        # Before what takes different times on the ranks, such as making a remote, and before anything that is collective:
        # the ranks that make a manager are counted first, with a time limit.
        ranks = Ranks.meet(settings.name) if self._may_join else None
        try:
            uploads = uploads_of(settings.save_dir, settings.remotes)
        except BaseException:
            if ranks is not None:
                ranks.leave()
            raise
        if ranks is not None and not ranks.find_directories(settings.save_dir):
            ranks = None
        if ranks is not None and ranks.leads_directory:
            clear_stale(str(settings.save_dir))
        self.root = os.fsencode(f"/{settings.name}")
        self.run = RunProgress()
        self.forecast: Forecast | None = None
        self.callbacks = SaveCallbacks()
        self._trackers = TrackerFeeds(str(settings.save_dir), settings.name)
        self._is_tracked = False
        self._closed = False
        self._last_save: LastSave | None = None
        self._step_end: BoundaryState | None = None
        """Generators and positions right after the last step, until its boundary comes."""
        self.deferred: list[Callable[[], object]] = []
        """Saves that were asked for within a step, for its boundary."""
        # Nothing calls these methods before the first object is registered, when all parts are there.
        self.boundaries = Boundaries(self._stepped, self._at_boundary, capturing, self._step_over)
        self.heartbeat = TrainerHeartbeat(
            settings.name, str(settings.save_dir), settings.options.heartbeat_seconds
        )
        begin = Begin(
            repository=str(settings.save_dir),
            root=self.root,
            rules=RetentionRules(keep=settings.keeps),
            nice=settings.options.nice,
            services=() if preempted is None else preempted.services,
            compression=settings.compression,
            watched=self.heartbeat.hello,
            uploads=uploads,
        )
        self.pipeline = SavePipeline(
            WriterClient(begin, begin_fds=self.heartbeat.fds),
            CriticalSection(self._guard_released),
            self.callbacks,
            RemoteCopies(begin.repository, begin.uploads),
            self._preemption_noticed,
            save_ended=self.heartbeat.save_ended,
            busy=self.heartbeat.busy,
            overlap=settings.options.overlap,
        )
        self.registered = Registered(self.boundaries, self.pipeline.overlap.watch)
        self.schedule = SaveSchedule(settings.rules, None if ranks is None else ranks.vote())
        self.taker = SnapshotTaker(
            self.run,
            self.registered,
            self.schedule,
            self.pipeline,
            ranks,
            FilesystemPairing(settings.filesystem, settings.save_dir),
            NameLock(str(settings.save_dir), settings.name),
            self._trackers,
        )
        if preempted is not None:
            # Not the vote of the schedule: each has a message of its own under way from boundary to boundary.
            agree = settings.options.agree or (None if ranks is None else ranks.vote())
            self._last_save = LastSave(
                preempted,
                agree,
                root=self.root,
                is_closed=lambda: self._closed,
                run=self.run,
                boundaries=self.boundaries,
                registered=self.registered,
                pipeline=self.pipeline,
                taker=self.taker,
                heartbeat=self.heartbeat,
            )
            # Only now: a handler that ran before `_last_save` is set would find nobody to act on the signal.
            self._last_save.watch.install()

    @property
    def _may_join(self) -> bool:
        """True if the program left it open that this process is one of several ranks."""
        return self._settings.options.distributed is not False

    @property
    def closed(self) -> bool:
        """True if no further snapshot is taken."""
        return self._closed

    def _preemption_noticed(self, message: PreemptionNotice) -> None:
        """Prepare the last snapshot after the notice of a cloud."""
        if self._last_save is not None:
            self._last_save.notified(message)

    def _guard_released(self) -> None:
        """Act on signals that arrived within the critical section."""
        if self._last_save is not None:
            self._last_save.guard_released()

    # -- what the program registers, reports and resumes

    def register(self, objects: Mapping[str, Any]) -> None:
        """Register objects by name, and start the writer process before the first save needs it."""
        if self._last_save is not None:
            self._last_save.forget_weight_sample()
        for name, value in objects.items():
            self.registered.add(name, value)
        self.run.step += self.boundaries.pop_steps_before()
        if self.taker.writes:
            with quietly("the writer could not be started"):
                self.pipeline.client.start()

    def report(self, metrics: Mapping[str, float]) -> None:
        """Give metrics to the rules, and save if that makes a snapshot due and the state is whole."""
        self.schedule.report(metrics)
        self.heartbeat.report(self.run.step, metrics)
        self.pipeline.advance()
        if self.taker.ranks is not None:
            return  # The others hear of it at the next boundary: this rank must not act on it alone.
        saves = not self._closed and self.registered.objects and self.pipeline.client.is_ours
        if saves and self.boundaries.whole:
            self._save_if_due()
        elif saves:
            # Made due by the metrics, at the boundary of the step that was measured.
            self.boundaries.await_next()

    def track(self, tracker: Tracker) -> None:
        """Log the saves that begin from now on to a tracker, in place of one of the same name."""
        self._trackers.add(tracker)
        if not self._is_tracked:
            self._is_tracked = True
            self.callbacks.add(self._trackers.put)

    def set_step(self, step: int) -> None:
        """Count on from this step of the run."""
        self.run.step = step
        self.boundaries.count_from_here()

    def resume_from(self, state: State) -> None:
        """Continue step count, rules and run id from a loaded state."""
        self.boundaries.resumed()
        self.pipeline.state_saved()
        self.set_step(state.facts.step or 0)
        self.run.epoch = state.facts.epoch
        self.run.newest_ns = max(self.run.newest_ns, state.time_ns)
        self.run.id = state.facts.run or self.run.id
        self.schedule.begin_at(self.run.step)
        self.taker.acquire_name()
        # Rules that look at metrics count from the best of the whole run, not of this process.
        self._observe_earlier()

    def restore(self, state: State) -> Resumed:
        """Put a loaded state into the registered objects and the random generators, and continue from it.

        Raises:
            KeyError: A registered object is not in the snapshot; nothing has been changed.
            ValueError: A state does not fit its object; nothing has been changed.
        """
        check_fits(
            state,
            self.registered.objects,
            self.taker.ranks,
            allow_other_optimizer=self._settings.options.allow_other_optimizer,
        )
        # A copy from a device may still read the weights that are about to be overwritten.
        self.pipeline.settle()
        # A signal handler must not save a state that is half restored.
        with self.pipeline.guard, self.heartbeat.busy():
            put_back(state, self.registered.objects, self.taker.ranks)
        self.resume_from(state)
        epoch, batch = self._continues_at(state)
        log.info("ciuic: resumed from %s, step %d", state.id, self.run.step)
        return Resumed(state.id, self.run.step, epoch, batch, tuple(state.passed_over))

    def _continues_at(self, state: State) -> tuple[int | None, int]:
        """Return the epoch to continue with, and the batches that were taken of it."""
        position, passes = self.registered.position, self.registered.passes
        if position is not None:
            return position.epoch, position.taken
        # None: saved without a loader, or by a version that did not count its passes.
        if passes is None or state.passes is None:
            return self.run.epoch, 0
        passes.load_state_dict(state.passes)
        # Not what the program gave: from here on it is counted again.
        given = state.passes["given"]
        self.run.epoch = None if given is None else arguments.whole_number(given, "epoch")
        return passes.epoch if self.run.epoch is None else self.run.epoch, passes.taken

    def load_to_resume(self, find: Callable[[], State | None] | None) -> State | None:
        """Load the state to resume from; collective where there are several ranks."""
        with self.heartbeat.busy():
            return load_newest(
                self._settings.save_dir,
                self.root,
                self.registered.templates(),
                ranks=self.taker.ranks,
                remotes=self._settings.remotes,
                find=find,
            )

    def load_latest(self) -> State | None:
        """Load the newest whole state on this rank alone."""
        with self.heartbeat.busy():
            state = load_newest(self._settings.save_dir, self.root, remotes=self._settings.remotes)
        if state is not None:
            # A program that goes on from it by itself: where the clock is behind that of the host that has saved it,
            # it must not be the newest again.
            self.run.newest_ns = max(self.run.newest_ns, state.time_ns)
        return state

    def join_ranks(self, *, prepare: bool) -> None:
        """Meet the other ranks if that has not happened yet and torch.distributed is initialized by now."""
        if not self._may_join:
            return
        if (
            self.taker.ranks is None
            and (ranks := Ranks.meet(self._settings.name)) is not None
            and ranks.find_directories(self._settings.save_dir)
        ):
            self.taker.join_ranks(ranks)
            if self._last_save is not None:
                self._last_save.join_ranks(ranks)
        if self.taker.ranks is not None and not prepare:
            self.taker.skip_preparation()

    def stop(self) -> None:
        """Take no further snapshot, except for one that is due when the manager is closed."""
        self._closed = True

    def close(self, timeout_seconds: float, error: BaseException | None) -> None:
        """Wait for staged saves, at most so long, and release the writer, the name and the process groups.

        The caller has called `stop`.

        Args:
            timeout_seconds: Upper bound; less where preemption leaves less.
            error: Exception because of which the program closes the manager.
        """
        # First the goodbye: waiting for the last saves may take longer than `heartbeat_seconds`, and a daemon
        # takes a training without a goodbye and without beats for hung.
        self.heartbeat.closing(error)
        if self.deferred:
            log.warning(
                "ciuic: a snapshot that was asked for within optimizer.step() was not taken: the step never ended"
            )
        if self._last_save is not None:
            self._last_save.watch.remove()
        close_by = None if self._last_save is None else self._last_save.close_by
        if close_by is not None:
            timeout_seconds = min(timeout_seconds, max(0.0, close_by - time.monotonic()))
        end = time.monotonic() + timeout_seconds
        # No failure: SystemExit, by which all ranks end alike after a preemption.
        failed = isinstance(uncaught() if error is None else error, Exception)
        # Not after a failure, which may have come within a step: the forward pass has changed the batch
        # statistics then, and no optimizer has told of a step.
        may_take = error is None and not failed and close_by is None
        may_take = may_take and self.taker.has_skipped and self.pipeline.is_ours
        # What is under way occupies the arenas.
        if may_take and self.pipeline.wait(timeout_seconds):
            with quietly("the last snapshot that was due could not be taken"):
                self.taker.take_skipped(is_whole=self.boundaries.whole)
        self.pipeline.close(max(0.0, end - time.monotonic()), failed=failed)
        self.taker.release_name()
        self.taker.close_ranks()
        # Last: a callback may be slow, and must delay no other step of the end.
        self.callbacks.close(max(0.0, end - time.monotonic()))
        # After the callbacks, whose thread gives the trackers the last saves.
        self._trackers.close(max(0.0, end - time.monotonic()))

    # -- steps and boundaries

    def _stepped(self) -> None:
        self.run.step += 1
        self.heartbeat.beat(self.run.step)
        self.pipeline.state_changed()
        if self._last_save is not None:
            self._last_save.stepped()
        self.schedule.warn_without_boundaries(self.boundaries)

    def _step_over(self) -> bool:
        """Set aside what the program may change for the next step before the boundary comes; return whether it may be saved."""
        self._step_end = None
        if self._closed or capturing():
            return False
        # Only where it may be needed: copies of what programs register take time, and hooks are seen by programs.
        wanted = (
            self.boundaries.is_uncertain
            or bool(self.deferred)
            or (self._last_save is not None and self._last_save.watch.is_pending)
            or self.schedule.may_be_due(self.run.step, self.pipeline.costs)
        )
        if wanted:
            with quietly("generators and positions could not be set aside for a snapshot"):
                self._step_end = BoundaryState(
                    stateful.random_states(),
                    self.registered.drawn_from(),
                    self.registered.epoch(self.run.epoch),
                )
        return wanted

    def settle(self) -> None:
        """Let the boundary of the last step come, if it waits for a next one: the program waits for saves, or ends."""
        # After an error the program may be anywhere behind its step.
        if (sys.exc_info()[1] or uncaught()) is None:
            self.boundaries.settle()

    def _at_boundary(self) -> None:
        is_late = self.boundaries.is_late
        self.taker.step_end, self._step_end = self._step_end if is_late else None, None
        if self.taker.step_end is not None and self.boundaries.is_uncertain and self.taker.ranks is None:
            with quietly("changes behind a step could not be looked for"):
                self.registered.warn_of_changes(self.taker.step_end.positions)
        try:
            may_take = self.taker.step_end is not None if is_late else not self.boundaries.is_early
            self._boundary(may_take=may_take)
        finally:
            self.taker.step_end = None

    def _boundary(self, *, may_take: bool) -> None:
        # While a CUDA graph is recorded nothing of a device may be queried or waited for: it would spoil the
        # graph.
        if self._closed or not self.registered.objects or not self.pipeline.is_ours or capturing():
            return
        # Again, because a program without optimizers that report steps (Keras) comes here alone.
        self.pipeline.state_changed()
        self.heartbeat.beat(self.run.step)
        # An arena that the writer has returned is free for a snapshot that is due at this boundary.
        if self.pipeline.pending:
            with self.pipeline.guard:
                self.pipeline.process_messages()
        # Votes begin only when all ranks have come to a boundary, so that a rank that registers nothing stops
        # no other.
        if not self.taker.all_at_boundary():
            self._leave_ranks()
        # The last snapshot goes before any other that is due; this may raise SystemExit.
        if self._last_save is not None:
            self._last_save.at_boundary()
        self.pipeline.costs.boundary(time.monotonic(), writing=self.pipeline.pending > 0)
        # After the first step everything has its size: moments of optimizers, for example, do not exist
        # before.
        if not (may_take and self._save_if_due()) and not self.taker.is_prepared:
            with quietly("the first snapshot could not be prepared"):
                try:
                    self._prepare()
                except Unsaveable as error:
                    self.pipeline.log_not_gathered(str(error))
        self.take_deferred()
        # Last, because the snapshot needs to know which optimizers have reported this step.
        self.pipeline.overlap.boundary()

    def take_deferred(self) -> None:
        """Take the snapshots that were asked for within a step: it is over."""
        while self.deferred:
            with quietly("a snapshot that was asked for within a step could not be taken"):
                self.deferred.pop(0)()

    def _prepare(self) -> None:
        """Allocate the first arena and compute the forecast, now that the state has its size."""
        try:
            self.taker.prepare()
        finally:
            # Also after an error: the other ranks wait for this one.
            size_bytes = self.taker.size_in_directory(self.pipeline.size_bytes)
        self.forecast = forecast_for(
            self._settings.save_dir,
            self.root,
            size_bytes,
            copy_bytes=self.pipeline.size_bytes,
            write_seconds=self.pipeline.costs.write_estimate_seconds(size_bytes),
            rules=self.schedule.rules,
            keeps=self._settings.keeps,
            grace_seconds=None if self._last_save is None else self._last_save.grace_seconds,
        )
        # Ranks of one directory would say the same.
        if self.taker.ranks is None or self.taker.ranks.leads_directory:
            for warning in self.forecast.warnings:
                log.warning("ciuic: %s", warning)

    def _leave_ranks(self) -> None:
        log.error(
            "ciuic: rank 0 saves alone from now on, without random generators and positions of the other ranks, "
            "because not every rank has registered objects with its SnapshotManager; register them on every rank, "
            "or pass options=ManagerOptions(distributed=False) on rank 0 if this is meant"
        )
        self.taker.leave_ranks()
        if self._last_save is not None:
            self._last_save.leave_ranks()

    def _save_if_due(self) -> bool:
        """Take a snapshot if a rule asks for one; return whether one was due."""
        # A save that could not be staged is not tried again after every step. With several ranks all of them
        # have to be asked all the same, because the vote is collective.
        if self.schedule.decides_alone and self.pipeline.is_backing_off:
            return False
        try:
            reason = self.schedule.due(self.run.step, self.pipeline.costs)
        except RuntimeError as error:
            self.pipeline.outcome(f"the ranks cannot agree any more: {error}")
            return False
        # A copy under which the program changed weights is no snapshot: it is taken again at once. Not with
        # several ranks, of which only this one knows.
        if self.pipeline.pop_void_copy() and self.schedule.decides_alone:
            reason = reason or "the one before it was changed while it was copied"
        if reason:
            with suppress(Exception):  # `take_due` has counted and logged it
                self.taker.take_due(SnapshotSpec(reason))
        return bool(reason)

    def _observe_earlier(self) -> None:
        """Show the rules the metrics of earlier snapshots of the run, whose best still has to be beaten."""
        # Only where it matters: a file of each earlier snapshot is read.
        if self.schedule.rules.look_at_metrics:
            for saved in list_snapshots(self._settings.save_dir, self.root):
                if saved.facts.run == self.run.id:
                    self.schedule.rules.observe(saved.facts.metrics)
            self.schedule.rules.saved()
