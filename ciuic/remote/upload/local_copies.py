"""Stored bytes of local chunks, checked, as they go into a pack of the remote.

Guarantees: what is returned decodes to the chunk's content. One damaged copy would otherwise take the chunk's
name on the remote, where other hosts rely on it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ciuic.errors import Damaged
from ciuic.remote.upload.missing import MissingHere
from ciuic.repository import Repository
from ciuic.repository.format.pack_format import CODED_FLAGS
from ciuic.repository.ids import Bytes
from ciuic.repository.packs.chunk_reader import BadCopyError, read_base, read_stored, unpack
from ciuic.repository.packs.pack_directory import Packs
from ciuic.types import ChunkId


class StoredBytes(NamedTuple):
    """Chunk as it is stored."""

    id: ChunkId
    data: Bytes
    raw_bytes: int
    flags: int
    base: ChunkId | Literal[b""]


class LocalCopies:
    """Reader of stored bytes of one repository. Not thread-safe."""

    def __init__(self, repository: Repository, packs: Packs) -> None:
        self._repository = repository
        self._packs = packs

    def read(self, wanted: MissingHere) -> StoredBytes:
        """Return the stored bytes of this copy, or the content as it is where that copy is bad.

        Raises:
            Damaged: no copy of the chunk is good.
        """
        location = wanted.location
        chunks = self._repository.chunks
        try:
            stored = read_stored(self._packs, location)
            content: Bytes = stored
            if location.flags & CODED_FLAGS:
                base = read_base(ChunkId(location.base) if location.base else b"", chunks.get)
                content = unpack(stored, location.raw_bytes, location.flags, base=base)
            if chunks.id_of(content) == wanted.id:
                return StoredBytes(
                    wanted.id, stored, location.raw_bytes, location.flags, location.base or b""
                )
        except (BadCopyError, Damaged):
            # Another copy, or prune has moved this one.
            pass
        content = chunks.get(wanted.id)
        return StoredBytes(wanted.id, content, len(content), 0, b"")
