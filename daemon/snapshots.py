"""Taking snapshots: one cut at a time, whose epochs are captured in the order of the cuts (capturing.py).

Guarantees: an id is given out only when every root's cut is made and the journal names it. A snapshot whose id was given out is
committed under that id: of the promised instant, or, where what was sealed then is gone, of a later one, and says so (retaking.py).
For a snapshot that cannot be committed, every caller that waits gets an error, and it is on file as lost (promises.py). A killed daemon's successor goes on with the
same ids (``resume``). Leaves to others: what a cut is (cut.py), when one is due (schedule.py), what stays (upkeep_process.py).

Belongs to the trio thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog
import trio

from ciuic.control_types import SnapshotRequest, SnapshotState
from ciuic.daemon.alerts import KEY_MISSING
from ciuic.daemon.capturing import Capturing, Context
from ciuic.daemon.cut import mounted_roots
from ciuic.daemon.estimate import seconds_left
from ciuic.daemon.pending import PendingSnapshot
from ciuic.daemon.promises import Promises
from ciuic.daemon.retaking import Retaking, make_cut
from ciuic.daemon.runtime import PendingRecord
from ciuic.daemon.snapshot_queue import SnapshotQueue
from ciuic.daemon.snapshot_requests import SharedCut, WaitingRequests
from ciuic.daemon.supervisor import RootSupervisor, backing_descriptors
from ciuic.daemon.verdicts import settle_epoch
from ciuic.daemon.worker_process import Worker
from ciuic.errors import Busy, CiuicError, NotFound
from ciuic.types import Pair
from ciuic.units import plural

MAX_PENDING = 8
"""Each pending epoch costs its root a copy of what the job overwrites: more than a few would be felt."""
ROOM_SECONDS = 60.0
"""For how long a request waits for one of those to be committed. What is captured meanwhile is hurried, so that a longer wait means
that the repository cannot be written, and the caller should know."""
log = structlog.get_logger(__name__)


class Snapshots:
    """The queue of pending snapshots and the task that captures them."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._queue = SnapshotQueue(context.runtime, context.alerts)
        self._requests = WaitingRequests()
        self._cut_lock = trio.Lock()
        self._promises = Promises(context.store, context.now_ns)
        self._retaking = Retaking(self._queue, context.roots, lambda: self._context.flush, self._cut_lock)
        self.capturing = Capturing(
            context, self._queue, self._promises, self._retaking, lambda: self.somebody_waits
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
            self.capturing.on_urgency()  # somebody waits, perhaps for room that a slow capture takes
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
        self.capturing.on_urgency()
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
        failure = [failed] if (failed := self.capturing.last_failure) else []
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

    def _estimate(self) -> None:
        """Write down for every snapshot on its way when it will be committed."""
        total_seconds: float | None = 0.0
        typical_seconds = self.capturing.durations.typical_seconds
        for pending in self._queue.unfinished():
            progress = pending.state.progress
            left: float | None = typical_seconds
            if progress is not None and pending.capture_began_at is not None:
                elapsed_seconds = trio.current_time() - pending.capture_began_at
                left = seconds_left(progress, elapsed_seconds, self.capturing.urgency(pending))
            total_seconds = None if total_seconds is None or left is None else total_seconds + left
            pending.state.seconds_left = total_seconds

    def _announce(self, kind: str, state: SnapshotState) -> None:
        self._context.events.emit(kind, snapshot=state)

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
