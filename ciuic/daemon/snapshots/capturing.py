"""Capture what was cut, one snapshot at a time, until each is committed or given up.

Guarantees: each sealed epoch is in the end either committed or given back to its worker; a failed attempt is
repeated as pending.retry_after says; a defect in this program costs one snapshot, not the service. A root whose
epoch is gone is left out (`cut.settle_doubt`), and a snapshot without any root is reported lost. The task that
goes on with a snapshot of a killed daemon waits for the capture that works for it. No estimate is given where
nothing is known (a first capture does not know how much there is). Leaves to others: the queue and its journal
(pending.py), the cut (cut.py), the work itself (capture_process.py).

Belongs to the trio thread. Sessions end and captures are killed during any await below, so the phase of a
pending snapshot (pending.py) is read anew after each.
"""

from __future__ import annotations

import os
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple

import msgspec
import structlog
import trio

from ciuic.daemon.base.events import KEY_MISSING, Alerts, EventBus
from ciuic.daemon.base.metrics import SnapshotCourse, SpanWriter
from ciuic.daemon.base.process_priority import RunningProcess
from ciuic.daemon.base.repository_store import Store
from ciuic.daemon.base.runtime import CutRecord, PendingRecord, RuntimeDirectory
from ciuic.daemon.base.settings import Settings
from ciuic.daemon.capture.job import EXIT_UNDO_LOST, CaptureJob, Done, Failed, RootJob
from ciuic.daemon.roots.supervisor import RootSupervisor
from ciuic.daemon.snapshots.capture_process import CaptureProcess, wait_for_stranger
from ciuic.daemon.snapshots.cut import (
    Flush,
    TrackingTrust,
    find_commit,
    flush,
    settle_doubt,
    tell_workers,
)
from ciuic.daemon.snapshots.pending import PendingSnapshot, Phase, Promises, SnapshotQueue
from ciuic.daemon.snapshots.space_watch import Shortage, SpaceWatch
from ciuic.errors import CiuicError
from ciuic.printable import one_line, path_text
from ciuic.protocol.control_types import Progress, RepositoryStatus, SnapshotState, rfc3339
from ciuic.protocol.span_spool import Attribute
from ciuic.system.processes import start_ticks
from ciuic.system.urgency import Urgency
from ciuic.types import LeftOut
from ciuic.units import plural

# Wait of the capture process for another writer, before the attempt ends as Busy and another one follows.
_LOCK_WAIT_SECONDS = 30.0
# Captures whose duration counts for one that has not begun: enough for a median, and few enough to follow a
# change of load.
MAX_REMEMBERED: Final = 9
_MAX_TRACED_ROOTS: Final = 32
# Steps of the sum over the time to the deadline.
_PARTS: Final = 1000
# Shortest step of that sum: progress, which it starts from, comes twice a second.
_MIN_STEP_SECONDS: Final = 0.5
log = structlog.get_logger(__name__)


class Context(NamedTuple):
    """The parts of the daemon that taking snapshots uses."""

    settings: Callable[[], Settings]
    roots: Callable[[], Mapping[str, RootSupervisor]]
    store: Callable[[], Store]
    runtime: RuntimeDirectory
    alerts: Alerts
    events: EventBus
    now_ns: Callable[[], int]
    host: str
    new_capture: Callable[[], CaptureProcess]
    flush: Flush = flush
    space: SpaceWatch | None = None
    """None: captures keep no reserve."""
    spans: SpanWriter | None = None
    """Takes the course of each snapshot; None: nobody asks for it."""
    ends: Callable[[], bool] = lambda: False
    """Returns whether this machine ends soon, so that captures make way for nobody."""
    on_urgency: Callable[[], None] = lambda: None
    """Called when the urgency of the running capture may have changed."""
    on_space_wanted: Callable[[], None] = lambda: None
    """Called when a snapshot was committed, or could not be for want of space."""
    on_scheduled_lost: Callable[[], None] = lambda: None
    """Called when a session ended before a scheduled snapshot had its root: another snapshot is due now."""

    def announce(self, kind: str, state: SnapshotState) -> None:
        """Announce a change of a snapshot's state on the bus."""
        self.events.emit(kind, snapshot=state)


