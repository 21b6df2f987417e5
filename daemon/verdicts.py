"""Telling workers what became of the epochs that they sealed, and finding that out where nobody remembers.

Guarantee: a worker is told `committed` of an epoch only when the snapshot has its root; `abort` gives the changes to the next one.
Leaves to others: which epochs a worker was not told of (`Snapshots.reconcile`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import structlog
import trio

from ciuic.daemon.pending import PendingSnapshot
from ciuic.daemon.runtime import CutRecord
from ciuic.daemon.store import LastSnapshot, Store
from ciuic.daemon.supervisor import RootSupervisor
from ciuic.daemon.worker_process import Worker
from ciuic.errors import CiuicError

log = structlog.get_logger(__name__)


async def tell_workers(
    pending: PendingSnapshot, roots: Mapping[str, RootSupervisor], *, committed: bool
) -> None:
    """``committed`` or ``abort`` for each root whose session still lives; ``abort`` for one that was left out."""
    captured = {cut.path for cut in pending.remaining} if committed else set()
    for cut in pending.record.cuts:
        supervisor = roots.get(cut.path)
        worker = supervisor.worker if supervisor else None
        if worker is None or worker.session != cut.session:
            continue
        epoch = cut.epoch
        try:
            if cut.path in captured:
                await worker.ask(lambda client, epoch=epoch: client.committed(epoch))  # type: ignore[misc]
            else:
                await worker.ask(lambda client, epoch=epoch: client.abort(epoch))  # type: ignore[misc]
        except CiuicError as error:
            # It finds out by itself: reconcile asks the repository about every epoch a worker calls pending.
            log.warning(
                "worker_not_told",
                root=cut.path,
                epoch=epoch,
                committed=cut.path in captured,
                error=str(error),
            )


def find_commit(store: Store, cuts: Iterable[CutRecord]) -> tuple[LastSnapshot, frozenset[str]] | None:
    """Return the snapshot that has one of these epochs, and its roots; None where there is none. Blocks. CiuicError."""
    for cut in cuts:
        snapshot = store.snapshot_of_epoch(cut.path, cut.session, cut.epoch)
        if snapshot is not None:
            return snapshot, store.roots_of(snapshot.id)
    return None


async def settle_epoch(store: Store, path: str, worker: Worker, epoch: int) -> None:
    """Tell a worker of an epoch that it calls pending and that no queued snapshot is about."""
    try:
        found = await trio.to_thread.run_sync(store.snapshot_of_epoch, path, worker.session, epoch)
        if found is not None:
            await worker.ask(lambda client: client.committed(epoch))
        else:
            await worker.ask(lambda client: client.abort(epoch))
        log.info("epoch_reconciled", root=path, epoch=epoch, snapshot=found.id if found else "")
    except CiuicError as error:
        log.warning("epoch_not_reconciled", root=path, epoch=epoch, error=str(error))
