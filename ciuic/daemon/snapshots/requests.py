"""Take snapshots: one cut at a time, whose epochs are captured in the order of the cuts (capturing.py).

A request waits while another cut is made, and while the queue of captures is full. Waiting requests for the
same roots, tags and hold are merged: one cut answers them all, with one id. Each gets what it asked for,
because the cut begins after the request was made.

Guarantees:

* An id is given out only when every root's cut is made and the journal names it.
* A snapshot whose id was given out is committed under that id as of the promised instant, without the roots
  whose sealed epochs are gone (`cut.settle_doubt`). When a snapshot cannot be committed, every caller that waits
  gets an error, and the loss is on file (`pending.Promises`).
* A request is merged only with others whose cut has not begun; a request whose connection has ended keeps no
  other from its cut. A request for a pair is never merged: it names the one training state that it belongs to.
* A killed daemon's successor goes on with the same ids (`resume`).

Leaves to others: what a cut is (cut.py), when one is due (schedule.py), which snapshots are kept
(jobs.py). Belongs to the trio thread.

Snapshots that are held first and cut when somebody decides, so that several hosts can be cut at one instant.

The daemon has no network: a command on its control socket asks for the hold, meets the other hosts
(ciuic.remote.sets), and decides.

Guarantees: a hold ends with its decision or at its limit, whatever its command does; its worker ends it by
itself should this daemon hang or die (`cut.HeldCut`). A token decides one hold, once. A second hold waits for
the first, as every cut does. Belongs to the trio thread.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import structlog
import trio

from ciuic.daemon.base.events import KEY_MISSING
from ciuic.daemon.base.repository_store import Store
from ciuic.daemon.base.runtime import PendingRecord
from ciuic.daemon.roots.supervisor import RootSupervisor, backing_descriptors
from ciuic.daemon.roots.worker_process import OverlayWorker
from ciuic.daemon.snapshots.capturing import Capturing, Context
from ciuic.daemon.snapshots.cut import (
    CutTurns,
    HeldCut,
    flush_all,
    make_cut,
    mounted_roots,
    settle_epoch,
)
from ciuic.daemon.snapshots.pending import ROOM_SECONDS, PendingSnapshot, Promises, SnapshotQueue
from ciuic.errors import CiuicError, NotFound, Unreachable, UsageError
from ciuic.protocol.control_types import (
    MAX_HOLD_LIMIT_SECONDS,
    HoldRequest,
    HoldState,
    SnapshotRequest,
    SnapshotState,
    rfc3339,
)
from ciuic.repository.promised import Promise
from ciuic.repository.snapshot_format import set_member_problem
from ciuic.types import Pair

log = structlog.get_logger(__name__)


class _Hold:
    """A hold and what became of it."""

    def __init__(self, cut: HeldCut) -> None:
        self.cut = cut
        self.finished = trio.Event()
        self.pending: PendingSnapshot | None = None
        self.failure: CiuicError | None = None

    @property
    def outcome(self) -> PendingSnapshot:
        """The snapshot; raises why there is none."""
        if self.pending is None:
            failure = self.failure or CiuicError("the hold was released without a cut")
            # A new exception for each request, as in `requests._SharedCut`.
            raise failure.anew()
        return self.pending


class HeldSnapshots:
    """The holds of one daemon; `run` is the task in which they live."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._nursery: trio.Nursery | None = None
        self._holds: dict[str, _Hold] = {}

    async def run(self) -> None:
        """Let holds be asked for, until cancelled."""
        async with trio.open_nursery() as self._nursery:
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None

    async def hold(self, request: HoldRequest) -> HoldState:
        """Hold the roots, and return when every one is held.

        Raises:
            UsageError: the limit or the place in the set is none.
            Unreachable: the daemon is starting or stopping.
            CiuicError: as `Snapshots.take`.
        """
        if not 0 < request.limit_seconds <= MAX_HOLD_LIMIT_SECONDS:
            raise UsageError(
                f"the limit of a hold must be above 0 and at most {MAX_HOLD_LIMIT_SECONDS:g} s, got {request.limit_seconds:g} s"
            )
        if problem := set_member_problem(request.set_member):
            raise UsageError(problem)
        if self._nursery is None:
            raise Unreachable("the daemon is starting or stopping", hint="try again in a moment")
        hold = _Hold(HeldCut(request.limit_seconds, request.set_member, flushed=request.flushed))
        token = secrets.token_hex(16)
        self._nursery.start_soon(self._take, token, hold, request)
        await hold.cut.settled.wait()
        if hold.finished.is_set():
            _ = hold.outcome
        return HoldState(token=token)

    async def _take(self, token: str, hold: _Hold, request: HoldRequest) -> None:
        self._holds[token] = hold
        try:
            hold.pending = await self._snapshots.take(request.snapshot, held=hold.cut)
        except CiuicError as error:
            hold.failure = error
        except Exception:
            log.exception("held_cut_defect")
            hold.failure = CiuicError("internal error in the daemon", hint="its log has the details")
        finally:
            del self._holds[token]
            # Before `settled`: who waits for that looks whether the hold has ended.
            hold.finished.set()
            hold.cut.settled.set()

    async def decide(self, token: str, *, cut: bool) -> SnapshotState | None:
        """Cut what is held, and return the snapshot when its id is final; or release it.

        Raises:
            NotFound: no such hold is in force.
            CiuicError: nothing was cut.
        """
        hold = self._holds.get(token)
        if hold is None:
            raise NotFound("no such hold is in force: it was decided, or ended at its limit")
        hold.cut.decide(cut=cut)
        await hold.finished.wait()
        return hold.outcome.state if cut else None


