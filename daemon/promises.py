"""The durable side of promised snapshots: what the repository knows of ids that were given out (ciuic.repository.promised).

Guarantees: an id that somebody was given is on file in the repository until its snapshot is committed, and with a reason when it never
will be; a repository that cannot be written fails no snapshot. Belongs to the trio thread. Leaves delivering them to snapshots.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec
import structlog
import trio

from ciuic.daemon.pending import PendingSnapshot
from ciuic.daemon.store import Store
from ciuic.errors import CiuicError
from ciuic.repository.promised import Promise

GIVE_SECONDS = 0.5
"""For the note of a promise: a busy disk must not keep the caller from an id whose cut is made and in the journal."""
SETTLE_SECONDS = 5.0
"""For the note of what became of it: a disk that hangs, which may be why the snapshot failed, must not keep that from who waits."""
MACHINE_ENDED = "the daemon and its record of running captures were gone before it was captured (a restart of the machine)"
log = structlog.get_logger(__name__)


class Promises:
    """Of one daemon."""

    def __init__(self, store: Callable[[], Store], now_ns: Callable[[], int]) -> None:
        self._store = store
        self._now_ns = now_ns

    async def give(self, pending: PendingSnapshot) -> None:
        """Note that the id of ``pending`` was given out. Not for the schedule's: nobody was told their ids."""
        if pending.record.scheduled:
            return
        promise, store = _promise(pending), self._store()
        await self._do("promise_not_recorded", pending.id, lambda: store.promise(promise), GIVE_SECONDS)
        if pending.failure is not None:  # its end came while the file was written
            await self.lose(pending, pending.state.error)
        elif pending.finished.is_set():
            await self.keep(pending)

    async def keep(self, pending: PendingSnapshot) -> None:
        """Remove the note: the snapshot is committed."""
        if not pending.record.scheduled:
            store = self._store()
            await self._do(
                "promise_not_removed", pending.id, lambda: store.keep_promise(pending.id), SETTLE_SECONDS
            )

    async def lose(self, pending: PendingSnapshot, reason: str) -> None:
        """Note why the snapshot will never be."""
        if pending.record.scheduled:
            return
        loss = _promise(pending, reason=reason, lost_ns=self._now_ns())
        store = self._store()
        await self._do("loss_not_recorded", pending.id, lambda: store.lose(loss), SETTLE_SECONDS)

    async def take_stock(self, resumed: Collection[str]) -> None:
        """Record as lost what a predecessor promised and nobody knows of any more; ``resumed``: ids that are on their way."""

        def work() -> None:
            store, now_ns = self._store(), self._now_ns()
            for promise in store.open_promises(resumed):
                log.error("promised_snapshot_lost", id=promise.id, reason=MACHINE_ENDED)
                store.lose(msgspec.structs.replace(promise, reason=MACHINE_ENDED, lost_ns=now_ns))

        await self._do("promises_not_read", "", work, SETTLE_SECONDS)

    async def _do(self, event: str, snapshot_id: str, work: Callable[[], None], seconds: float) -> None:
        try:
            with trio.move_on_after(seconds) as scope:
                await trio.to_thread.run_sync(work, abandon_on_cancel=True)
            if scope.cancelled_caught:  # the thread goes on, and may write it yet
                log.warning(event, id=snapshot_id, error=f"not done within {seconds:g} s")
        except (CiuicError, OSError) as error:
            # Full or gone, as a rule, which is why the snapshot failed: the alert of the failure says so.
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