class Capturing:
    """The task that captures what is queued."""

    def __init__(
        self,
        context: Context,
        queue: SnapshotQueue,
        promises: Promises,
        caller_waits: Callable[[], bool],
    ) -> None:
        """Prepare to capture.

        Args:
            context: parts of the daemon.
            queue: snapshots that were cut.
            promises: records of ids that were given out.
            caller_waits: whether a caller waits for the snapshot that is captured or for one behind it.
        """
        self._context = context
        self._queue = queue
        self._promises = promises
        self._caller_waits = caller_waits
        self.repository_lock = trio.Lock()
        """Held while a process of ours writes to the repository: captures and upkeep take turns."""
        self.last_failure: SnapshotState | None = None
        """The newest failure, if nothing was committed since."""
        self.last_cut_ns = 0
        """Wall clock of the cut of the newest snapshot that was committed in this daemon's life; 0 before
        the first."""
        self.trust = TrackingTrust(context.roots, context.runtime)
        self._durations = Durations()
        self.leaving = False
        """True if the daemon ends while its workers serve on, so that its successor captures what waits."""
        self._shortage = Shortage()
        self._lost_before = False
        self._left_out = _LeftOutAlerts(context.alerts)
        self._stopped = trio.Event()
        self._running = False

    def running(self) -> RunningProcess | None:
        """Return the capture that runs, with its urgency as of now; None where none does."""
        for pending in self._queue:
            if pending.process is not None and pending.process.pid:
                return RunningProcess(pending.process.pid, self.urgency(pending), pending.process.urge)
        return None

    def urgency(self, pending: PendingSnapshot) -> Urgency:
        """Return how urgent a capture is now."""
        if self._context.ends():
            return Urgency(min_share=1.0, requested=True)
        settings = self._context.settings()
        return Urgency(
            min_share=settings.min_share,
            finish_within_seconds=settings.finish_within_seconds,
            elapsed_seconds=max(0.0, trio.current_time() - pending.cut_at),
            requested=self._caller_waits(),
        )

    def estimate(self) -> None:
        """Set the remaining time of every unfinished snapshot."""
        total_seconds: float | None = 0.0
        typical_seconds = self._durations.typical_seconds
        for pending in self._queue.unfinished():
            progress = pending.state.progress
            left: float | None = typical_seconds
            if progress is not None and pending.capture_began_at is not None:
                elapsed_seconds = trio.current_time() - pending.capture_began_at
                left = seconds_left(progress, elapsed_seconds, self.urgency(pending))
            # Captures run one after the other, so each waits for those before it; after an unknown one all
            # are unknown.
            total_seconds = None if total_seconds is None or left is None else total_seconds + left
            pending.expect(total_seconds)

    async def run(self) -> None:
        """Capture what is queued, until cancelled.

        On cancellation the running capture ends and every epoch is given back, unless the workers serve on
        for a successor that captures what waits (`leaving`).
        """
        self._running = True
        try:
            while True:
                await self._capture_first()
        finally:
            # Limited, so that a worker that hangs does not keep the daemon from stopping.
            with trio.move_on_after(10, shield=True):
                for pending in () if self.leaving else self._queue:
                    await self._give_up(pending, Failed(error="the daemon stopped before it was captured"))
            self._queue.clear()
            self._stopped.set()

    async def stopped(self) -> None:
        """Wait until ``run``, cancelled, has given every epoch back; return at once if it never ran."""
        if self._running:
            await self._stopped.wait()

    async def _capture_first(self) -> None:
        pending = await self._queue.first()
        try:
            await self._settle(pending)
        except Exception as error:
            # A defect costs this snapshot and not the service: its changes go into the next one.
            log.exception("capture_defect", id=pending.id)
            await self._give_up(pending, Failed(error=f"a defect in ciuic: {error!r}"))
        if pending.failure is None:
            # Before the journal forgets the snapshot: a daemon that is killed in between has a successor that
            # does this again.
            await self._promises.remove(pending)
        self._queue.remove(pending)

    async def _settle(self, pending: PendingSnapshot) -> None:
        """Carry out what the phase of the snapshot asks for, until it is committed or given up."""
        if pending.record.scheduled:
            # A snapshot that somebody asked for is tried in any case; scheduled ones would write and remove
            # as much in vain with every interval.
            pending.require_space(self._shortage.needed_bytes())
        await _await_capture(pending)
        while True:
            if pending.finished.is_set() or await self._committed_already(pending):
                return
            phase = pending.phase
            if phase is Phase.EMPTY:
                await self._give_up(pending, Failed(error=pending.loss_reason))
                return
            if phase is Phase.DOUBTFUL:
                await settle_doubt(pending, self._context.roots)
            elif not await self._goes_on_after_attempt(pending):
                return

    async def _goes_on_after_attempt(self, pending: PendingSnapshot) -> bool:
        """Make one attempt, and wait until the next one where it fails.

        Return False when the snapshot is committed or given up.
        """
        pending.begin_attempt()
        async with self.repository_lock:
            outcome = await self._attempt(pending)
        if isinstance(outcome, Done):
            return False
        follows = pending.attempt_failed(outcome)
        if follows.action == "reconsider":
            return True
        log.warning(
            "capture_failed",
            id=pending.id,
            error=outcome.error,
            code=outcome.code,
            retry_after_seconds=follows.after_seconds,
        )
        if follows.action == "without_root":
            log.error("root_left_out", id=pending.id, root=follows.root, error=outcome.error)
            return True
        if follows.after_seconds is None:
            self._shortage.met(outcome.needed_bytes)
            await self._give_up(pending, outcome)
            return False
        pending.show_retry(outcome)
        self._context.alerts.report(
            "capture",
            f"snapshot {pending.id} waits: {outcome.error}",
            hint=outcome.hint,
            severity="warning",
        )
        # Upkeep may free the space that a full store lacks.
        self._context.on_space_wanted()
        await pending.retry_wait(follows.after_seconds)
        return True

    async def _attempt(self, pending: PendingSnapshot) -> Done | Failed:
        """Run one capture process, and return how it ended.

        On Done the snapshot is committed: callers that wait for it were told before the process ended.
        """
        space = self._context.space
        # Measured for each attempt: others may have taken or freed space meanwhile.
        room = await trio.to_thread.run_sync(space.measure) if space is not None else RepositoryStatus()
        try:
            job, fds = make_job(
                pending,
                self._context.settings(),
                self._context.roots(),
                self._context.host,
                self.urgency(pending),
            )
        except CiuicError as error:
            return Failed(error=str(error), hint=error.hint, code=EXIT_UNDO_LOST)
        job = msgspec.structs.replace(
            job,
            reserve_bytes=room.reserve_bytes,
            reserve_reason=room.reserve_reason,
            needed_bytes=pending.needed_bytes,
        )
        process = self._context.new_capture()
        try:
            with pending.attempt_by(process):
                return await process.run(
                    job,
                    fds,
                    on_start=lambda pid: self._capture_started(pending, pid),
                    on_progress=pending.attempt_progressed,
                    on_done=partial(self._commit, pending),
                )
        except OSError as error:
            return Failed(error=f"the capture process cannot be started: {error}")
        finally:
            for fd in fds:
                os.close(fd)

    def _capture_started(self, pending: PendingSnapshot, pid: int) -> None:
        pending.capture_started(pid, start_ticks(pid))
        # The journal has pid and start time, so that the successor of a killed daemon finds the capture and
        # waits for it.
        self._queue.write_journal()
        self._context.on_urgency()

    async def _commit(self, pending: PendingSnapshot, done: Done) -> None:
        # Called at `Done`, before the process ends: callers need not wait until it has closed the index (four
        # syncs of SQLite).
        for root in done.left_out:
            pending.leave_out(os.fsdecode(root.path), root.reason)
        await tell_workers(pending, self._context.roots(), committed=True)
        self.trust.settle(pending)
        unread = [f"{path_text(error.root)}/{path_text(error.path)}: {error.error}" for error in done.errors]
        pending.commit(new_bytes=done.new_bytes, errors=unread)
        self._durations.add(done.seconds)
        log.info(
            "snapshot_committed",
            id=pending.id,
            new_bytes=done.new_bytes,
            files_read=done.files_read,
            bytes_read=done.bytes_read,
            modes=done.modes,
            seconds=round(done.seconds, 3),
            unreadable=done.errors_total,
            left_out=pending.record.left_out,
        )
        self._after_commit(pending)
        if done.errors_total:
            self._context.alerts.report(
                "unreadable",
                f"{plural(done.errors_total, 'file')} could not be read into {pending.id}: {'; '.join(unread[:3])}",
                hint="the snapshot has everything else; look at the disk below the root",
                severity="warning",
            )
        else:
            self._context.alerts.clear("unreadable")
        await self._record_course(pending, done)

    async def _record_course(
        self, pending: PendingSnapshot, done: Done | None = None, error: str = ""
    ) -> None:
        """Record how a snapshot that is committed or given up came about; without `done` its figures are not known."""
        if self._context.spans is None:
            return
        record = pending.record
        figures: dict[str, Attribute] = {
            "ciuic.snapshot.roots": [
                one_line(os.fsencode(cut.path)) for cut in record.cuts[:_MAX_TRACED_ROOTS]
            ],
            "ciuic.cut.hold_ms": record.hold_microseconds / 1000,
            "ciuic.capture.attempts": record.attempts,
        }
        if done is not None:
            figures["ciuic.snapshot.files"] = done.files
            figures["ciuic.capture.files_read"] = done.files_read
            figures["ciuic.capture.bytes_read"] = done.bytes_read
            figures["ciuic.capture.bytes_stored"] = done.new_bytes
            figures["ciuic.commit.seconds"] = done.commit_seconds
        course = SnapshotCourse(pending.id, record.time_ns, self._context.now_ns(), figures, error)
        await self._context.spans.write(course)

    def _after_commit(self, pending: PendingSnapshot) -> None:
        self.last_failure = None
        self._shortage = Shortage()
        self.last_cut_ns = pending.record.time_ns
        self._context.alerts.clear("capture")
        self._context.alerts.clear("store")
        self._context.alerts.clear(KEY_MISSING)
        self._context.alerts.clear("clock")
        for cut in pending.remaining:
            # Changes that the end of a session may have hidden are in this snapshot.
            self._context.alerts.clear(f"worker:{cut.path}")
            self._context.alerts.clear(f"unmounted:{cut.path}")
        self._left_out.tell(pending)
        self._replace_lost(pending)
        self._context.on_space_wanted()

    def _replace_lost(self, pending: PendingSnapshot) -> None:
        """Have the schedule take another snapshot at once where a scheduled one has lost a root."""
        if not pending.record.scheduled:
            return
        # Once: a root whose worker dies at every cut would have one cut after the other.
        if pending.loss_reason and not self._lost_before:
            self._context.on_scheduled_lost()
        self._lost_before = bool(pending.loss_reason)

    async def _committed_already(self, pending: PendingSnapshot) -> bool:
        """Return whether an earlier attempt, or a predecessor's capture, has committed the snapshot."""
        # Without an attempt nothing can be committed, and the repository need not be opened.
        if pending.record.attempts == 0:
            return False
        try:
            # By all cuts: a root may count as lost because the repository did not answer before.
            answer = await trio.to_thread.run_sync(find_commit, self._context.store(), pending.record.cuts)
        except CiuicError as error:
            log.warning("repository_not_asked", id=pending.id, error=str(error))
            return False
        if answer is None:
            return False
        found, roots = answer
        for cut in pending.remaining:
            if cut.path not in roots:
                pending.leave_out(cut.path, "it could not be captured; the snapshot's own record says why")
        await tell_workers(pending, self._context.roots(), committed=True)
        pending.commit(new_bytes=found.new_bytes)
        log.info("snapshot_committed", id=pending.id, new_bytes=found.new_bytes, found="after restart")
        self._after_commit(pending)
        await self._record_course(pending)
        return True

    async def _give_up(self, pending: PendingSnapshot, failure: Failed) -> None:
        # It may be committed already, while its process had not ended yet.
        if pending.finished.is_set():
            return
        await tell_workers(pending, self._context.roots(), committed=False)
        # The loss is on file before any caller is told of it.
        await self._promises.record_loss(pending, failure.error)
        pending.fail(failure)
        self._replace_lost(pending)
        self.last_failure = pending.state
        log.error("snapshot_failed", id=pending.id, error=failure.error)
        self._context.alerts.report(
            "capture",
            f"snapshot {pending.id} of {rfc3339(pending.record.time_ns)} failed: {failure.error}",
            hint=failure.hint or "its changes will be in the next snapshot",
        )
        await self._record_course(pending, error=failure.error)

    def settings_changed(self) -> None:
        """Try the next scheduled snapshot even if the last one did not fit: other excludes may make it fit."""
        self._shortage = Shortage()