# Messages of merged requests that the snapshot carries; of the others it carries the number.
_MAX_MESSAGES = 3


class Snapshots:
    """The queue of pending snapshots and the task that captures them."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._queue = SnapshotQueue(context.runtime, context.alerts)
        self._requests = _WaitingRequests()
        self.resumed = trio.Event()
        """Set when the snapshots of a predecessor are taken over, so that all promised ones are known."""
        # A cut's turn lasts from the choice of the id until the queue and the journal have the cut. Order of
        # locks: it is never taken while `Capturing.repository_lock` is held.
        self._turns = CutTurns()
        # Ids of snapshots that are being cut.
        self._new_ids: set[str] = set()
        self._promises = Promises(context.store, context.now_ns)
        self.capturing = Capturing(context, self._queue, self._promises, lambda: self.caller_waits)

    # -- asking for a snapshot

    async def take(
        self,
        request: SnapshotRequest,
        *,
        scheduled: bool = False,
        pair: Pair | None = None,
        hold_reason: str = "",
        user: int | None = None,
        held: HeldCut | None = None,
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
            held: makes the cut when it is decided elsewhere; the request gets a cut of its own.

        Raises:
            Busy: the queue has no place for this user after ROOM_SECONDS.
            NotFound: a root is not protected.
            CiuicError: no root can be cut.
        """
        requested = not scheduled and pair is None
        room_seconds = ROOM_SECONDS if held is None else held.limit_seconds
        until_seconds = trio.current_time() + room_seconds
        alone = pair is not None or held is not None
        with self._requests.join(
            request, scheduled=scheduled, requested=requested, alone=alone, user=user
        ) as cut:
            # The request may wait for a place in the queue that a slow capture takes, so that capture is
            # hurried.
            self._context.on_urgency()
            # A held cut is prepared already, and other hosts may be held until it is held, too.
            async with self._turns.of(user) if held is None else nullcontext():
                # A request that had the turn before may have cut for this one too.
                if (pending := cut.outcome) is None:
                    async with self._queue.place(user, until_seconds):
                        self._requests.close(cut)
                        try:
                            pending = await self._cut_now(cut, pair, hold_reason, user, held)
                        except CiuicError as error:
                            # A failure is for all merged requests: each would meet the same again.
                            cut.failure = error
                            raise
        return pending

    async def flush(self, roots: Sequence[str]) -> bool:
        """Prepare a held cut of these roots (empty: all); return whether every one was flushed.

        Raises:
            NotFound: a root is not protected.
            CiuicError: no root could be cut.
        """
        supervisors, _ = await mounted_roots(self._context.roots(), roots)
        return await flush_all(supervisors, self._context.flush)

    def is_full(self, user: int) -> bool:
        """Return whether a request of this ordinary user would have to wait for a place."""
        return self._queue.is_full(user)

    async def _cut_now(
        self,
        cut: _SharedCut,
        pair: Pair | None,
        hold_reason: str,
        user: int | None,
        held: HeldCut | None = None,
    ) -> PendingSnapshot:
        """Cut, and put the snapshot into the queue."""
        supervisors, missing = await mounted_roots(self._context.roots(), cut.roots)
        async with self._new_id(supervisors) as (snapshot_id, is_first):
            turn = partial(self._turns.cut, user)
            async with make_cut(supervisors, self._context.flush, turn, held=held) as made:
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
                    set_member=held.member if held is not None else None,
                    scheduled=cut.scheduled,
                    requested=cut.requested or is_first,
                    hold_microseconds=made.hold_microseconds,
                    left_out=dict.fromkeys(missing, "it was not mounted"),
                )
                cut.pending = pending = PendingSnapshot(
                    record,
                    announce=self._context.announce,
                    trust_tracking=made.trust_tracking,
                    unbypassed=made.unbypassed,
                    cut_at=trio.current_time(),
                )
                self._queue.add(pending)
                pending.announce_cut()
                self._context.on_urgency()
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
        self.capturing.estimate()
        return self._queue.find(snapshot_id)

    def unfinished(self) -> list[SnapshotState]:
        """Return the states of unfinished snapshots, oldest first.

        The last failure comes before them, if nothing was committed since.
        """
        self.capturing.estimate()
        failure = [failed] if (failed := self.capturing.last_failure) else []
        return [*failure, *(pending.state for pending in self._queue.unfinished())]

    def pending_records(self) -> list[PendingRecord]:
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

    # -- sessions that end, daemons that follow one another

    def session_lost(self, path: str, session: str) -> None:
        """Put the sealed epochs of a session into doubt: its worker has ended or is being stopped.

        They cannot be captured exactly unless a successor goes on with the session.
        """
        self._queue.doubt(path, session, f"the overlay session of {path} ended before the capture did")

    async def resume(self, records: list[PendingRecord]) -> None:
        """Take over the snapshots of a predecessor.

        They are captured as sealed where the sessions still live, without the other roots.
        """
        roots = self._context.roots()
        for record in records:
            pending = PendingSnapshot(record, announce=self._context.announce, cut_at=trio.current_time())
            self._queue.add(pending)
            pending.announce_cut()
            for cut in record.cuts:
                supervisor = roots.get(cut.path)
                worker = supervisor.worker if supervisor else None
                if worker is None or worker.session != cut.session:
                    reason = f"the overlay session of {cut.path} ended with the daemon before this one"
                    pending.doubt(cut.path, reason)
            log.info("snapshot_resumed", id=record.id, doubtful=pending.doubtful)
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


