"""Summary of one log, as far as it was read: snapshots committed and removed, and the places of its entries."""

from __future__ import annotations

import msgspec

from ciuic.remote.format.log_entry import (
    LiveManifest,
    LogCommit,
    LogEntry,
    LogFence,
    LogHello,
    LogRemove,
    LogRetired,
    LogState,
)
from ciuic.remote.format.names import PackRef


class LogSummary(msgspec.Struct, kw_only=True):
    """Log up to the entry before ``next``."""

    next: int = 0
    """Number of the first entry that was not read."""
    committed: dict[str, LiveManifest] = {}
    """Snapshots that this log committed, by manifest; some may be removed, by this log or another."""
    removed: set[str] = set()
    """Manifests that this log removed."""
    fence: int = -1
    """Last round whose fence was read in this log; -1 for none."""
    state: int = -1
    """Number of the last entry that sums up those before it; -1 for none."""
    own: int = -1
    """Number of the last entry that the writer itself made, as far as it is there; -1 for none."""
    nonce: str = ""
    """Nonce of the entry before ``next``."""
    retired: bool = False

    def apply(self, number: int, entry: LogEntry) -> tuple[PackRef, ...]:
        """Take in entry ``number``, which follows what was read; return the packs that it names."""
        packs: tuple[PackRef, ...] = ()
        if isinstance(entry, LogState | LogRetired):
            self.committed = {live.manifest: live for live in entry.live}
            self.removed = set(entry.removed)
            self.state = number
            self.retired = isinstance(entry, LogRetired)
        elif isinstance(entry, LogFence):
            self.fence = max(self.fence, entry.round)
        elif isinstance(entry, LogCommit):
            self.committed[entry.manifest] = LiveManifest(
                entry.repository, entry.snapshot, entry.manifest, entry.digest
            )
            packs = tuple(PackRef(ref) for ref in entry.packs)
        elif isinstance(entry, LogRemove):
            self.removed.update(entry.manifests)
        if isinstance(entry, LogHello | LogCommit | LogRemove):
            self.own = number
        self.next = number + 1
        self.nonce = entry.nonce
        return packs
