"""Look up the state of a snapshot by its id: on its way, committed, or lost."""

from __future__ import annotations

import trio

from ciuic.daemon.base.repository_store import Store
from ciuic.daemon.snapshots.requests import Snapshots
from ciuic.errors import CiuicError, NotFound, Unreachable
from ciuic.protocol.control_types import SnapshotState, rfc3339
from ciuic.repository.promised import Promise


async def find_state(snapshots: Snapshots, store: Store, snapshot_id: str, *, wait: bool) -> SnapshotState:
    """Return the state of a snapshot.

    Args:
        snapshots: snapshots of this daemon's life.
        store: repository with committed snapshots and with records of promised ones.
        snapshot_id: id to look up.
        wait: return when the snapshot is committed, and raise its failure when it will not be.

    Raises:
        NotFound: no snapshot of this id is known.
        Unreachable: `wait` is not set, and the daemon that starts does not know yet what was promised.
        CiuicError: `wait` is set and the snapshot failed or was lost.
    """
    # Asked before the look-up, during which the snapshots of a predecessor may be taken over.
    is_complete = snapshots.resumed.is_set()
    pending = snapshots.state(snapshot_id)
    if pending is not None:
        if wait:
            await pending.finished.wait()
            if pending.failure is not None:
                raise pending.failure
        return pending.state
    found = await trio.to_thread.run_sync(store.find, snapshot_id)
    if found is None:
        lost = await trio.to_thread.run_sync(store.lost, snapshot_id)
        if lost is not None:
            return _state_of_lost(lost, wait=wait)
        if not is_complete:
            # The socket is served before the roots are mounted, and a promised id is no unknown one.
            if not wait:
                raise Unreachable(
                    f"the daemon is starting and does not know yet whether there is a snapshot {snapshot_id}",
                    hint="try again in a moment",
                )
            await snapshots.resumed.wait()
            return await find_state(snapshots, store, snapshot_id, wait=wait)
        raise NotFound(f"no snapshot {snapshot_id} is known here", hint="ciuic list shows the committed ones")
    return SnapshotState(
        id=str(found.id), state="committed", time=rfc3339(found.time_ns), new_bytes=found.new_bytes
    )


def _state_of_lost(lost: Promise, *, wait: bool) -> SnapshotState:
    """Return the state that a snapshot that failed in this daemon's life has too.

    Raise its failure for a caller that waits.
    """
    if wait:
        raise CiuicError(f"snapshot {lost.id} failed: {lost.reason}")
    return SnapshotState(
        id=lost.id,
        state="failed",
        time=rfc3339(lost.time_ns),
        error=lost.reason,
        code=CiuicError.exit_code,
        roots=list(lost.roots),
        tags=list(lost.tags),
        message=lost.message,
    )