class _Kind(NamedTuple):
    """Properties that requests must have in common to be merged."""

    roots: frozenset[str]
    tags: frozenset[str]
    hold: bool
    user: int | None


class _SharedCut:
    """Cut that is to be made, for one request or several merged ones."""

    def __init__(self, request: SnapshotRequest, *, scheduled: bool, requested: bool) -> None:
        self.roots = list(request.roots)
        self.tags = list(dict.fromkeys(request.tags))
        self.hold = request.hold
        self.scheduled = scheduled
        """True if the schedule is among the requesters."""
        self.requested = requested
        """True if a caller other than the schedule is."""
        self.pending: PendingSnapshot | None = None
        """The snapshot, once it is cut."""
        self.failure: CiuicError | None = None
        """Reason for which it could not be cut."""
        self.waiting = 0
        """Requests that are not answered yet."""
        self._messages: dict[str, None] = {}

    def add(self, request: SnapshotRequest, *, scheduled: bool, requested: bool) -> None:
        """Add the first or another request."""
        if request.message:
            self._messages[request.message] = None
        self.scheduled = self.scheduled or scheduled
        self.requested = self.requested or requested

    @property
    def message(self) -> str:
        """Messages of the merged requests, the first `_MAX_MESSAGES` in full."""
        messages = list(self._messages)
        more = len(messages) - _MAX_MESSAGES
        return "; ".join(messages[:_MAX_MESSAGES] + ([f"and {more} more"] if more > 0 else []))

    @property
    def outcome(self) -> PendingSnapshot | None:
        """The snapshot; None before the cut. Raises the failure of a cut that was tried."""
        if self.failure is not None:
            # A new exception for each request: one object raised in several tasks would collect the
            # tracebacks of all.
            raise self.failure.anew()
        return self.pending


