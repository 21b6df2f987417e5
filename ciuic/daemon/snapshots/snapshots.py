"""Take snapshots: one cut at a time, whose epochs are captured in the order of the cuts (capturing.py).

Guarantees: an id is given out only when every root's cut is made and the journal names it. A snapshot whose
id was given out is committed under that id: as of the promised instant, or, where the sealed epochs are gone,
as of a later one, and says so (retaking.py). When a snapshot cannot be committed, every caller that waits
gets an error, and the loss is on file (promises.py). A killed daemon's successor goes on with the same ids
(`resume`). Leaves to others: what a cut is (cut.py), when one is due (schedule.py), which snapshots are kept
(upkeep_process.py).

Belongs to the trio thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog
import trio

from ciuic.daemon.base.alerts import KEY_MISSING
from ciuic.daemon.base.runtime import PendingRecord
from ciuic.daemon.roots.backing_descriptors import backing_descriptors
from ciuic.daemon.roots.supervisor import RootSupervisor
from ciuic.daemon.roots.worker_process import OverlayWorker
from ciuic.daemon.snapshots.capturing import Capturing, Context
from ciuic.daemon.snapshots.cut import mounted_roots
from ciuic.daemon.snapshots.epoch_outcomes import settle_epoch
from ciuic.daemon.snapshots.estimate import seconds_left
from ciuic.daemon.snapshots.pending import PendingSnapshot
from ciuic.daemon.snapshots.promises import Promises
from ciuic.daemon.snapshots.retaking import Retaking, make_cut
from ciuic.daemon.snapshots.snapshot_queue import SnapshotQueue
from ciuic.daemon.snapshots.snapshot_requests import SharedCut, WaitingRequests
from ciuic.errors import Busy, CiuicError, NotFound
from ciuic.protocol.control_types import SnapshotRequest, SnapshotState
from ciuic.types import Pair
from ciuic.units import plural

# Longest queue. Each pending epoch costs its root a copy of what the job overwrites, and more than a few
# would slow the job.
MAX_PENDING = 8
# Longest wait of a request for a full queue. The running capture is hurried meanwhile, so a longer wait means
# that the repository cannot be written, and the caller should know.
ROOM_SECONDS = 60.0
log = structlog.get_logger(__name__)


class Snapshots:
    """The queue of pending snapshots and the task that captures them."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._queue = SnapshotQueue(context.runtime, context.alerts)
        self._requests = WaitingRequests()
        self.resumed = trio.Event()
        """Set when the snapshots of a predecessor are taken over, so that all promised ones are known."""
        # Held from the choice of the id until the queue and the journal have the cut. Order of locks: this
        # one is never taken while `Capturing.repository_lock` is held.
        self._cut_lock = trio.Lock()
        self._promises = Promises(context.store, context.now_ns)
        self._retaking = Retaking(self._queue, context.roots, lambda: self._context.flush, self._cut_lock)
        self.capturing = Capturing(
            context, self._queue, self._promises, self._retaking, lambda: self.caller_waits
        )

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
        """Cut, and return when the instant is fixed, the id is final, and the journal names it.

        Waiting requests for the same are answered by one cut, which begins after each of them was made. A
        request that is cancelled may be cut all the same.

        Args:
            request: roots, tags, message and hold.
            scheduled: the schedule asks, and no caller waits.
            pair: training state that the snapshot belongs to; the request gets a cut of its own.
            hold_reason: reason for a hold; empty: the message says it.
            user: ordinary user that asks, and for whom a hold is; None for administrators.

        Raises:
            Busy: the queue is still full after ROOM_SECONDS.
            NotFound: a root is not protected.
            CiuicError: no root can be cut.
        """
        requested = not scheduled and pair is None
        until_seconds = trio.current_time() + ROOM_SECONDS
        with self._requests.join(
            request, scheduled=scheduled, requested=requested, alone=pair is not None
        ) as cut:
            # The request may wait for a place in the queue that a slow capture takes, so that capture is
            # hurried.
            self.capturing.on_urgency()
            while (pending := cut.outcome) is None:
                if not await self._queue.has_room(MAX_PENDING, until_seconds):
                    raise Busy(
                        f"{plural(len(self._queue), 'snapshot has', 'snapshots have')} waited for capture for {ROOM_SECONDS:.0f} s, expected fewer than "
                        f"{MAX_PENDING}",
                        hint="see why with ciuic status, and try again later",
                    )
                # Held until the queue has the cut, so that the order of the queue is the order of the epochs.
                async with self._cut_lock:
                    # A request that had the lock before may have cut for this one too, or taken the last
                    # place.
                    if cut.pending is None and cut.failure is None and len(self._queue) < MAX_PENDING:
                        self._requests.close(cut)
                        await self._cut_for(cut, pair=pair, hold_reason=hold_reason, user=user)
        return pending

    async def _cut_for(
        self, cut: SharedCut, *, pair: Pair | None, hold_reason: str, user: int | None
    ) -> None:
        """Cut, and store the snapshot or the failure for all merged requests.

        A failure is for all: each would meet the same again.
        """
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
        # No await from here until the queue has the snapshot: an epoch that was cut must be known to the
        # queue and the journal.
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
            unbypassed=made.unbypassed,
            cut_at=trio.current_time(),
        )
        self._queue.add(cut.pending)
        self._announce("snapshot_cut", cut.pending.state)
        self.capturing.on_urgency()
        log.info(
            "snapshot_cut",
            id=record.id,
            roots=cut.pending.state.roots,
            hold_us=record.hold_microseconds,
            requests=cut.waiting,
        )
        # Still under the cut lock: no request is answered with an id that is not on file.
        await self._promises.record(cut.pending)

    def state(self, snapshot_id: str) -> PendingSnapshot | None:
        """Return a snapshot of this daemon's life, or None when it is not (or no longer) remembered."""
        self._estimate()
        return self._queue.find(snapshot_id)

    def unfinished(self) -> list[SnapshotState]:
        """Return the states of unfinished snapshots, oldest first.

        The last failure comes before them, if nothing was committed since.
        """
        self._estimate()
        failure = [failed] if (failed := self.capturing.last_failure) else []
        return [*failure, *(pending.state for pending in self._queue.unfinished())]

    def pending_records(self) -> list[PendingRecord]:
        """Return the records of queued snapshots."""
        return [pending.record for pending in self._queue]

    def scheduled_roots(self) -> set[str]:
        """Return the roots with a scheduled snapshot on its way: another one would only lengthen the queue."""
        scheduled = (pending for pending in self._queue.unfinished() if pending.record.scheduled)
        return {cut.path for pending in scheduled for cut in pending.remaining}

    async def _new_id(self, supervisors: Sequence[RootSupervisor]) -> tuple[str, bool]:
        """Return a new id, and whether the snapshot is the first of one of its roots."""
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
    def caller_waits(self) -> bool:
        """True if a caller waits for the snapshot that is captured, for one behind it, or for a cut."""
        return self._requests.caller_waits or any(
            pending.record.requested for pending in self._queue.unfinished()
        )

    def _estimate(self) -> None:
        """Set the remaining time of every unfinished snapshot."""
        total_seconds: float | None = 0.0
        typical_seconds = self.capturing.durations.typical_seconds
        for pending in self._queue.unfinished():
            progress = pending.state.progress
            left: float | None = typical_seconds
            if progress is not None and pending.capture_began_at is not None:
                elapsed_seconds = trio.current_time() - pending.capture_began_at
                left = seconds_left(progress, elapsed_seconds, self.capturing.urgency(pending))
            # Captures run one after the other, so each waits for those before it; after an unknown one all
            # are unknown.
            total_seconds = None if total_seconds is None or left is None else total_seconds + left
            pending.state.seconds_left = total_seconds

    def _announce(self, kind: str, state: SnapshotState) -> None:
        self._context.events.emit(kind, snapshot=state)

    # -- sessions that end, daemons that follow one another

    def session_lost(self, path: str, session: str) -> None:
        """Put the sealed epochs of a session into doubt: its worker has ended or is being stopped.

        They cannot be captured exactly unless a successor goes on with the session.
        """
        self._queue.doubt(path, session, f"the overlay session of {path} ended before the capture did")
        self._retaking.wanted()

    async def resume(self, records: list[PendingRecord]) -> None:
        """Take over the snapshots of a predecessor.

        They are captured as sealed where the sessions still live, and cut anew where they do not.
        """
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
        self.resumed.set()
        # After all records are queued: what is on its way must not be recorded as lost.
        await self._promises.record_forgotten({record.id for record in records})

    async def reconcile(self, path: str, worker: OverlayWorker) -> None:
        """Settle the epochs that a worker calls pending and that belong to no queued snapshot."""
        # Under the lock: an epoch that is just being cut is pending in its worker before the queue has it.
        async with self._cut_lock:
            try:
                epochs = (await worker.ask(lambda client: client.status())).pending
            except CiuicError as error:
                log.warning("worker_not_asked", root=path, error=str(error))
                return
            queued = self._queue.epochs()
            for epoch in epochs:
                if (path, worker.session, epoch) not in queued:
                    await settle_epoch(self._context.store(), path, worker, epoch)