async def _await_capture(pending: PendingSnapshot) -> None:
    """Wait for a capture that a killed daemon had started: it works for the same id."""
    # The start time distinguishes the capture from a later process with the same pid.
    pid, ticks = pending.record.capture_pid, pending.record.capture_started_ticks
    if not pid:
        return
    log.info("predecessor_capture_awaited", id=pending.id, pid=pid)
    async with trio.open_nursery() as nursery:

        async def end_with_session() -> None:
            await pending.session_lost()
            await wait_for_stranger(pid, ticks, kill=True)

        nursery.start_soon(end_with_session)
        await wait_for_stranger(pid, ticks)
        nursery.cancel_scope.cancel()
    pending.predecessor_capture_ended()


def make_job(
    pending: PendingSnapshot,
    settings: Settings,
    roots: Mapping[str, RootSupervisor],
    host: str,
    urgency: Urgency,
) -> tuple[CaptureJob, list[int]]:
    """Return the job and duplicates of the descriptors that it names.

    The caller passes them on and closes them.

    Args:
        pending: snapshot with at least one remaining root.
        settings: settings in force.
        roots: supervisors of the roots, by path.
        host: name of this host, for the snapshot's record.
        urgency: deadline and share that the capture works under.

    Raises:
        CiuicError: the overlay session of a root has ended, which is in doubt then; or no root remains.
    """
    record = pending.record
    fds: list[int] = []
    jobs: list[RootJob] = []
    for cut in pending.remaining:
        try:
            # A snapshot that a predecessor cut has no entry: whether its tracking had a gap is not known.
            jobs.append(_root_job(cut, roots, fds, pending.trust_tracking.get(cut.path, False)))
        except BaseException as error:
            # The caller closes what is returned; of a job that is not returned the duplicates are closed
            # here.
            for fd in fds:
                os.close(fd)
            if isinstance(error, CiuicError):
                pending.doubt(cut.path, error.message)
            raise
    if not jobs:
        raise CiuicError("no root is left that could be captured")
    job = CaptureJob(
        repository=str(settings.repository),
        id=record.id,
        time_ns=record.time_ns,
        host=host,
        roots=tuple(jobs),
        left_out=_left_out(record),
        tags=tuple(record.tags),
        message=record.message,
        hold=record.hold,
        hold_reason=record.hold_reason or record.message if record.hold else "",
        hold_uid=record.user if record.hold else None,
        pair=record.pair,
        set_member=record.set_member,
        lock_wait_seconds=_LOCK_WAIT_SECONDS,
        io_priority=settings.io_priority,
        urgency=urgency,
        runtime_dir=str(settings.runtime_dir),
        trust_repository=settings.trust_repository,
    )
    return job, fds


