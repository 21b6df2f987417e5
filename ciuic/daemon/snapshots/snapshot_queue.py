"""Snapshots that are cut and not committed: their order, the journal, and the ids on file in the repository.

Each pending epoch costs its root a copy of what the job overwrites, and more than a few would slow the job,
so the queue has few places. Ordinary users have a part of them, and one user a part of that: whatever they
ask for, administrators and the schedule find a place, and so does the next user.

Guarantees: the journal in the runtime directory names every snapshot of the queue, or an alert says that it
cannot be written; finished snapshots are remembered for a while, for callers that ask by id. An id that a
caller was given is on file in the repository (ciuic.repository.promised) until its snapshot is committed, and
with a reason when it never will be; a repository that cannot be written fails no snapshot. Belongs to the
trio thread. Leaves delivering the snapshots to capturing.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager

import msgspec
import structlog
import trio

from ciuic.daemon.base.events import Alerts
from ciuic.daemon.base.repository_store import Store
from ciuic.daemon.base.runtime import RuntimeDirectory
from ciuic.daemon.snapshots.pending import PendingSnapshot
from ciuic.errors import Busy, CiuicError
from ciuic.repository.promised import Promise
from ciuic.units import plural

MAX_PENDING = 8
MAX_PENDING_OF_USERS = 5
MAX_PENDING_OF_A_USER = 3
# Longest wait of a request for a place. The running capture is hurried meanwhile, so a longer wait means
# that the repository cannot be written, and the caller should know.
ROOM_SECONDS = 60.0
# Snapshots whose state is known by id; older finished ones are looked up in the repository.
_REMEMBERED = 64
# Longest wait for the record of a promise: a busy disk must not keep an id from its caller when the cut is
# made and in the journal.
RECORD_SECONDS = 0.5
# Longest wait for the record of the outcome: a disk that hangs, which may be why the snapshot failed, must
# not keep the failure from callers that wait.
OUTCOME_SECONDS = 5.0
MACHINE_ENDED = "the daemon and its record of running captures were gone before it was captured (a restart of the machine)"
log = structlog.get_logger(__name__)


class SnapshotQueue:
    """Queue of one daemon. Iteration yields the snapshots in it, oldest cut first."""

    def __init__(self, runtime: RuntimeDirectory, alerts: Alerts) -> None:
        self._runtime = runtime
        self._alerts = alerts
        self._waiting: list[PendingSnapshot] = []
        # Users whose snapshots are being cut, one entry for each.
        self._reserved: list[int | None] = []
        self._remembered: dict[str, PendingSnapshot] = {}
        self._wake = trio.Event()
        self._left = trio.Event()

    def __iter__(self) -> Iterator[PendingSnapshot]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def remembered(self) -> frozenset[str]:
        """Ids that must not be given out again."""
        return frozenset(self._remembered)

    def find(self, snapshot_id: str) -> PendingSnapshot | None:
        """Return a snapshot of this daemon's life, or None when it is not (or no longer) remembered."""
        return self._remembered.get(snapshot_id)

    def unfinished(self) -> list[PendingSnapshot]:
        """Return the snapshots that are neither committed nor given up."""
        return [pending for pending in self._waiting if not pending.finished.is_set()]

    async def first(self) -> PendingSnapshot:
        """Return the oldest snapshot; wait while there is none."""
        while not self._waiting:
            self._wake = trio.Event()
            await self._wake.wait()
        return self._waiting[0]

    def is_full(self, user: int | None) -> bool:
        """Return whether no place is left for a snapshot of this user (None: administrators, the schedule)."""
        taken = [*self._reserved, *(pending.record.user for pending in self._waiting)]
        if user is None or len(taken) >= MAX_PENDING:
            return len(taken) >= MAX_PENDING
        of_users = len(taken) - taken.count(None)
        return of_users >= MAX_PENDING_OF_USERS or taken.count(user) >= MAX_PENDING_OF_A_USER

    @asynccontextmanager
    async def place(self, user: int | None, until_seconds: float) -> AsyncIterator[None]:
        """Reserve a place while the block cuts a snapshot; wait for one until this time on trio's clock.

        Raises:
            Busy: no place became free in time.
        """
        with trio.move_on_at(until_seconds):
            while self.is_full(user):
                await self._left.wait()
        if self.is_full(user):
            raise Busy(
                f"{plural(len(self), 'snapshot has', 'snapshots have')} waited for capture for {ROOM_SECONDS:.0f} s, expected fewer than "
                f"{MAX_PENDING if user is None else MAX_PENDING_OF_A_USER}",
                hint="see why with ciuic status, and try again later",
            )
        self._reserved.append(user)
        try:
            yield
        finally:
            self._reserved.remove(user)
            self._wake_waiting()

    def _wake_waiting(self) -> None:
        """Wake every request that waits for a place; a new event is for those that find none."""
        self._left.set()
        self._left = trio.Event()

    def add(self, pending: PendingSnapshot) -> None:
        """Append a snapshot and write the journal, so that a successor of this daemon knows of it."""
        self._waiting.append(pending)
        self._remembered[pending.id] = pending
        # Only finished ones are forgotten: a caller may wait for any other.
        done = [id_ for id_, known in self._remembered.items() if known.finished.is_set()]
        for id_ in done[: max(0, len(self._remembered) - _REMEMBERED)]:
            del self._remembered[id_]
        self.write_journal()
        self._wake.set()

    def write_journal(self) -> None:
        """Replace the journal; an alert stands while it cannot be written."""
        try:
            self._runtime.write_pending([pending.record for pending in self._waiting])
        except OSError as error:
            # Without the journal a successor aborts these epochs and captures their changes with the next: no
            # reason to fail a snapshot.
            log.error("journal_not_written", error=str(error))
            self._alerts.report(
                "runtime",
                f"the runtime directory {self._runtime.path} cannot be written: {error.strerror or error}",
                hint="free space there; until then a daemon that is killed forgets the snapshots that wait",
                severity="warning",
            )
        else:
            self._alerts.clear("runtime")

    def remove(self, pending: PendingSnapshot) -> None:
        """Remove a finished snapshot and write the journal."""
        self._waiting.remove(pending)
        self._wake_waiting()
        self.write_journal()

    def clear(self) -> None:
        """Empty the queue and leave the journal as it is: the next daemon goes by it."""
        self._waiting.clear()

    def doubt(self, path: str, session: str, reason: str) -> None:
        """Put a root of every snapshot that this session sealed into doubt.

        The session or its worker has ended.
        """
        for pending in self._waiting:
            if any(cut.path == path and cut.session == session for cut in pending.record.cuts):
                pending.doubt(path, reason)

    def epochs(self) -> set[tuple[str, str, int]]:
        """Return root, session and number of every epoch that belongs to a queued snapshot."""
        return {
            (cut.path, cut.session, cut.epoch) for pending in self._waiting for cut in pending.record.cuts
        }


