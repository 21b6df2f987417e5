"""Taking snapshots: one cut at a time, one capture at a time, in the order of the cuts.

Guarantees: an id is given out only when every root's cut is made and the journal names it; each sealed epoch is in the
end either committed or given back to its worker. A snapshot whose id was given out is committed under that id: of the promised
instant, or, where what was sealed then is gone, of a later one, and says so (retaking.py); what cannot be committed fails whoever waits
for it and is on file as lost (promises.py). A killed daemon's successor goes on with the same ids (``resume``). Leaves to others: what a
cut and a capture are (cut.py, capture_process.py), when one is due (schedule.py), what stays (upkeep_process.py).

Belongs to the trio thread. Every await below may find the world changed: sessions end, captures are killed; ``interrupted`` of
a pending snapshot is looked at after each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import structlog
import trio

from ciuic.control_types import RepositoryStatus, SnapshotRequest, SnapshotState, rfc3339
from ciuic.daemon.alerts import KEY_MISSING, Alerts
from ciuic.daemon.capture_job import EXIT_UNDO_LOST, Done, Failed, printable
from ciuic.daemon.capture_process import CaptureProcess
from ciuic.daemon.cut import Flush, flush, mounted_roots
from ciuic.daemon.estimate import Durations, seconds_left
from ciuic.daemon.events import EventBus
from ciuic.daemon.job import make_job
from ciuic.daemon.left_out import LeftOutAlerts
from ciuic.daemon.pending import PendingSnapshot, retry_after
from ciuic.daemon.predecessor import await_capture
from ciuic.daemon.promises import Promises
from ciuic.daemon.retaking import MAX_RETAKES, RETAKE_PAUSES_SECONDS, Retaking, make_cut
from ciuic.daemon.runtime import PendingRecord, RuntimeDirectory
from ciuic.daemon.settings import Settings
from ciuic.daemon.snapshot_queue import SnapshotQueue
from ciuic.daemon.snapshot_requests import SharedCut, WaitingRequests
from ciuic.daemon.space import Shortage, SpaceWatch
from ciuic.daemon.store import Store
from ciuic.daemon.supervisor import RootSupervisor, backing_descriptors
from ciuic.daemon.trust import Trust
from ciuic.daemon.urging import Running
from ciuic.daemon.verdicts import find_commit, settle_epoch, tell_workers
from ciuic.daemon.worker_process import Worker
from ciuic.errors import Busy, CiuicError, NotFound
from ciuic.processes import start_ticks
from ciuic.types import Pair
from ciuic.units import plural
from ciuic.urgency import Urgency

MAX_PENDING = 8
"""Each pending epoch costs its root a copy of what the job overwrites: more than a few would be felt."""
ROOM_SECONDS = 60.0
"""For how long a request waits for one of those to be committed. What is captured meanwhile is hurried, so that a longer wait means
that the repository cannot be written, and the caller should know."""
log = structlog.get_logger(__name__)


class Context(NamedTuple):
    """What taking snapshots works with."""

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


class Snapshots:
    """The queue of pending snapshots and the task that captures them."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._queue = SnapshotQueue(context.runtime, context.alerts)
        self._requests = WaitingRequests()
        self._durations = Durations()
        self._cut_lock = trio.Lock()
        self.repository_lock = trio.Lock()
        """Held while a process of ours writes to the repository: captures and upkeep take turns."""
        self.on_committed: Callable[[], None] = lambda: None
        self.on_urgency: Callable[[], None] = lambda: None
        """The terms of what is captured may have changed."""
        self.on_scheduled_lost: Callable[[], None] = lambda: None
        """A session ended before a scheduled snapshot had its root: another is due now."""
        self.last_failure: SnapshotState | None = None
        self.last_cut_ns = 0
        """Of the newest snapshot committed in this daemon's life."""
        self._shortage = Shortage()
        self._left_out = LeftOutAlerts(context.alerts)
        self._stopped = trio.Event()
        self._running = False
        self.trust = Trust(context.roots, context.runtime)
        self.leaving = False
        """The daemon ends and its workers serve on: a successor captures what waits."""
        self._promises = Promises(context.store, context.now_ns)
        self._retaking = Retaking(self._queue, context.roots, lambda: self._context.flush, self._cut_lock)

    # -- asking for a snapshot

    async def take(
        self,
        request: SnapshotRequest,
        *,
        scheduled: bool = False,
        pair: Pair | None = None,
        hold_reason: str = "",
        user: int | None = None,
    ) -> PendingSnapshot:
        """Cut, and return when the instant is fixed, the id is final, and the journal names it. Cancelled, it may be cut all the same.

        Requests for the same that wait here are answered by one cut, which begins after each of them was made.

        Args:
            request: what to take.
            scheduled: the schedule asks, and nobody waits.
            pair: the training's state that the snapshot belongs to; it gets a cut of its own.
            hold_reason: why it is held; empty: the message says it.
            user: the ordinary user that asks for it, and for whom it is held where it is.

        Raises:
            Busy: as many as may wait for their capture still do after ROOM_SECONDS.
            NotFound: a root is not protected.
            CiuicError: no root can be cut.
        """
        requested = not scheduled and pair is None
        until_seconds = trio.current_time() + ROOM_SECONDS
        with self._requests.join(
            request, scheduled=scheduled, requested=requested, alone=pair is not None
        ) as cut:
            self.on_urgency()  # somebody waits, perhaps for room that a slow capture takes
            while (pending := cut.outcome) is None:
                if not await self._queue.has_room(MAX_PENDING, until_seconds):
                    raise Busy(
                        f"{plural(len(self._queue), 'snapshot has', 'snapshots have')} waited for capture for {ROOM_SECONDS:.0f} s, expected fewer than "
                        f"{MAX_PENDING}",
                        hint="see what keeps them, and try again later: ciuic status",
                    )
                async with self._cut_lock:  # the queue's order is the order of the epochs
                    # Others have had the lock before: they may have cut for us, or taken the room.
                    if cut.pending is None and cut.failure is None and len(self._queue) < MAX_PENDING:
                        self._requests.close(cut)
                        await self._cut_for(cut, pair=pair, hold_reason=hold_reason, user=user)
        return pending

    async def _cut_for(
        self, cut: SharedCut, *, pair: Pair | None, hold_reason: str, user: int | None
    ) -> None:
        """Cut, and leave the outcome where all that wait for it find it. A failure is everybody's: each would meet the same again."""
        try:
            await self._cut_now(cut, pair, hold_reason, user)
        except CiuicError as error:
            cut.failure = error

    async def _cut_now(self, cut: SharedCut, pair: Pair | None, hold_reason: str, user: int | None) -> None:
        supervisors, missing = await mounted_roots(self._context.roots(), cut.roots)
        try:
            snapshot_id, is_first = await self._new_id(supervisors)
        except CiuicError as error:
            key = KEY_MISSING if isinstance(error, NotFound) else "store"
            self._context.alerts.report(key, f"no snapshot can be taken: {error}", hint=error.hint)
            raise
        made = await make_cut(supervisors, self._context.flush)
        # No await from here until the queue has it: an epoch that was cut is known to the queue and the journal.
        record = PendingRecord(
            id=snapshot_id,
            time_ns=made.time_ns,
            cuts=list(made.records),
            message=cut.message,
            tags=list(dict.fromkeys([*cut.tags, *made.tags])),
            hold=cut.hold,
            hold_reason=hold_reason,
            user=user,
            pair=pair,
            scheduled=cut.scheduled,
            requested=cut.requested or is_first,
            hold_microseconds=made.hold_microseconds,
            left_out=dict.fromkeys(missing, "it was not mounted"),
        )
        cut.pending = PendingSnapshot(
            record,
            announce=self._announce,
            trust_tracking=made.trust_tracking,
            settles=made.settles,
            cut_at=trio.current_time(),
        )
        self._queue.add(cut.pending)
        self._announce("snapshot_cut", cut.pending.state)
        self.on_urgency()
        log.info(
            "snapshot_cut",
            id=record.id,
            roots=cut.pending.state.roots,
            hold_us=record.hold_microseconds,
            requests=cut.waiting,
        )
        # Still under the lock of the cut: no request is answered with an id that is not written down.
        await self._promises.give(cut.pending)

    def state(self, snapshot_id: str) -> PendingSnapshot | None:
        """A snapshot of this daemon's life, or None when it is not (or no longer) remembered."""
        self._estimate()
        return self._queue.find(snapshot_id)

    def unfinished(self) -> list[SnapshotState]:
        """Oldest first; and the last failure, if nothing was committed since."""
        self._estimate()
        failure = [self.last_failure] if self.last_failure else []
        return [*failure, *(pending.state for pending in self._queue.unfinished())]

    def pending_records(self) -> list[PendingRecord]:
        """Return the records of what is neither committed nor given up."""
        return [pending.record for pending in self._queue]

    def scheduled_roots(self) -> set[str]:
        """Return the roots of which a snapshot that the schedule asked for is on its way: another would only pile up."""
        scheduled = (pending for pending in self._queue.unfinished() if pending.record.scheduled)
        return {cut.path for pending in scheduled for cut in pending.remaining}

    async def _new_id(self, supervisors: Sequence[RootSupervisor]) -> tuple[str, bool]:
        """Return an id, and whether the snapshot is the first of one of its roots."""
        store = self._context.store()
        taken = self._queue.remembered
        paths = [supervisor.path for supervisor in supervisors]
        with backing_descriptors(supervisors) as fds:

            def work() -> tuple[str, bool]:
                store.ensure(fds)
                # A plain str: msgspec writes no subclass of it.
                return str(store.new_id(taken)), not store.has_all(paths)

            return await trio.to_thread.run_sync(work)

    # -- how urgent it is

    @property
    def somebody_waits(self) -> bool:
        """Whether somebody asked for what is captured, or for what waits behind it."""
        return self._requests.somebody_waits or any(
            pending.record.requested for pending in self._queue.unfinished()
        )

    def running(self) -> Running | None:
        """Return the capture that runs, with its terms as of now; None where none does."""
        for pending in self._queue:
            if pending.process is not None and pending.process.pid:
                return Running(pending.process.pid, self._urgency(pending), pending.process.urge)
        return None

    def _urgency(self, pending: PendingSnapshot) -> Urgency:
        settings = self._context.settings()
        return Urgency(
            min_share=settings.min_share,
            finish_within_seconds=settings.finish_within_seconds,
            elapsed_seconds=max(0.0, trio.current_time() - pending.cut_at),
            requested=self.somebody_waits,
        )

    def _estimate(self) -> None:
        """Write down for every snapshot on its way when it will be committed."""
        total_seconds: float | None = 0.0
        typical_seconds = self._durations.typical_seconds
        for pending in self._queue.unfinished():
            progress = pending.state.progress
            left: float | None = typical_seconds
            if progress is not None and pending.capture_began_at is not None:
                elapsed_seconds = trio.current_time() - pending.capture_began_at
                left = seconds_left(progress, elapsed_seconds, self._urgency(pending))
            total_seconds = None if total_seconds is None or left is None else total_seconds + left
            pending.state.seconds_left = total_seconds

    def _announce(self, kind: str, state: SnapshotState) -> None:
        self._context.events.emit(kind, snapshot=state)

    # -- capturing

    async def run(self) -> None:
        """Captures what is queued, for ever. Cancelled, it ends the running capture and gives every epoch back, unless the workers
        serve on for a successor that captures what waits (``leaving``)."""
        self._running = True
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._retaking.run)
                while True:
                    await self._bring_first_home()
        finally:
            with trio.move_on_after(10, shield=True):
                for pending in () if self.leaving else self._queue:
                    await self._give_up(pending, Failed(error="the daemon stopped before it was captured"))
            self._queue.clear()
            self._stopped.set()

    async def stopped(self) -> None:
        """``run`` has been cancelled and has given back what it had; at once if it never ran."""
        if self._running:
            await self._stopped.wait()

    async def _bring_first_home(self) -> None:
        pending = await self._queue.first()
        try:
            at_home = await self._bring_home(pending)
        except Exception as error:
            # A defect costs this snapshot, not the service: its changes go into the next one.
            log.exception("capture_defect", id=pending.id)
            await self._give_up(pending, Failed(error=f"a defect in ciuic: {error!r}"))
            at_home = True
        if at_home:
            if pending.failure is None:
                await self._promises.keep(
                    pending
                )  # before the journal forgets it: a successor does this again
            self._queue.remove(pending)

    async def _bring_home(self, pending: PendingSnapshot) -> bool:
        """Attempts until the snapshot is committed or given up; False where it was cut anew and others may be before it now."""
        if pending.record.scheduled:
            pending.needed_bytes = self._shortage.needed_bytes()
        await await_capture(pending)
        while True:
            if await self._committed_already(pending):
                return True
            if pending.is_lost():
                await self._give_up(pending, Failed(error=pending.lost))
                return True
            if pending.doubtful:
                await self._retaking.settle(pending)
                continue
            if pending.interrupted:
                return not await self._retaken(pending)
            pending.capturing()
            async with self.repository_lock:
                outcome = await self._attempt(pending)
            if isinstance(outcome, Done):
                return True
            if pending.has_lost_session:
                continue
            if outcome.code == EXIT_UNDO_LOST:
                # Given up by its worker, for want of space as a rule: what the same roots show now is captured under the same id.
                pending.interrupt_all(outcome.error)
                continue
            if not await self._wait_for_another_attempt(pending, outcome):
                return True

    async def _wait_for_another_attempt(self, pending: PendingSnapshot, outcome: Failed) -> bool:
        """After a failure. False when the snapshot was given up."""
        pending.needed_bytes = max(pending.needed_bytes, outcome.needed_bytes)
        waited = trio.current_time() - pending.cut_at
        after = retry_after(outcome, pending.tries, waited).after_seconds
        log.warning(
            "capture_failed",
            id=pending.id,
            error=outcome.error,
            code=outcome.code,
            retry_after_seconds=after,
        )
        if after is None:
            culprit = pending.leave_out_culprit(outcome)
            if culprit:
                log.error("root_left_out", id=pending.id, root=culprit, error=outcome.error)
                return True
            self._shortage.met(outcome.needed_bytes)
            await self._give_up(pending, outcome)
            return False
        pending.waiting(outcome)
        self._context.alerts.report(
            "capture",
            f"snapshot {pending.id} waits: {outcome.error}",
            hint=outcome.hint,
            severity="warning",
        )
        self.on_committed()  # upkeep may free what a full store lacks
        with trio.move_on_after(after):
            await pending.wake.wait()
        return True

    async def _retaken(self, pending: PendingSnapshot) -> bool:
        """Cut an interrupted snapshot anew. False when it was given up: it has no root left, or cannot be cut."""
        reason = next(iter(pending.interrupted.values()))
        error = ""
        while pending.interrupted and pending.retakes < MAX_RETAKES:
            await trio.sleep(RETAKE_PAUSES_SECONDS[pending.retakes])
            pending.retakes += 1
            try:
                await self._retaking.retake(pending)
            except CiuicError as failure:
                error = str(failure)
                log.warning("snapshot_not_retaken", id=pending.id, error=error)
        if not pending.interrupted:
            return True
        text = f"{reason}; it could not be cut anew in {MAX_RETAKES} attempts{error and f': {error}'}"
        await self._give_up(pending, Failed(error=text))
        return False

    async def _attempt(self, pending: PendingSnapshot) -> Done | Failed:
        """One capture. On Done the snapshot was seen to: whoever waits for it has been told before its process ended."""
        space = self._context.space
        room = await trio.to_thread.run_sync(space.look) if space is not None else RepositoryStatus()
        try:
            job, fds = make_job(
                pending,
                self._context.settings(),
                self._context.roots(),
                self._context.host,
                self._urgency(pending),
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
        pending.process = process
        try:
            return await process.run(
                job,
                fds,
                on_start=lambda pid: self._capture_started(pending, pid),
                on_progress=pending.progressed,
                on_done=partial(self._commit, pending),
            )
        except OSError as error:
            return Failed(error=f"the capture process cannot be started: {error}")
        finally:
            pending.process = None
            pending.record.capture_pid = 0
            for fd in fds:
                os.close(fd)

    def _capture_started(self, pending: PendingSnapshot, pid: int) -> None:
        pending.record.capture_pid = pid
        pending.record.capture_started_ticks = start_ticks(pid)
        self._queue.write_journal()
        self.on_urgency()

    async def _commit(self, pending: PendingSnapshot, done: Done) -> None:
        for root in done.left_out:
            pending.leave_out(os.fsdecode(root.path), root.reason)
        await tell_workers(pending, self._context.roots(), committed=True)
        self.trust.settle(pending)
        unread = [f"{printable(error.root)}/{printable(error.path)}: {error.error}" for error in done.errors]
        pending.committed(new_bytes=done.new_bytes, errors=unread)
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

    def _after_commit(self, pending: PendingSnapshot) -> None:
        self.last_failure = None
        self._shortage = Shortage()
        self.last_cut_ns = max(self.last_cut_ns, pending.record.time_ns)
        self._context.alerts.clear("capture")
        self._context.alerts.clear("store")
        self._context.alerts.clear(KEY_MISSING)
        self._context.alerts.clear("clock")
        for cut in pending.remaining:
            # What the end of a session may have hidden is in this snapshot.
            self._context.alerts.clear(f"worker:{cut.path}")
            self._context.alerts.clear(f"unmounted:{cut.path}")
        self._left_out.tell(pending)
        if pending.record.scheduled and pending.lost:
            self.on_scheduled_lost()
        self.on_committed()

    async def _committed_already(self, pending: PendingSnapshot) -> bool:
        """Whether an earlier attempt, or a predecessor's capture, got as far as the commit."""
        if pending.record.attempts == 0:
            return False
        try:
            answer = await trio.to_thread.run_sync(find_commit, self._context.store(), pending.remaining)
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
        pending.committed(new_bytes=found.new_bytes)
        log.info("snapshot_committed", id=pending.id, new_bytes=found.new_bytes, found="after restart")
        self._after_commit(pending)
        return True

    async def _give_up(self, pending: PendingSnapshot, failure: Failed) -> None:
        if pending.finished.is_set():  # committed, and only its process had not ended yet
            return
        await tell_workers(pending, self._context.roots(), committed=False)
        await self._promises.lose(pending, failure.error)  # on file before anybody is told
        pending.failed(failure)
        if pending.record.scheduled and pending.is_lost():
            self.on_scheduled_lost()
        self.last_failure = pending.state
        log.error("snapshot_failed", id=pending.id, error=failure.error)
        self._context.alerts.report(
            "capture",
            f"snapshot {pending.id} of {rfc3339(pending.record.time_ns)} failed: {failure.error}",
            hint=failure.hint or "its changes will be in the next snapshot",
        )

    def settings_changed(self) -> None:
        """The next scheduled snapshot is tried whatever became of the last one: other excludes may make it fit."""
        self._shortage = Shortage()

    # -- sessions that end, daemons that follow one another

    def session_lost(self, path: str, session: str) -> None:
        """The worker of ``path`` has ended or is being stopped: what it sealed cannot be captured exactly, unless a successor goes on
        with it."""
        self._queue.doubt(path, session, f"the overlay session of {path} ended before the capture did")
        self._retaking.wanted()

    async def resume(self, records: list[PendingRecord]) -> None:
        """Takes up what a predecessor had promised: as it was sealed where the sessions still live, cut anew where they do not."""
        roots = self._context.roots()
        for record in records:
            pending = PendingSnapshot(record, announce=self._announce, cut_at=trio.current_time())
            self._queue.add(pending)
            self._announce("snapshot_cut", pending.state)
            for cut in record.cuts:
                supervisor = roots.get(cut.path)
                worker = supervisor.worker if supervisor else None
                if worker is None or worker.session != cut.session:
                    reason = f"the overlay session of {cut.path} ended with the daemon before this one"
                    pending.interrupt(cut.path, reason)
            log.info("snapshot_resumed", id=record.id, interrupted=pending.interrupted)
        self._retaking.wanted()
        await self._promises.take_stock({record.id for record in records})

    async def reconcile(self, path: str, worker: Worker) -> None:
        """Settles the epochs that an worker calls pending and that no queued snapshot is about."""
        async with self._cut_lock:  # an epoch just cut is pending before the queue knows of it
            try:
                epochs = (await worker.ask(lambda client: client.status())).pending
            except CiuicError as error:
                log.warning("worker_not_asked", root=path, error=str(error))
                return
            queued = self._queue.epochs()
            for epoch in epochs:
                if (path, worker.session, epoch) not in queued:
                    await settle_epoch(self._context.store(), path, worker, epoch)
