"""Queue of snapshots that are cut and not committed, in the order of their cuts, with its journal.

Guarantees: the journal in the runtime directory names every snapshot of the queue, or an alert says that it
cannot be written; finished snapshots are remembered for a while, for callers that ask by id. Belongs to the
trio thread.
"""

from __future__ import annotations

from collections.abc import Iterator

import structlog
import trio

from ciuic.daemon.base.alerts import Alerts
from ciuic.daemon.base.runtime import RuntimeDirectory
from ciuic.daemon.snapshots.pending import PendingSnapshot

# Snapshots whose state is known by id; older finished ones are looked up in the repository.
REMEMBERED = 64
log = structlog.get_logger(__name__)


class SnapshotQueue:
    """Queue of one daemon. Iteration yields the snapshots in it, oldest cut first."""

    def __init__(self, runtime: RuntimeDirectory, alerts: Alerts) -> None:
        self._runtime = runtime
        self._alerts = alerts
        self._waiting: list[PendingSnapshot] = []
        self._remembered: dict[str, PendingSnapshot] = {}
        self._wake = trio.Event()
        self._left = trio.Event()

    def __iter__(self) -> Iterator[PendingSnapshot]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def remembered(self) -> frozenset[str]:
        """Ids that must not be given out again."""
        return frozenset(self._remembered)

    def find(self, snapshot_id: str) -> PendingSnapshot | None:
        """Return a snapshot of this daemon's life, or None when it is not (or no longer) remembered."""
        return self._remembered.get(snapshot_id)

    def unfinished(self) -> list[PendingSnapshot]:
        """Return the snapshots that are neither committed nor given up."""
        return [pending for pending in self._waiting if not pending.finished.is_set()]

    async def first(self) -> PendingSnapshot:
        """Return the oldest snapshot; wait while there is none."""
        while not self._waiting:
            self._wake = trio.Event()
            await self._wake.wait()
        return self._waiting[0]

    async def has_room(self, length: int, until_seconds: float) -> bool:
        """Wait until the queue is shorter than `length`, and return whether it is.

        Args:
            length: number of snapshots.
            until_seconds: end of the wait on trio's clock.
        """
        with trio.move_on_at(until_seconds):
            while len(self._waiting) >= length:
                await self._left.wait()
        return len(self._waiting) < length

    def add(self, pending: PendingSnapshot) -> None:
        """Append a snapshot and write the journal, so that a successor of this daemon knows of it."""
        self._waiting.append(pending)
        self._remembered[pending.id] = pending
        # Only finished ones are forgotten: a caller may wait for any other.
        done = [id_ for id_, known in self._remembered.items() if known.finished.is_set()]
        for id_ in done[: max(0, len(self._remembered) - REMEMBERED)]:
            del self._remembered[id_]
        self.write_journal()
        self._wake.set()

    def write_journal(self) -> None:
        """Replace the journal; an alert stands while it cannot be written."""
        try:
            self._runtime.write_pending([pending.record for pending in self._waiting])
        except OSError as error:
            # Without the journal a successor aborts these epochs and captures their changes with the next: no
            # reason to fail a snapshot.
            log.error("journal_not_written", error=str(error))
            self._alerts.report(
                "runtime",
                f"the runtime directory {self._runtime.path} cannot be written: {error.strerror or error}",
                hint="free space there; until then a daemon that is killed forgets the snapshots that wait",
                severity="warning",
            )
        else:
            self._alerts.clear("runtime")

    def remove(self, pending: PendingSnapshot) -> None:
        """Remove a finished snapshot and write the journal."""
        self._waiting.remove(pending)
        # Wakes every request that waits for a place; a new event is for those that find none.
        self._left.set()
        self._left = trio.Event()
        self.write_journal()

    def clear(self) -> None:
        """Empty the queue and leave the journal as it is: the next daemon goes by it."""
        self._waiting.clear()

    def to_the_end(self, pending: PendingSnapshot) -> None:
        """Move a snapshot that was cut anew to the end: the order of the queue is that of the cuts."""
        self._waiting.remove(pending)
        self._waiting.append(pending)
        self.write_journal()

    def doubt(self, path: str, session: str, reason: str) -> None:
        """Put a root of every snapshot that this session sealed into doubt.

        The session or its worker has ended.
        """
        for pending in self._waiting:
            if any(cut.path == path and cut.session == session for cut in pending.record.cuts):
                pending.doubt(path, reason)

    def epochs(self) -> set[tuple[str, str, int]]:
        """Return root, session and number of every epoch that belongs to a queued snapshot."""
        return {
            (cut.path, cut.session, cut.epoch) for pending in self._waiting for cut in pending.record.cuts
        }
