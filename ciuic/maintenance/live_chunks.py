"""Mark phase of garbage collection: the set of chunks that snapshots refer to."""

from __future__ import annotations

from ciuic.maintenance.chunkset import ChunkSet
from ciuic.maintenance.sweep import StopCheck, SweepStopped, add_bases
from ciuic.repository import Repository, Walker
from ciuic.types import ChunkId, Snapshot, SnapshotId

_CHUNKS_BETWEEN_STOP_CHECKS = 4096


class LiveChunks:
    """Chunks that the snapshots walked so far refer to.

    After a walk that did not reach its end, the object must be thrown away: a node whose children were not all reached counts
    as seen, and would be skipped by the next walk.
    """

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        # Nodes exactly, because a wrong "seen" would skip a subtree; data chunks, hundreds of times as many, by fingerprints.
        self._nodes: set[ChunkId] = set()
        self._data = ChunkSet()
        self.snapshots: set[SnapshotId] = set()

    def live(self, chunk: ChunkId) -> bool:
        """Return whether a marked snapshot refers to ``chunk``."""
        return chunk in self._nodes or chunk in self._data

    def add_bases(self, should_stop: StopCheck | None = None) -> None:
        """Mark the bases of marked chunks, from which these are stored as differences. Called when all snapshots are walked."""
        add_bases(self._repository, self.live, self._data.add, should_stop)

    def __len__(self) -> int:
        """Return the number of distinct live chunks."""
        return len(self._nodes) + len(self._data)

    def mark(self, snapshot: Snapshot, should_stop: StopCheck | None = None, *, measure: bool = False) -> int:
        """Walk one snapshot; with ``measure`` return the stored bytes of the chunks that no snapshot before it refers to."""
        walker = Walker(self._repository, seen=self._nodes, seen_data=self._data)
        chunks = self._repository.chunks
        new_bytes = 0
        for count, reached in enumerate(walker.walk(snapshot)):
            if should_stop is not None and count % _CHUNKS_BETWEEN_STOP_CHECKS == 0 and should_stop():
                raise SweepStopped
            # A chunk that no pack holds takes no space; `ciuic check` reports it.
            if measure and chunks.has(reached.id):
                new_bytes += chunks.locate(reached.id).stored_bytes
        self.snapshots.add(snapshot.id)
        return new_bytes