class _WaitingRequests:
    """Requests of one daemon whose cut has not begun."""

    def __init__(self) -> None:
        # Cuts that further requests may join.
        self._open: dict[_Kind, _SharedCut] = {}
        self._all: list[_SharedCut] = []

    @property
    def caller_waits(self) -> bool:
        """True if a caller other than the schedule waits for a cut."""
        return any(cut.requested for cut in self._all)

    @contextmanager
    def join(
        self,
        request: SnapshotRequest,
        *,
        scheduled: bool,
        requested: bool,
        alone: bool,
        user: int | None = None,
    ) -> Iterator[_SharedCut]:
        """Merge a request with one that waits, or add it as a new cut, for as long as the block lasts.

        Args:
            request: the request.
            scheduled: the schedule is the requester.
            requested: a caller waits for the snapshot.
            alone: never merge the request.
            user: ordinary user that asks; None for administrators and the schedule.
        """
        kind = _Kind(frozenset(request.roots), frozenset(request.tags), request.hold, user)
        cut = None if alone else self._open.get(kind)
        if cut is None:
            cut = _SharedCut(request, scheduled=scheduled, requested=requested)
            self._all.append(cut)
            if not alone:
                self._open[kind] = cut
        cut.add(request, scheduled=scheduled, requested=requested)
        cut.waiting += 1
        try:
            yield cut
        finally:
            cut.waiting -= 1
            if not cut.waiting:
                self.close(cut)
                self._all.remove(cut)

    def close(self, cut: _SharedCut) -> None:
        """Let no further request join: the cut begins, or no request is left."""
        self._open = {kind: known for kind, known in self._open.items() if known is not cut}


async def find_state(snapshots: Snapshots, store: Store, snapshot_id: str, *, wait: bool) -> SnapshotState:
    """Return the state of a snapshot.

    Args:
        snapshots: snapshots of this daemon's life.
        store: repository with committed snapshots and with records of promised ones.
        snapshot_id: id to look up.
        wait: return when the snapshot is committed, and raise its failure when it will not be.

    Raises:
        NotFound: no snapshot of this id is known.
        Unreachable: `wait` is not set, and the daemon that starts does not know yet what was promised.
        CiuicError: `wait` is set and the snapshot failed or was lost.
    """
    # Asked before the look-up, during which the snapshots of a predecessor may be taken over.
    is_complete = snapshots.resumed.is_set()
    pending = snapshots.state(snapshot_id)
    if pending is not None:
        if wait:
            await pending.finished.wait()
            if pending.failure is not None:
                raise pending.failure
        return pending.state
    found = await trio.to_thread.run_sync(store.find, snapshot_id)
    if found is None:
        lost = await trio.to_thread.run_sync(store.lost, snapshot_id)
        if lost is not None:
            return _state_of_lost(lost, wait=wait)
        if not is_complete:
            # The socket is served before the roots are mounted, and a promised id is no unknown one.
            if not wait:
                raise Unreachable(
                    f"the daemon is starting and does not know yet whether there is a snapshot {snapshot_id}",
                    hint="try again in a moment",
                )
            await snapshots.resumed.wait()
            return await find_state(snapshots, store, snapshot_id, wait=wait)
        raise NotFound(f"no snapshot {snapshot_id} is known here", hint="ciuic list shows the committed ones")
    return SnapshotState(
        id=str(found.id), state="committed", time=rfc3339(found.time_ns), new_bytes=found.new_bytes
    )


def _state_of_lost(lost: Promise, *, wait: bool) -> SnapshotState:
    """Return the state that a snapshot that failed in this daemon's life has too.

    Raise its failure for a caller that waits.
    """
    if wait:
        raise CiuicError(f"snapshot {lost.id} failed: {lost.reason}")
    return SnapshotState(
        id=lost.id,
        state="failed",
        time=rfc3339(lost.time_ns),
        error=lost.reason,
        code=CiuicError.exit_code,
        roots=list(lost.roots),
        tags=list(lost.tags),
        message=lost.message,
    )
