"""Telling workers what became of the epochs that they sealed.

Guarantee: a worker is told `committed` of an epoch only when the snapshot has its root; `abort` gives the changes to the next one.
Leaves to others: epochs of which a worker was not told, which `Snapshots.reconcile` settles.
"""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from ciuic.daemon.pending import PendingSnapshot
from ciuic.daemon.supervisor import RootSupervisor
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
