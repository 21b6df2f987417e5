"""Reading chunks: find, read, check. Never returns a byte that does not match the chunk's id."""

from __future__ import annotations

from ciuic.repository.ids import Bytes
from ciuic.repository.model import ChunkLocation
from ciuic.types import ChunkId


class ChunkReader:
    """Chunks by id. Takes no lock; safe beside a writer and beside garbage collection. Not for several
    threads at once.
    """

    def get(self, chunk: ChunkId) -> bytes:
        """The content, checked against its id. MissingChunk or DamagedChunk when no copy of it is good."""
        raise NotImplementedError

    def has(self, chunk: ChunkId) -> bool:
        """Whether some pack claims to hold it (its bytes are not read)."""
        raise NotImplementedError

    def size(self, chunk: ChunkId) -> int:
        """Length of the content in bytes, as recorded; MissingChunk."""
        raise NotImplementedError

    def locate(self, chunk: ChunkId) -> ChunkLocation:
        """Where the copy that `get` would read lies; MissingChunk. For sorting reads by place."""
        raise NotImplementedError

    def id_of(self, data: Bytes) -> ChunkId:
        """The id that content has in this repository, stored or not: to compare a live file without a writer."""
        raise NotImplementedError
