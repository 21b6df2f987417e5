"""Errors of a repository; all are `Damaged` (exit code 4) unless there is nothing to repair."""

from __future__ import annotations

from ciuic import __version__
from ciuic.errors import CiuicError, Damaged, DestinationExists, NotPermitted
from ciuic.types import ChunkId


class DamagedRepository(Damaged):
    """The repository cannot be read at all: its configuration is missing, damaged or contradicts itself."""


class DamagedChunk(Damaged):
    """Every stored copy of a chunk differs from what its id promises."""

    def __init__(self, chunk: ChunkId, pack: int, offset: int, reason: str) -> None:
        super().__init__(f"chunk {chunk.hex()} is damaged: {reason} (pack {pack:016x}, offset {offset})")
        self.chunk = chunk
        self.pack = pack
        self.offset = offset
        self.reason = reason


class MissingChunk(DamagedChunk):
    """Chunk that no pack holds."""

    def __init__(self, chunk: ChunkId) -> None:
        Damaged.__init__(self, f"chunk {chunk.hex()} is missing: no pack holds it")
        self.chunk = chunk
        self.pack = -1
        self.offset = -1
        self.reason = "missing"


class DamagedTree(Damaged):
    """A chunk is whole but is not the tree node, block map node or xattr list that refers to it."""

    def __init__(self, chunk: ChunkId, reason: str) -> None:
        super().__init__(f"tree node {chunk.hex()} is damaged: {reason}")
        self.chunk = chunk
        self.reason = reason


class DamagedSnapshot(Damaged):
    """A snapshot file cannot be read; that is never a reason to delete anything."""

    def __init__(self, id_: str, reason: str) -> None:
        super().__init__(
            f"snapshot {id_} is damaged: {reason}",
            hint="name another, as ciuic list shows them; ciuic check says what can be done about this one",
        )
        self.id = id_
        self.reason = reason


class DamagedPack(Damaged):
    """The structure of a pack (header, segment tables, footer) is damaged."""

    def __init__(self, pack: int, offset: int, reason: str) -> None:
        super().__init__(f"pack {pack:016x} is damaged at offset {offset}: {reason}")
        self.pack = pack
        self.offset = offset
        self.reason = reason


class UnsupportedFormat(CiuicError):
    """The repository was written by a later version of ciuic, or with an unknown hash or compression."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(
            message,
            hint=hint or f"this is ciuic {__version__}: use the version that wrote it, or a later one",
        )


class RepositoryExists(DestinationExists):
    """`Repository.create` was given a directory that is a repository or is not empty."""


class Archived(NotPermitted):
    """Content is there, in a storage class from which it cannot be read before it was thawed; no damage."""
