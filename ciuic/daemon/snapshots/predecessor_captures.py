"""Captures that outlive a killed daemon.

Guarantees: a capture whose overlay sessions all live may finish its snapshot, and the task that goes on with
that snapshot waits for it; a capture that lost a session is killed before anything is detached or mounted.
"""

from __future__ import annotations

import structlog
import trio

from ciuic.daemon.base.runtime import PendingRecord, RuntimeDirectory
from ciuic.daemon.snapshots.capture_process import wait_for_stranger
from ciuic.daemon.snapshots.pending import PendingSnapshot
from ciuic.protocol.worker_client import peer_pid

log = structlog.get_logger(__name__)


async def end_orphaned_captures(records: list[PendingRecord], runtime: RuntimeDirectory) -> None:
    """Kill captures of a predecessor that lost an overlay session.

    Everything that they read from now on would not be exact.

    Call it before anything is detached or mounted. A capture whose workers all live may finish its snapshot.
    """
    for record in records:
        if not record.capture_pid:
            continue
        sockets = [runtime.worker_socket(cut.path) for cut in record.cuts]
        # In a thread: a socket whose queue is full keeps the question waiting for up to two seconds.
        alive = await trio.to_thread.run_sync(lambda sockets=sockets: all(map(peer_pid, sockets)))  # type: ignore[misc]
        if not alive:
            log.warning("orphaned_capture_killed", id=record.id, pid=record.capture_pid)
            await wait_for_stranger(record.capture_pid, record.capture_started_ticks, kill=True)


async def await_capture(pending: PendingSnapshot) -> None:
    """Wait for a capture that a killed daemon had started: it works for the same id."""
    # The start time distinguishes the capture from a later process with the same pid.
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
