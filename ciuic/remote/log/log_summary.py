"""Summary of one log, as far as it was read: snapshots committed and removed, and the places of its entries."""

from __future__ import annotations

import msgspec

from ciuic.remote.format.log_entry import (
    MAX_MANIFESTS,
    GivenUp,
    LiveManifest,
    LogCommit,
    LogEntry,
    LogFence,
    LogHello,
    LogMove,
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
    given_up: set[GivenUp] = set()
    """Snapshots that operators gave up in this log."""
    fence: int = -1
    """Last round whose fence was read in this log; -1 for none."""
    state: int = -1
    """Number of the last entry that sums up those before it; -1 for none."""
    own: int = -1
    """Number of the last entry that the writer itself made, as far as it is there; -1 for none."""
    moving: frozenset[str] = frozenset()
    """Packs that this writer moves to another storage class or place: no collector deletes them meanwhile."""
    nonce: str = ""
    """Nonce of the entry before ``next``."""
    retired: bool = False

    def copy(self) -> LogSummary:
        """Return a copy that can be changed."""
        return msgspec.structs.replace(
            self, committed=dict(self.committed), removed=set(self.removed), given_up=set(self.given_up)
        )

    def kept_given_up(self) -> tuple[GivenUp, ...]:
        """Return what an entry that sums up the log says of snapshots that operators gave up."""
        # Beyond the limit of a document their hosts may upload them again, which costs nothing but space.
        return tuple(sorted(self.given_up, key=lambda one: (one.repository, one.snapshot))[:MAX_MANIFESTS])

    def apply(self, number: int, entry: LogEntry) -> tuple[PackRef, ...]:
        """Take in entry ``number``, which follows what was read; return the packs that it names."""
        packs: tuple[PackRef, ...] = ()
        if isinstance(entry, LogState | LogRetired):
            self.committed = {live.manifest: live for live in entry.live}
            self.removed = set(entry.removed)
            self.given_up = set(entry.given_up)
            self.state = number
            self.moving = frozenset()
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
            self.given_up.update(entry.snapshots)
        elif isinstance(entry, LogMove):
            self.moving = frozenset(entry.packs)
        if isinstance(entry, LogHello | LogCommit | LogRemove | LogMove):
            self.own = number
        self.next = number + 1
        self.nonce = entry.nonce
        return packs
