"""What a daemon that was killed has left at work: captures, which outlive it.

Guarantees: a capture whose overlay sessions all live is left to finish its snapshot, and waited for by whoever goes on with that
snapshot; one that lost a session is killed before anything is detached or mounted.
"""

from __future__ import annotations

import structlog
import trio

from ciuic.daemon.capture_process import wait_for_stranger
from ciuic.daemon.pending import PendingSnapshot
from ciuic.daemon.runtime import PendingRecord, RuntimeDirectory
from ciuic.fuse_layer.control_client import peer_pid

log = structlog.get_logger(__name__)


async def end_orphaned_captures(records: list[PendingRecord], runtime: RuntimeDirectory) -> None:
    """Kills captures of a predecessor that lost an overlay session: what they read from now on would not be exact.

    Called before anything is detached or mounted. A capture whose workers all live is left to finish its snapshot.
    """
    for record in records:
        if not record.capture_pid:
            continue
        sockets = [runtime.worker_socket(cut.path) for cut in record.cuts]
        alive = await trio.to_thread.run_sync(lambda sockets=sockets: all(map(peer_pid, sockets)))  # type: ignore[misc]
        if not alive:
            log.warning("orphaned_capture_killed", id=record.id, pid=record.capture_pid)
            await wait_for_stranger(record.capture_pid, record.capture_started_ticks, kill=True)


async def await_capture(pending: PendingSnapshot) -> None:
    """Lets a capture that a killed daemon had started end: it works for the same id."""
    pid, ticks = pending.record.capture_pid, pending.record.capture_started_ticks
    if not pid:
        return
    log.info("predecessor_capture_awaited", id=pending.id, pid=pid)
    async with trio.open_nursery() as nursery:

        async def end_with_session() -> None:
            while not pending.has_lost_session:
                await pending.wake.wait()
            await wait_for_stranger(pid, ticks, kill=True)

        nursery.start_soon(end_with_session)
        await wait_for_stranger(pid, ticks)
        nursery.cancel_scope.cancel()
    pending.record.capture_pid = 0
