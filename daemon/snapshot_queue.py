"""Which snapshots are cut and not committed, in the order of their cuts, and what a killed daemon's successor knows of them.

Guarantees: the journal in the runtime directory names every snapshot of the queue, or an alert says that it cannot be written; what
has ended is remembered for a while, for whoever asks by its id. Belongs to the trio thread.
"""

from __future__ import annotations

from collections.abc import Iterator

import structlog
import trio

from ciuic.daemon.alerts import Alerts
from ciuic.daemon.pending import PendingSnapshot
from ciuic.daemon.runtime import RuntimeDirectory

REMEMBERED = 64
log = structlog.get_logger(__name__)


class SnapshotQueue:
    """Of one daemon. Iterating gives what is in it, oldest first."""

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
        """Ids that are not to be given out again."""
        return frozenset(self._remembered)

    def find(self, snapshot_id: str) -> PendingSnapshot | None:
        """One of this daemon's life, or None when it is not (or no longer) remembered."""
        return self._remembered.get(snapshot_id)

    def unfinished(self) -> list[PendingSnapshot]:
        """Those that are neither committed nor given up. The last one's process may still be ending."""
        return [pending for pending in self._waiting if not pending.finished.is_set()]

    async def first(self) -> PendingSnapshot:
        """The oldest; waits while there is none."""
        while not self._waiting:
            self._wake = trio.Event()
            await self._wake.wait()
        return self._waiting[0]

    async def has_room(self, length: int, until_seconds: float) -> bool:
        """Wait until fewer than ``length`` are in it, at most until this time of trio's clock; whether they are."""
        with trio.move_on_at(until_seconds):
            while len(self._waiting) >= length:
                await self._left.wait()
        return len(self._waiting) < length

    def add(self, pending: PendingSnapshot) -> None:
        """From now on a successor of this daemon knows of it."""
        self._waiting.append(pending)
        self._remembered[pending.id] = pending
        done = [id_ for id_, known in self._remembered.items() if known.finished.is_set()]
        for id_ in done[: max(0, len(self._remembered) - REMEMBERED)]:
            del self._remembered[id_]
        self.write_journal()
        self._wake.set()

    def write_journal(self) -> None:
        try:
            self._runtime.write_pending([pending.record for pending in self._waiting])
        except OSError as error:
            # Without it a successor gives these epochs up and captures them with the next: no reason to fail this one.
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
        self._waiting.remove(pending)
        self._left.set()
        self._left = trio.Event()
        self.write_journal()

    def clear(self) -> None:
        """Without a word in the journal: it is what the next daemon goes by."""
        self._waiting.clear()

    def to_the_end(self, pending: PendingSnapshot) -> None:
        """It was cut anew, after all others: the order of the queue stays that of the cuts."""
        self._waiting.remove(pending)
        self._waiting.append(pending)
        self.write_journal()

    def doubt(self, path: str, session: str, reason: str) -> None:
        """The overlay session has ended, or its worker has: what it sealed may be lost."""
        for pending in self._waiting:
            if any(cut.path == path and cut.session == session for cut in pending.record.cuts):
                pending.doubt(path, reason)

    def epochs(self) -> set[tuple[str, str, int]]:
        """Root, session and number of every epoch that some snapshot is about."""
        return {
            (cut.path, cut.session, cut.epoch) for pending in self._waiting for cut in pending.record.cuts
        }