def _left_out(record: PendingRecord) -> tuple[LeftOut, ...]:
    return tuple(LeftOut(path=os.fsencode(path), reason=reason) for path, reason in record.left_out.items())


def _root_job(
    cut: CutRecord, roots: Mapping[str, RootSupervisor], fds: list[int], trust_tracking: bool
) -> RootJob:
    supervisor = roots.get(cut.path)
    worker = supervisor.worker if supervisor else None
    if supervisor is None or worker is None or worker.session != cut.session:
        raise CiuicError(f"the overlay session of {cut.path} has ended")
    # Duplicates: a worker that ends closes its own at any time, and the numbers may be reused before the
    # fork.
    fds.append(os.dup(worker.backing_fd))
    backing_fd, undo_fd = fds[-1], -1
    # One that was deleted under a worker is made anew: the capture finds that by its name.
    if worker.undo_fd is not None and os.fstat(worker.undo_fd).st_nlink:
        fds.append(os.dup(worker.undo_fd))
        undo_fd = fds[-1]
    return RootJob(
        path=os.fsencode(cut.path),
        backing_fd=backing_fd,
        undo_fd=undo_fd,
        session=cut.session,
        epoch=cut.epoch,
        worker_pid=worker.pid,
        excludes=supervisor.settings.excludes,
        trust_tracking=trust_tracking,
    )


