"""Tell workers the outcome of the epochs that they sealed, and look it up where it is not known.

Guarantees: a worker is told `committed` of an epoch only when the snapshot has its root; `abort` gives the
changes to the next epoch. Leaves to others: which epochs a worker was not told of (`Snapshots.reconcile`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import structlog
import trio

from ciuic.daemon.base.repository_store import LastSnapshot, Store
from ciuic.daemon.base.runtime import CutRecord
from ciuic.daemon.roots.supervisor import RootSupervisor
from ciuic.daemon.roots.worker_process import OverlayWorker
from ciuic.daemon.snapshots.pending import PendingSnapshot
from ciuic.errors import CiuicError

log = structlog.get_logger(__name__)


async def tell_workers(
    pending: PendingSnapshot, roots: Mapping[str, RootSupervisor], *, committed: bool
) -> None:
    """Send `committed` or `abort` for each root whose session still lives.

    `abort` for a root that was left out.
    """
    # A root that was left out is aborted although the snapshot is committed: its changes belong to the next
    # snapshot.
    captured = {cut.path for cut in pending.remaining} if committed else set()
    for cut in pending.record.cuts:
        supervisor = roots.get(cut.path)
        worker = supervisor.worker if supervisor else None
        # Epochs count from 1 in each session: another session's worker must not hear of this one.
        if worker is None or worker.session != cut.session:
            continue
        epoch = cut.epoch
        try:
            if cut.path in captured:
                await worker.ask(lambda client, epoch=epoch: client.committed(epoch))  # type: ignore[misc]
            else:
                await worker.ask(lambda client, epoch=epoch: client.abort(epoch))  # type: ignore[misc]
        except CiuicError as error:
            # Not lost: reconcile looks up every epoch that a worker calls pending.
            log.warning(
                "worker_not_told",
                root=cut.path,
                epoch=epoch,
                committed=cut.path in captured,
                error=str(error),
            )


def find_commit(store: Store, cuts: Iterable[CutRecord]) -> tuple[LastSnapshot, frozenset[str]] | None:
    """Return the snapshot that has one of these epochs, and its roots; None where there is none. Blocks.

    May raise CiuicError.
    """
    for cut in cuts:
        snapshot = store.snapshot_of_epoch(cut.path, cut.session, cut.epoch)
        if snapshot is not None:
            return snapshot, store.roots_of(snapshot.id)
    return None


async def settle_epoch(store: Store, path: str, worker: OverlayWorker, epoch: int) -> None:
    """Tell a worker the outcome of an epoch that it calls pending and that belongs to no queued snapshot."""
    try:
        found = await trio.to_thread.run_sync(store.snapshot_of_epoch, path, worker.session, epoch)
        if found is not None:
            await worker.ask(lambda client: client.committed(epoch))
        else:
            await worker.ask(lambda client: client.abort(epoch))
        log.info("epoch_reconciled", root=path, epoch=epoch, snapshot=found.id if found else "")
    except CiuicError as error:
        log.warning("epoch_not_reconciled", root=path, epoch=epoch, error=str(error))
