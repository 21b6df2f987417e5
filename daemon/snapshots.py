"""Taking snapshots: one cut at a time, one capture at a time, in the order of the cuts.

Guarantees: an id is given out only when every root's cut is made and the journal names it; each sealed epoch is in the
end either committed or given back to its worker; a snapshot whose overlay session ended is never committed. A killed
daemon's successor goes on with the same ids (``resume``). Leaves to others: what a cut and a capture are (cut.py,
capture_process.py), when one is due (schedule.py), what stays (upkeep_process.py).

Belongs to the trio thread. Every await below may find the world changed: sessions end, captures are killed; ``lost`` of
a pending snapshot is looked at after each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import structlog
import trio

from ciuic.control_types import SnapshotRequest, SnapshotState, rfc3339
from ciuic.daemon.alerts import Alerts
from ciuic.daemon.capture_job import EXIT_UNDO_LOST, Done, Failed, printable
from ciuic.daemon.capture_process import CaptureProcess
from ciuic.daemon.cut import Flush, cut_all, flush, flush_all, mounted_roots
from ciuic.daemon.estimate import Durations, seconds_left
from ciuic.daemon.events import EventBus
from ciuic.daemon.job import make_job
from ciuic.daemon.left_out import LeftOutAlerts
from ciuic.daemon.pending import PendingSnapshot, retry_after
from ciuic.daemon.predecessor import await_capture
from ciuic.daemon.runtime import CutRecord, PendingRecord, RuntimeDirectory
from ciuic.daemon.settings import Settings
from ciuic.daemon.snapshot_queue import SnapshotQueue
from ciuic.daemon.snapshot_requests import SharedCut, WaitingRequests
from ciuic.daemon.store import LastSnapshot, Store
from ciuic.daemon.supervisor import RootSupervisor, backing_descriptors
from ciuic.daemon.trust import Trust
from ciuic.daemon.urging import Running
from ciuic.daemon.verdicts import tell_workers
from ciuic.daemon.worker_process import Worker
from ciuic.errors import Busy, CiuicError
from ciuic.processes import start_ticks
from ciuic.types import Pair
from ciuic.urgency import Urgency

MAX_PENDING = 8
"""Each pending epoch costs its root a copy of what the job overwrites: more than a few would be felt."""
ROOM_SECONDS = 60.0
"""For how long a request waits for one of those to be committed. What is captured meanwhile is hurried, so that a longer wait means
that the repository cannot be written, and the caller should know."""
TAG_UNFLUSHED = "unflushed"
"""On a snapshot for which the kernel's cached writes could not all be written back in time."""
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
        self._left_out = LeftOutAlerts(context.alerts)
        self._stopped = trio.Event()
        self._running = False
        self.trust = Trust(context.roots, context.runtime)

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
                        f"{len(self._queue)} snapshots have waited for capture for {ROOM_SECONDS:.0f} s, expected fewer than "
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
        snapshot_id, is_first = await self._new_id(supervisors)
        tags = cut.tags
        if not await flush_all(supervisors, self._context.flush):
            tags = [*tags, TAG_UNFLUSHED]
        for supervisor in supervisors:
            await supervisor.refresh_bypassing()
        trusted = {supervisor.path: not supervisor.untrusted for supervisor in supervisors}
        # Whoever went round is gone before this cut: a capture that compares everything has all they wrote.
        settles = {supervisor.path for supervisor in supervisors if supervisor.all_accounted}
        cuts = await cut_all(supervisors)
        # No await from here to the end: an epoch that was cut is known to the queue and the journal.
        record = PendingRecord(
            id=snapshot_id,
            time_ns=max(one.cut_ns for one in cuts),
            cuts=[CutRecord(path=one.path, session=one.session, epoch=one.epoch) for one in cuts],
            message=cut.message,
            tags=tags,
            hold=cut.hold,
            hold_reason=hold_reason,
            user=user,
            pair=pair,
            scheduled=cut.scheduled,
            requested=cut.requested or is_first,
            hold_microseconds=max(one.hold_us for one in cuts),
            left_out=dict.fromkeys(missing, "it was not mounted"),
        )
        cut.pending = PendingSnapshot(
            record,
            announce=self._announce,
            trust_tracking=trusted,
            settles=settles,
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

    def scheduled_is_waiting(self) -> bool:
        """Whether a snapshot that the schedule asked for is still on its way: another would only pile up."""
        return any(pending.record.scheduled for pending in self._queue.unfinished())

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
        """Captures what is queued, for ever. Cancelled, it ends the running capture and gives every epoch back."""
        self._running = True
        try:
            while True:
                pending = await self._queue.first()
                try:
                    await self._bring_home(pending)
                except Exception as error:
                    # A defect costs this snapshot, not the service: its changes go into the next one.
                    log.exception("capture_defect", id=pending.id)
                    await self._give_up(pending, Failed(error=f"a defect in ciuic: {error!r}"))
                self._queue.remove(pending)
        finally:
            with trio.move_on_after(10, shield=True):
                for pending in self._queue:
                    await self._give_up(pending, Failed(error="the daemon stopped before it was captured"))
            self._queue.clear()
            self._stopped.set()

    async def stopped(self) -> None:
        """``run`` has been cancelled and has given back what it had; at once if it never ran."""
        if self._running:
            await self._stopped.wait()

    async def _bring_home(self, pending: PendingSnapshot) -> None:
        """Attempts until the snapshot is committed or given up."""
        await await_capture(pending)
        while True:
            if pending.is_lost():
                await self._give_up(pending, Failed(error=pending.lost))
                return
            if await self._committed_already(pending):
                return
            pending.capturing()
            async with self.repository_lock:
                outcome = await self._attempt(pending)
            if isinstance(outcome, Done):
                return
            if pending.has_lost_session:
                continue
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
                    continue
                await self._give_up(pending, outcome)
                return
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

    async def _attempt(self, pending: PendingSnapshot) -> Done | Failed:
        """One capture. On Done the snapshot was seen to: whoever waits for it has been told before its process ended."""
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
                f"{done.errors_total} files could not be read into {pending.id}: {'; '.join(unread[:3])}",
                hint="the snapshot has everything else; look at the disk below the root",
                severity="warning",
            )
        else:
            self._context.alerts.clear("unreadable")

    def _after_commit(self, pending: PendingSnapshot) -> None:
        self.last_failure = None
        self.last_cut_ns = max(self.last_cut_ns, pending.record.time_ns)
        self._context.alerts.clear("capture")
        self._context.alerts.clear("store")
        self._context.alerts.clear("clock")
        for cut in pending.remaining:
            self._context.alerts.clear(
                f"worker:{cut.path}"
            )  # what its death may have hidden is in this snapshot
        self._left_out.tell(pending)
        if pending.record.scheduled and pending.lost:
            self.on_scheduled_lost()
        self.on_committed()

    async def _committed_already(self, pending: PendingSnapshot) -> bool:
        """Whether an earlier attempt, or a predecessor's capture, got as far as the commit."""
        if pending.record.attempts == 0:
            return False
        store = self._context.store()

        def look() -> tuple[LastSnapshot, frozenset[str]] | None:
            for cut in pending.remaining:
                snapshot = store.snapshot_of_epoch(cut.path, cut.session, cut.epoch)
                if snapshot is not None:
                    return snapshot, store.roots_of(snapshot.id)
            return None

        try:
            answer = await trio.to_thread.run_sync(look)
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

    # -- sessions that end, daemons that follow one another

    def session_lost(self, path: str, session: str) -> None:
        """The worker of ``path`` has ended or is being stopped: what it sealed can no longer be captured exactly."""
        self._queue.lose(path, session, f"the overlay session of {path} ended before the capture did")

    def resume(self, records: list[PendingRecord]) -> None:
        """Takes up what a killed predecessor had promised, as far as the sessions still live."""
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
                    pending.lose(cut.path, reason)
            log.info("snapshot_resumed", id=record.id, lost=pending.lost)

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
                    await self._settle(path, worker, epoch)

    async def _settle(self, path: str, worker: Worker, epoch: int) -> None:
        store = self._context.store()
        try:
            found = await trio.to_thread.run_sync(store.snapshot_of_epoch, path, worker.session, epoch)
            if found is not None:
                await worker.ask(lambda client: client.committed(epoch))
            else:
                await worker.ask(lambda client: client.abort(epoch))
            log.info("epoch_reconciled", root=path, epoch=epoch, snapshot=found.id if found else "")
        except CiuicError as error:
            log.warning("epoch_not_reconciled", root=path, epoch=epoch, error=str(error))
