"""Mark phase of a collection: the chunks that snapshots of a remote refer to, and the packs that are needed for them.

`live_chunks` reads the snapshots of a space; the choice of packs is pure work on the index and the set of live chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, Protocol

from ciuic.maintenance.chunkset import ChunkSet
from ciuic.remote.format.documents import LiveManifest
from ciuic.remote.format.pack import ROW_BYTES
from ciuic.remote.reading.remote_repository import RemoteRepository, SpaceReader
from ciuic.remote.reading.remote_snapshots import CommittedEntry, Manifests, RemoteSnapshots
from ciuic.remote.remote_index import ChunkCopy, RemoteIndex
from ciuic.remote.sealing.sealer import TAG_BYTES
from ciuic.repository import Walker
from ciuic.repository.chunk_reader import MAX_READ_BASE_DEPTH
from ciuic.types import ChunkId, SnapshotId


class LiveChunks(Protocol):
    """Set of chunks that snapshots need. It may claim, harmlessly, to have one that it has not."""

    def __contains__(self, chunk: object, /) -> bool: ...

    def add(self, chunk: ChunkId, /) -> None:
        """Add a chunk."""


MarkSnapshots = Callable[[Mapping[str, LiveManifest]], LiveChunks]
"""Function that returns a set with at least every chunk that these snapshots refer to; the caller may add to the set.

Its argument has snapshots by the names of their manifests. It raises Damaged or NotFound if a manifest or a tree cannot be
read; then nothing is collected.
"""


class PackUse(NamedTuple):
    """Needed part of a pack, in bytes of the pack: records with their rows in its table."""

    live_bytes: int = 0
    only_here_bytes: int = 0
    """Bytes of live chunks that have no copy in another pack."""


def add_bases(index: RemoteIndex, live: LiveChunks) -> None:
    """Add the bases of live chunks, from which a copy is stored as the difference, and their bases."""
    for _ in range(MAX_READ_BASE_DEPTH):
        added = False
        for chunk, base in index.bases():
            if chunk in live and base not in live:
                live.add(ChunkId(base))
                added = True
        if not added:
            return


def measure_use(index: RemoteIndex, live: LiveChunks) -> dict[int, PackUse]:
    """Return how much of each pack is needed, by its number; packs without a live chunk are left out."""
    use: dict[int, PackUse] = {}
    for _, copies in live_groups(index, live):
        alone = len({copy.pack for copy in copies}) == 1
        for copy in copies:
            before = use.get(copy.pack, PackUse())
            # Without the row a pack of small tree nodes, all live, would seem mostly dead, and be copied again
            # and again.
            taken = copy.stored_bytes + TAG_BYTES + ROW_BYTES
            only_here = before.only_here_bytes + (taken if alone else 0)
            use[copy.pack] = PackUse(before.live_bytes + taken, only_here)
    return use


def keep_needed(
    index: RemoteIndex, live: LiveChunks, condemned: Iterable[int], use: Mapping[int, PackUse] | None = None
) -> set[int]:
    """Return those condemned packs without which each live chunk still has a copy.

    Of several condemned packs with one chunk, the one with the most live bytes stays, as far as ``use`` says.
    """
    left = set(condemned)
    for _, copies in live_groups(index, live):
        if all(copy.pack in left for copy in copies):
            left.discard(
                max((copy.pack for copy in copies), key=lambda number: ((use or {}).get(number, ()), number))
            )
    return left


def needed_in(index: RemoteIndex, live: LiveChunks, sources: Collection[int]) -> dict[int, set[bytes]]:
    """Return the chunks of each of these packs that have to be copied before all of these may go."""
    needed: dict[int, set[bytes]] = {number: set() for number in sources}
    for chunk, copies in live_groups(index, live):
        if all(copy.pack in needed for copy in copies):
            needed[copies[0].pack].add(chunk)
    return needed


def live_groups(index: RemoteIndex, live: LiveChunks) -> Iterator[tuple[bytes, list[ChunkCopy]]]:
    """Yield each live chunk with all its copies."""
    for chunk, copies in groupby(index.copies(), key=attrgetter("id")):
        if chunk in live:
            yield chunk, list(copies)


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
        manifests = Manifests(reader.space, reader.cache)
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
