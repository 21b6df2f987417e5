"""Durable records of ids that were given out, in the repository (ciuic.repository.promised).

Guarantees: an id that a caller was given is on file in the repository until its snapshot is committed, and
with a reason when it never will be; a repository that cannot be written fails no snapshot. Belongs to the
trio thread. Leaves delivering the snapshots to capturing.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec
import structlog
import trio

from ciuic.daemon.base.repository_store import Store
from ciuic.daemon.snapshots.pending import PendingSnapshot
from ciuic.errors import CiuicError
from ciuic.repository.promised import Promise

# Longest wait for the record of a promise: a busy disk must not keep an id from its caller when the cut is
# made and in the journal.
RECORD_SECONDS = 0.5
# Longest wait for the record of the outcome: a disk that hangs, which may be why the snapshot failed, must
# not keep the failure from callers that wait.
OUTCOME_SECONDS = 5.0
MACHINE_ENDED = "the daemon and its record of running captures were gone before it was captured (a restart of the machine)"
log = structlog.get_logger(__name__)


class Promises:
    """Writer of the records. Belongs to the trio thread."""

    def __init__(self, store: Callable[[], Store], now_ns: Callable[[], int]) -> None:
        self._store = store
        self._now_ns = now_ns

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
        time_ns=record.promised_ns or record.time_ns,
        roots=tuple(cut.path for cut in record.cuts),
        tags=tuple(record.tags),
        message=record.message,
        reason=reason,
        lost_ns=lost_ns,
    )
