"""What can be wrong with a repository, as nouns. All are `Damaged` (exit 4) except where there is nothing to
repair.
"""

from __future__ import annotations

from ciuic.errors import CiuicError, Damaged, DestinationExists
from ciuic.types import ChunkId


class DamagedRepository(Damaged):
    """The repository as a whole cannot be read: its configuration is missing, torn or contradicts itself."""


class DamagedChunk(Damaged):
    """The stored bytes of a chunk are not what its id promises, in every copy there is."""

    def __init__(self, chunk: ChunkId, pack: int, offset: int, reason: str) -> None:
        super().__init__(f"chunk {chunk.hex()} is damaged: {reason} (pack {pack:016x}, offset {offset})")
        self.chunk = chunk
        self.pack = pack
        self.offset = offset
        self.reason = reason


class MissingChunk(DamagedChunk):
    """No pack holds the chunk."""

    def __init__(self, chunk: ChunkId) -> None:
        Damaged.__init__(self, f"chunk {chunk.hex()} is missing: no pack holds it")
        self.chunk = chunk
        self.pack = -1
        self.offset = -1
        self.reason = "missing"


class DamagedTree(Damaged):
    """A chunk is whole but is not the tree node, block map node or xattr list that it is referred to as."""

    def __init__(self, chunk: ChunkId, reason: str) -> None:
        super().__init__(f"tree node {chunk.hex()} is damaged: {reason}")
        self.chunk = chunk
        self.reason = reason


class DamagedSnapshot(Damaged):
    """A snapshot file cannot be read. It is never a reason to delete anything."""

    def __init__(self, id_: str, reason: str) -> None:
        super().__init__(f"snapshot {id_} is damaged: {reason}")
        self.id = id_
        self.reason = reason


class DamagedPack(Damaged):
    """A pack's own structure (header, segment tables, footer) is damaged."""

    def __init__(self, pack: int, offset: int, reason: str) -> None:
        super().__init__(f"pack {pack:016x} is damaged at offset {offset}: {reason}")
        self.pack = pack
        self.offset = offset
        self.reason = reason


class UnsupportedFormat(CiuicError):
    """Written by a later version of ciuic, or with a hash or compression that this one does not know."""


class RepositoryExists(DestinationExists):
    """`Repository.create` was pointed at a directory that is a repository or is not empty."""