class _LeftOutAlerts:
    """Alerts about roots that a committed snapshot lacks.

    An alert stands until a committed snapshot has the root again or was requested without it.
    """

    def __init__(self, alerts: Alerts) -> None:
        self._alerts = alerts
        self._standing: set[str] = set()

    def tell(self, committed: PendingSnapshot) -> None:
        """Report roots that the snapshot lacks, and clear the others.

        A root that was not mounted has an alert of its own.
        """
        cut = {cut.path for cut in committed.record.cuts}
        left_out = {path: reason for path, reason in committed.record.left_out.items() if path in cut}
        for path in self._standing - left_out.keys():
            self._alerts.clear(f"left-out:{path}")
        self._standing = set(left_out)
        for path, reason in left_out.items():
            self._alerts.report(
                f"left-out:{path}",
                f"{path} is not in snapshot {committed.id}: {reason}",
                hint="its changes will be in the next snapshot that has it; the last one that had it is kept until then",
                root=path,
            )


def _done_part(progress: Progress) -> float | None:
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

    The estimate assumes that other load stays as it is, and takes into account that the capture's share rises until
    the deadline.

    Args:
        progress: its last progress.
        elapsed_seconds: time since its start.
        urgency: its deadline and share as of now.
    """
    part = _done_part(progress)
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
