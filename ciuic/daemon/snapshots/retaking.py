"""Cut snapshots: the first time, and anew where a sealed epoch is gone before it was captured.

When a worker is killed, its successor goes on with what was sealed if it can
(fuse_layer/tracking/inherited_undo.py), and the capture begins again. Otherwise a sealed epoch ends with its
worker, with a worker that leaves its session to another one, and with an undo log that met a full disk. The
id was given out all the same, so all roots of the snapshot are cut once more at one later instant, as soon as
they are served again, and the snapshot says so (tag `retaken`, its message, `SnapshotState.retaken`).

Guarantees: every root of a snapshot is cut at one instant, the first time and anew; the order of the queue is
the order of the cuts; a root that does not come back within `PATIENCE_SECONDS` is left out, with the reason.
Belongs to the trio thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

import structlog
import trio

from ciuic.daemon.base.runtime import CutRecord
from ciuic.daemon.roots.supervisor import RootSupervisor
from ciuic.daemon.snapshots.cut import Flush, cut_all, flush_all
from ciuic.daemon.snapshots.epoch_outcomes import tell_workers
from ciuic.daemon.snapshots.pending import PendingSnapshot, SnapshotCut
from ciuic.daemon.snapshots.snapshot_queue import SnapshotQueue
from ciuic.daemon.snapshots.snapshot_requests import CutTurns
from ciuic.errors import CiuicError

# Tag of a snapshot for which the kernel's cached writes could not all be written back in time.
TAG_UNFLUSHED = "unflushed"
# Longest wait for a root to be served again: twice the longest pause between two attempts to mount it
# (BACKOFF_SECONDS).
PATIENCE_SECONDS = 60.0
# Attempts to cut one snapshot anew: a root whose worker dies at every cut must not occupy the daemon for
# ever.
MAX_RETAKES = 5
# Pauses before these attempts; the first follows at once, because the promised instant is past.
RETAKE_PAUSES_SECONDS = (0.0, 1.0, 5.0, 15.0, 30.0)
# A worker is replaced within 0.1 s as a rule, and its supervisor announces no event that covers every way of
# replacing one.
_POLL_SECONDS = 0.05
log = structlog.get_logger(__name__)


@asynccontextmanager
async def make_cut(
    supervisors: Sequence[RootSupervisor],
    flush: Flush,
    turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
) -> AsyncIterator[SnapshotCut]:
    """Flush and cut all these roots at one instant.

    There is no await between the cut and the block: an epoch that was cut must be known to the queue before
    anything else happens.

    Args:
        supervisors: the roots.
        flush: flushes one of them.
        turn: held from the cut until the block ends, and not for the flush.

    Raises:
        CutFailed: no cut was made in time.
        CiuicError: a worker ended.
    """
    tags = [] if await flush_all(supervisors, flush) else [TAG_UNFLUSHED]
    for supervisor in supervisors:
        await supervisor.refresh_bypassing()
    trusted = {supervisor.path: not supervisor.untrusted for supervisor in supervisors}
    # Before the cut: writers past the overlay that are known to be gone now have written all they will, and a
    # capture that compares everything has it.
    unbypassed = {supervisor.path for supervisor in supervisors if supervisor.all_accounted}
    async with cut_all(supervisors, turn) as cuts:
        # Workers may have been replaced since the first look.
        for supervisor in supervisors:
            trusted[supervisor.path] &= not supervisor.untrusted
        yield SnapshotCut(
            records=[CutRecord(path=cut.path, session=cut.session, epoch=cut.epoch) for cut in cuts],
            time_ns=max(cut.cut_ns for cut in cuts),
            hold_microseconds=max(cut.hold_us for cut in cuts),
            trust_tracking=trusted,
            unbypassed=unbypassed,
            tags=tags,
        )


class Retaking:
    """Cut interrupted snapshots anew. The task `run` does so at once for queued snapshots without an attempt."""

    def __init__(
        self,
        queue: SnapshotQueue,
        roots: Callable[[], Mapping[str, RootSupervisor]],
        flush: Callable[[], Flush],
        turns: CutTurns,
    ) -> None:
        """Prepare to cut anew.

        Args:
            queue: snapshots on their way.
            roots: supervisors of the roots, by path.
            flush: flushes one root.
            turns: whose turn it is to cut.
        """
        self._queue = queue
        self._roots = roots
        self._flush = flush
        self._turns = turns
        self._wake = trio.Event()

    def wanted(self) -> None:
        """Wake the task: a queued snapshot was interrupted."""
        self._wake.set()

    async def run(self) -> None:
        """Cut interrupted snapshots anew, until cancelled."""
        while True:
            await self._wake.wait()
            # Renewed before the look, so that a snapshot that is interrupted during it wakes the task again.
            self._wake = trio.Event()
            for pending in list(self._queue):
                # A snapshot with an attempt may be committed already: the capture task looks, and cuts it
                # anew itself.
                if not pending.record.attempts and not pending.finished.is_set():
                    await self._try(pending)

    async def _try(self, pending: PendingSnapshot) -> None:
        try:
            await self.settle(pending)
            if pending.interrupted:
                await self.retake(pending)
        except CiuicError as error:
            log.warning("snapshot_not_retaken", id=pending.id, error=str(error))
        except Exception:  # a defect costs this snapshot at most; the capture task reports it
            log.exception("retake_defect", id=pending.id)

    async def settle(self, pending: PendingSnapshot) -> None:
        """Resolve doubt: find out whether successors of workers that ended have the sealed epochs."""
        if not pending.doubtful:
            return
        await self._roots_are_back(pending)
        for cut in pending.remaining:
            # Taken out of doubt before the worker is asked: when the worker ends meanwhile, the root is in
            # doubt once more.
            reason = pending.take_doubt(cut.path)
            if reason is not None and not await self._is_pending(cut):
                pending.interrupt(cut.path, reason)
        for path in pending.record.left_out:
            pending.take_doubt(path)

    async def _is_pending(self, cut: CutRecord) -> bool:
        """Return whether the worker that serves the root now has the sealed epoch."""
        supervisor = self._roots().get(cut.path)
        worker = supervisor.worker if supervisor is not None else None
        if worker is None or worker.session != cut.session:
            return False
        try:
            return cut.epoch in (await worker.ask(lambda client: client.status())).pending
        except CiuicError as error:
            log.warning("worker_not_asked", root=cut.path, error=str(error))
            return False

    async def retake(self, pending: PendingSnapshot) -> None:
        """Cut the remaining roots of `pending` anew, and put it at the end of the queue.

        On return it is not interrupted, or all its roots are left out.

        Raises:
            CiuicError: no cut could be made; another attempt may succeed.
        """
        waits_until = trio.current_time() + PATIENCE_SECONDS
        while not await self._retake_now(pending, trio.current_time() < waits_until):
            pass

    async def _retake_now(self, pending: PendingSnapshot, waits: bool) -> bool:
        """Wait for the roots and cut them anew once.

        Args:
            pending: snapshot to cut anew.
            waits: return False where a root has gone again since it was back, which is no reason to give up
                the snapshot.
        """
        await self._roots_are_back(pending)
        # Another cut may hold the lock for seconds, so the roots are looked at once more under it.
        async with self._turns.cut(None):
            if not pending.interrupted or pending.finished.is_set():
                return True
            if waits and any(self._is_coming(cut.path) for cut in pending.remaining):
                return False
            supervisors = self._supervisors(pending)
            # When only roots that are left out were interrupted, the sealed epochs of the others are as they
            # were promised.
            if not supervisors or not pending.interrupted:
                return True
            # Before the cut: the epochs of the other roots are given back, because the job pays for a sealed
            # epoch as long as it exists.
            pending.interrupt_remaining()
            await tell_workers(pending, self._roots(), committed=False)
            async with make_cut(supervisors, self._flush()) as made:
                pending.recut(made, trio.current_time())
                self._queue.to_the_end(pending)
        log.warning("snapshot_retaken", id=pending.id, reason=pending.record.retaken)
        return True

    async def _roots_are_back(self, pending: PendingSnapshot) -> None:
        """Wait until every root is served, or is not going to be."""
        with trio.move_on_after(PATIENCE_SECONDS):
            while any(self._is_coming(cut.path) for cut in pending.remaining):  # noqa: ASYNC110  see _POLL_SECONDS
                await trio.sleep(_POLL_SECONDS)

    def _is_coming(self, path: str) -> bool:
        supervisor = self._roots().get(path)
        if supervisor is None or supervisor.state in ("stopping", "unmounted"):
            return False
        return supervisor.worker is None or supervisor.plain

    def _supervisors(self, pending: PendingSnapshot) -> list[RootSupervisor]:
        """Return the supervisors of roots that can be cut, and leave the other roots out of the snapshot."""
        found = []
        for cut in pending.remaining:
            supervisor = self._roots().get(cut.path)
            if supervisor is not None and supervisor.worker is not None and supervisor.state != "stopping":
                found.append(supervisor)
                continue
            pending.drop_root(cut.path)
        return found
