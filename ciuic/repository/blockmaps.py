"""Block maps: which chunk is block i of a file. A radix tree of fixed fan-out 1024; holes take no space at
any level.

A map is (content, map_height) as in Entry: height 0 and b"" is a file without data (all hole, or empty);
height 0 otherwise is the id of the only block; height h covers 1024**h blocks. The height depends on the
number of blocks alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from ciuic.repository.chunks import ChunkReader
from ciuic.types import ChunkId, MapRef

FANOUT = 1024


def blocks_of(size_bytes: int, block_size: int) -> int:
    """Number of blocks of a file: the last one may be short."""
    return -(-size_bytes // block_size)


class BlockMaps:
    """Block maps of one repository. All methods raise MissingChunk, DamagedChunk or DamagedTree."""

    def __init__(self, chunks: ChunkReader) -> None:
        self._chunks = chunks

    def ids(
        self, content: bytes, map_height: int, n_blocks: int, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, ChunkId]]:
        """(block number, chunk id) for start ≤ number < stop, ascending; holes left out."""
        raise NotImplementedError

    def get(self, content: bytes, map_height: int, n_blocks: int, index: int) -> ChunkId:
        """The chunk id of one block; HOLE where there is none."""
        raise NotImplementedError

    def diff(self, old: MapRef, new: MapRef, n_blocks: int) -> Iterator[tuple[int, ChunkId, ChunkId]]:
        """(block, old id, new id) where they differ below n_blocks; equal nodes are not read."""
        raise NotImplementedError

    def nodes(self, content: bytes, map_height: int) -> Iterator[ChunkId]:
        """Ids of the map's own chunks (not of the blocks), parents first."""
        raise NotImplementedError