class Promises:
    """Durable records of ids that were given out, in the repository."""

    def __init__(self, store: Callable[[], Store], now_ns: Callable[[], int]) -> None:
        self._store = store
        self._now_ns = now_ns
        # Records are written in the order in which they are asked for: a loss must not be replaced by the
        # promise that it ends, whose thread began later.
        self._lock = trio.Lock()

    async def record(self, pending: PendingSnapshot) -> None:
        """Record that the id of `pending` was given out.

        Scheduled snapshots have no record: no caller was told their ids.
        """
        if pending.record.scheduled:
            return
        promise, store = _promise(pending), self._store()
        await self._do("promise_not_recorded", pending.id, lambda: store.promise(promise), RECORD_SECONDS)
        # The snapshot may have ended while the file was written, and its end found no record to change.
        if pending.failure is not None:
            await self.record_loss(pending, pending.state.error)
        elif pending.finished.is_set():
            await self.remove(pending)

    async def remove(self, pending: PendingSnapshot) -> None:
        """Remove the record: the snapshot is committed."""
        if not pending.record.scheduled:
            store = self._store()
            await self._do(
                "promise_not_removed", pending.id, lambda: store.keep_promise(pending.id), OUTCOME_SECONDS
            )

    async def record_loss(self, pending: PendingSnapshot, reason: str) -> None:
        """Record why the snapshot will never exist."""
        if pending.record.scheduled:
            return
        loss = _promise(pending, reason=reason, lost_ns=self._now_ns())
        store = self._store()
        await self._do("loss_not_recorded", pending.id, lambda: store.lose(loss), OUTCOME_SECONDS)

    async def record_forgotten(self, resumed: Collection[str]) -> None:
        """Record as lost what a predecessor promised and what is neither committed nor on its way.

        Args:
            resumed: ids that are on their way.
        """

        def work() -> None:
            store, now_ns = self._store(), self._now_ns()
            for promise in store.open_promises(resumed):
                log.error("promised_snapshot_lost", id=promise.id, reason=MACHINE_ENDED)
                store.lose(msgspec.structs.replace(promise, reason=MACHINE_ENDED, lost_ns=now_ns))

        await self._do("promises_not_read", "", work, OUTCOME_SECONDS)

    async def _do(self, event: str, snapshot_id: str, work: Callable[[], None], seconds: float) -> None:
        try:
            async with self._lock:
                with trio.move_on_after(seconds) as scope:
                    # Abandoned at the time limit: a disk that hangs holds the thread, not the snapshot.
                    await trio.to_thread.run_sync(work, abandon_on_cancel=True)
            if scope.cancelled_caught:  # the thread goes on, and may still write the record
                log.warning(event, id=snapshot_id, error=f"not done within {seconds:g} s")
        except (CiuicError, OSError) as error:
            # As a rule the repository is full or gone, which is why the snapshot failed, and the alert of the
            # failure says so.
            log.warning(event, id=snapshot_id, error=str(error))


def _promise(pending: PendingSnapshot, *, reason: str = "", lost_ns: int = 0) -> Promise:
    record = pending.record
    return Promise(
        id=pending.id,
        time_ns=record.time_ns,
        roots=tuple(cut.path for cut in record.cuts),
        tags=tuple(record.tags),
        message=record.message,
        reason=reason,
        lost_ns=lost_ns,
    )
