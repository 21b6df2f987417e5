"""Mark phase of a collection: the chunks that snapshots of a remote refer to."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ciuic.maintenance.chunkset import ChunkSet
from ciuic.remote.format.log_entry import LiveManifest
from ciuic.remote.reading.manifests import Manifests
from ciuic.remote.reading.remote_repository import RemoteRepository
from ciuic.remote.reading.remote_snapshots import CommittedEntry, RemoteSnapshots
from ciuic.remote.reading.space_reader import SpaceReader
from ciuic.repository import Walker
from ciuic.types import ChunkId, SnapshotId


class NeededChunks:
    """Chunks that snapshots refer to. May claim, once in 10^12 lookups, to have one that it has not."""

    def __init__(self) -> None:
        # Nodes exactly, because a wrong "seen" would skip a subtree; data by fingerprints of 11 to 16 bytes.
        self.nodes: set[ChunkId] = set()
        self.data = ChunkSet()

    def __contains__(self, chunk: object) -> bool:
        return chunk in self.nodes or chunk in self.data

    def add(self, chunk: ChunkId) -> None:
        """Add a chunk."""
        self.data.add(chunk)


def live_chunks(
    reader: SpaceReader, *, between: Callable[[], None] = lambda: None
) -> Callable[[Mapping[str, LiveManifest]], NeededChunks]:
    """Return a function for `Collector` that marks what snapshots of this space refer to.

    The function reads trees and block maps, and no data. Bases of differences are not among its result: the collector
    adds them from its index. It raises Damaged if anything cannot be read, and nothing may be collected then.

    Args:
        reader: Reader of the space.
        between: Called often.
    """

    def mark(snapshots: Mapping[str, LiveManifest]) -> NeededChunks:
        manifests = Manifests(reader.space, reader.cache, reader.patience)
        # By manifest, because ids of snapshots may occur twice.
        entries = {name: CommittedEntry(live, manifests) for name, live in snapshots.items()}
        found = RemoteSnapshots(entries)
        needed = NeededChunks()
        walker = Walker(RemoteRepository(reader, found), seen=needed.nodes, seen_data=needed.data)
        for name in entries:
            for _ in walker.walk(found.load(SnapshotId(name))):
                between()
        return needed

    return mark
