"""Cutting snapshots: the first time, and anew where what was sealed is gone before it was captured.

Where a worker is killed, its successor goes on with what was sealed if it can (fuse_layer/inherited_undo.py), and the capture is begun
again. Otherwise a sealed epoch ends with its worker, with a worker that leaves its session to another one, and with an undo log that met a
full disk. The id was given out all the same, so all roots of the snapshot are cut once more at one later instant, as soon as they are served
again, and the snapshot says so (tag ``retaken``, its message, ``SnapshotState.retaken``).

Guarantees: every root of a snapshot is cut at one instant, the first time and anew; the order of the queue is the order of the cuts;
a root that does not come back within ``PATIENCE_SECONDS`` is left out, with the reason. Belongs to the trio thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import structlog
import trio

from ciuic.daemon.cut import Flush, cut_all, flush_all
from ciuic.daemon.pending import Cut, PendingSnapshot
from ciuic.daemon.runtime import CutRecord
from ciuic.daemon.snapshot_queue import SnapshotQueue
from ciuic.daemon.supervisor import RootSupervisor
from ciuic.daemon.verdicts import tell_workers
from ciuic.errors import CiuicError

TAG_UNFLUSHED = "unflushed"
"""On a snapshot for which the kernel's cached writes could not all be written back in time."""
PATIENCE_SECONDS = 60.0
"""For a root to be served again: twice the longest pause between two attempts to mount it (BACKOFF_SECONDS)."""
MAX_RETAKES = 5
"""Of one snapshot: a root whose worker dies at every cut must not keep the daemon at it for ever."""
RETAKE_PAUSES_SECONDS = (0.0, 1.0, 5.0, 15.0, 30.0)
"""Before each of them; the first at once, because the promised instant is past."""
_POLL_SECONDS = 0.05
"""A worker is replaced within 0.1 s as a rule; its supervisor announces no event that covers every way of replacing one."""
log = structlog.get_logger(__name__)


async def make_cut(supervisors: Sequence[RootSupervisor], flush: Flush) -> Cut:
    """Flush and cut all these roots at one instant. CutFailed, CiuicError.

    No await after the cut: an epoch that was cut must be known to the queue before anything else happens.
    """
    tags = [] if await flush_all(supervisors, flush) else [TAG_UNFLUSHED]
    for supervisor in supervisors:
        await supervisor.refresh_bypassing()
    trusted = {supervisor.path: not supervisor.untrusted for supervisor in supervisors}
    # Writers that passed the overlay by are gone before this cut: a capture that compares everything has all they wrote.
    settles = {supervisor.path for supervisor in supervisors if supervisor.all_accounted}
    cuts = await cut_all(supervisors)
    return Cut(
        records=[CutRecord(path=cut.path, session=cut.session, epoch=cut.epoch) for cut in cuts],
        time_ns=max(cut.cut_ns for cut in cuts),
        hold_microseconds=max(cut.hold_us for cut in cuts),
        trust_tracking=trusted,
        settles=settles,
        tags=tags,
    )


class Retaking:
    """Cuts anew what was interrupted: ``run`` does so at once for snapshots in the queue that no capture was begun for."""

    def __init__(
        self,
        queue: SnapshotQueue,
        roots: Callable[[], Mapping[str, RootSupervisor]],
        flush: Callable[[], Flush],
        cut_lock: trio.Lock,
    ) -> None:
        """``cut_lock``: see Snapshots; the queue's order is the order of the epochs."""
        self._queue = queue
        self._roots = roots
        self._flush = flush
        self._cut_lock = cut_lock
        self._wake = trio.Event()

    def wanted(self) -> None:
        """Some snapshot of the queue was interrupted."""
        self._wake.set()

    async def run(self) -> None:
        """For ever."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            for pending in list(self._queue):
                # One that was attempted may be committed already: the capture task looks, and cuts it anew itself.
                if not pending.record.attempts and not pending.finished.is_set():
                    await self._try(pending)

    async def _try(self, pending: PendingSnapshot) -> None:
        try:
            await self.settle(pending)
            if pending.interrupted:
                await self.retake(pending)
        except CiuicError as error:
            log.warning("snapshot_not_retaken", id=pending.id, error=str(error))
        except Exception:  # a defect costs this snapshot at most, and the capture task says which
            log.exception("retake_defect", id=pending.id)

    async def settle(self, pending: PendingSnapshot) -> None:
        """Find out whether successors of workers that ended go on with what those had sealed."""
        if not pending.doubtful:
            return
        await self._roots_are_back(pending)
        for cut in pending.remaining:
            # Taken out before the worker is asked: it may end meanwhile, and then this is in doubt once more.
            reason = pending.doubtful.pop(cut.path, None)
            if reason is not None and not await self._is_pending(cut):
                pending.interrupt(cut.path, reason)
        for path in pending.record.left_out:
            pending.doubtful.pop(path, None)

    async def _is_pending(self, cut: CutRecord) -> bool:
        """Whether the worker that serves the root now has the sealed epoch."""
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
        """Cut the remaining roots of ``pending`` anew, and put it behind all others. CutFailed, CiuicError: try again.

        On return it is not interrupted, or all its roots are left out.
        """
        await self._roots_are_back(pending)
        async with self._cut_lock:
            if not pending.interrupted or pending.finished.is_set():
                return
            supervisors = self._supervisors(pending)
            if not supervisors or not pending.interrupted:  # what the others sealed is as it was promised
                return
            # First of all: what the others sealed is given back, or the job would go on paying for it.
            for cut in pending.remaining:
                pending.interrupted.setdefault(cut.path, next(iter(pending.interrupted.values())))
            await tell_workers(pending, self._roots(), committed=False)
            pending.retaken(await make_cut(supervisors, self._flush()), trio.current_time())
            self._queue.to_the_end(pending)
        log.warning("snapshot_retaken", id=pending.id, reason=pending.record.retaken)

    async def _roots_are_back(self, pending: PendingSnapshot) -> None:
        """Returns when every root is served, or is not going to be."""
        with trio.move_on_after(PATIENCE_SECONDS):
            while any(self._is_coming(cut.path) for cut in pending.remaining):  # noqa: ASYNC110  see _POLL_SECONDS
                await trio.sleep(_POLL_SECONDS)

    def _is_coming(self, path: str) -> bool:
        supervisor = self._roots().get(path)
        if supervisor is None or supervisor.state in ("stopping", "unmounted"):
            return False
        return supervisor.worker is None or supervisor.plain

    def _supervisors(self, pending: PendingSnapshot) -> list[RootSupervisor]:
        """Those that can be cut; the other roots are left out of the snapshot."""
        found = []
        for cut in pending.remaining:
            supervisor = self._roots().get(cut.path)
            if supervisor is not None and supervisor.worker is not None and supervisor.state != "stopping":
                found.append(supervisor)
                continue
            reason = pending.interrupted.pop(cut.path, "it was interrupted")
            pending.lose(cut.path, f"{reason}, and the root is not served any more")
        return found
