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

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

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
from ciuic.daemon.snapshots.snapshot_queue import ROOM_SECONDS, SnapshotQueue
from ciuic.daemon.snapshots.snapshot_requests import CutTurns, SharedCut, WaitingRequests
from ciuic.errors import CiuicError, NotFound
from ciuic.protocol.control_types import SnapshotRequest, SnapshotState
from ciuic.types import Pair

log = structlog.get_logger(__name__)


class Snapshots:
    """The queue of pending snapshots and the task that captures them."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._queue = SnapshotQueue(context.runtime, context.alerts)
        self._requests = WaitingRequests()
        self.resumed = trio.Event()
        """Set when the snapshots of a predecessor are taken over, so that all promised ones are known."""
        # A cut's turn lasts from the choice of the id until the queue and the journal have the cut. Order of
        # locks: it is never taken while `Capturing.repository_lock` is held.
        self._turns = CutTurns()
        # Ids of snapshots that are being cut.
        self._new_ids: set[str] = set()
        self._promises = Promises(context.store, context.now_ns)
        self._retaking = Retaking(self._queue, context.roots, lambda: self._context.flush, self._turns)
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
            Busy: the queue has no place for this user after ROOM_SECONDS.
            NotFound: a root is not protected.
            CiuicError: no root can be cut.
        """
        requested = not scheduled and pair is None
        until_seconds = trio.current_time() + ROOM_SECONDS
        with self._requests.join(
            request, scheduled=scheduled, requested=requested, alone=pair is not None, user=user
        ) as cut:
            # The request may wait for a place in the queue that a slow capture takes, so that capture is
            # hurried.
            self.capturing.on_urgency()
            async with self._turns.of(user):
                # A request that had the turn before may have cut for this one too.
                if (pending := cut.outcome) is None:
                    async with self._queue.place(user, until_seconds):
                        self._requests.close(cut)
                        try:
                            pending = await self._cut_now(cut, pair, hold_reason, user)
                        except CiuicError as error:
                            # A failure is for all merged requests: each would meet the same again.
                            cut.failure = error
                            raise
        return pending

    def is_full(self, user: int) -> bool:
        """Return whether a request of this ordinary user would have to wait for a place."""
        return self._queue.is_full(user)

    async def _cut_now(
        self, cut: SharedCut, pair: Pair | None, hold_reason: str, user: int | None
    ) -> PendingSnapshot:
        """Cut, and put the snapshot into the queue."""
        supervisors, missing = await mounted_roots(self._context.roots(), cut.roots)
        async with self._new_id(supervisors) as (snapshot_id, is_first):
            turn = partial(self._turns.cut, user)
            async with make_cut(supervisors, self._context.flush, turn) as made:
                # No await from here until the queue has the snapshot: an epoch that was cut must be known to
                # the queue and the journal.
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
                cut.pending = pending = PendingSnapshot(
                    record,
                    announce=self._announce,
                    trust_tracking=made.trust_tracking,
                    unbypassed=made.unbypassed,
                    cut_at=trio.current_time(),
                )
                self._queue.add(pending)
                self._announce("snapshot_cut", pending.state)
                self.capturing.on_urgency()
                log.info(
                    "snapshot_cut",
                    id=record.id,
                    roots=pending.state.roots,
                    hold_us=record.hold_microseconds,
                    requests=cut.waiting,
                )
                # Still within the turn: no request is answered with an id that is not on file.
                await self._promises.record(pending)
        return pending

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

    @asynccontextmanager
    async def _new_id(self, supervisors: Sequence[RootSupervisor]) -> AsyncIterator[tuple[str, bool]]:
        """Yield an id that no other snapshot gets, and whether the snapshot is the first of one of its roots."""
        store = self._context.store()
        paths = [supervisor.path for supervisor in supervisors]

        def work(taken: frozenset[str]) -> tuple[str, bool]:
            store.ensure(fds)
            # A plain str: msgspec writes no subclass of it.
            return str(store.new_id(taken)), not store.has_all(paths)

        try:
            with backing_descriptors(supervisors) as fds:
                while True:
                    taken = self._queue.remembered | self._new_ids
                    new_id, is_first = await trio.to_thread.run_sync(work, taken)
                    # Another request may have drawn the same meanwhile.
                    if new_id not in self._queue.remembered | self._new_ids:
                        break
        except CiuicError as error:
            key = KEY_MISSING if isinstance(error, NotFound) else "store"
            self._context.alerts.report(key, f"no snapshot can be taken: {error}", hint=error.hint)
            raise
        self._new_ids.add(new_id)
        try:
            yield new_id, is_first
        finally:
            self._new_ids.discard(new_id)

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
        async with self._turns.cut(None):
            try:
                epochs = (await worker.ask(lambda client: client.status())).pending
            except CiuicError as error:
                log.warning("worker_not_asked", root=path, error=str(error))
                return
            queued = self._queue.epochs()
            for epoch in epochs:
                if (path, worker.session, epoch) not in queued:
                    await settle_epoch(self._context.store(), path, worker, epoch)
