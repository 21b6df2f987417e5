"""Bases of new chunks: which chunk may be a base, and how the packing thread reads it.

Guarantees: no chunk gets a chain of more than `MAX_WRITTEN_BASE_DEPTH` bases, whichever copies of them are
read, and none is in its own chain; the content of a base is checked against its id.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

from ciuic.repository.chunk_reader import BadCopyError, read_stored, unpack
from ciuic.repository.codecs.byte_planes import WIDE
from ciuic.repository.codecs.codec import MAX_WRITTEN_BASE_DEPTH, Codec
from ciuic.repository.format.pack_format import FLAG_DIFFERENCE
from ciuic.repository.identity import Bytes, Identity
from ciuic.repository.model import ChunkLocation
from ciuic.repository.pack_directory import Packs
from ciuic.types import ChunkId


class BufferedChunk(NamedTuple):
    """Chunk that is not yet written."""

    stored: Bytes
    """The content itself until it is packed."""
    raw_bytes: int
    flags: int
    """0 until it is packed."""
    base: ChunkId | Literal[b""]
    """Base that the chunk has or may get."""
    undecided: bool = False
    """True if the chunk may get another base: its chain is unknown until it is packed."""


class Bases:
    """Lookup of bases.

    `found` and `close` belong to one thread; any thread may call the readers that `found` returns.
    """

    def __init__(
        self,
        packs: Packs,
        buffered: Callable[[ChunkId], BufferedChunk | None],
        find: Callable[[ChunkId], list[ChunkLocation]],
        identity: Identity,
    ) -> None:
        self._packs = packs
        self._buffered = buffered
        self._find = find
        self._identity = identity
        self._local = threading.local()
        self._all_packs: list[Packs] = []

    def found(
        self, chunk: ChunkId, size_bytes: int, codec: Codec, *, max_length: int = MAX_WRITTEN_BASE_DEPTH
    ) -> Codec:
        """Return a codec for this chunk that reads its base and twin, without those that cannot be used.

        ``max_length`` is less where differences from the chunk are stored already.
        """
        base, twin = codec.base, codec.twin
        if base is not None:
            chain = self._chain_of(chunk, base, max_length)
            # The format has differences between chunks of one length alone.
            if chain and chain[0].raw_bytes == size_bytes:
                codec = codec._replace(read_base=partial(self._content, base, chain))
            else:
                codec = codec._replace(base=None)
        if twin is not None:
            chain = self._chain_of(chunk, twin.base, max_length) if codec.width == WIDE else []
            read = partial(self._content, twin.base, chain)
            codec = codec._replace(twin=twin._replace(read=read) if chain else None)
        return codec

    def close(self) -> None:
        """Close all packs, when no thread reads any more."""
        while self._all_packs:
            self._all_packs.pop().close()

    def _chain_of(
        self, chunk: ChunkId, base: ChunkId, max_length: int
    ) -> list[BufferedChunk | ChunkLocation]:
        """Return the base and its own bases as stored; [] if they are too many, or their copies disagree."""
        found: list[BufferedChunk | ChunkLocation] = []
        at: ChunkId | Literal[b""] = base
        while at:
            # A chain that contains the chunk would be a cycle.
            if at == chunk or len(found) == max_length:
                return []
            buffered = self._buffered(at)
            copies = self._find(at)
            if (buffered is None and not copies) or (buffered is not None and buffered.undecided):
                return []
            one = buffered or copies[0]
            # A reader may take any copy: if their bases differ, the length of the chain is unknown.
            if any(copy.base != one.base for copy in copies):
                return []
            found.append(one)
            at = one.base
        return found

    def _content(self, base: ChunkId, chain: list[BufferedChunk | ChunkLocation]) -> bytes | None:
        content: bytes | None = None
        try:
            for one in reversed(chain):
                stored = (
                    one.stored
                    if isinstance(one, BufferedChunk)
                    else read_stored(self._packs_of_thread(), one)
                )
                content = unpack(
                    stored,
                    one.raw_bytes,
                    one.flags,
                    base=content if one.flags & FLAG_DIFFERENCE else None,
                )
        # The chunk is stored without this base.
        except (BadCopyError, OSError):
            return None
        # A difference from damaged content could never be undone.
        return content if content is not None and self._identity.chunk_id(content) == base else None

    def _packs_of_thread(self) -> Packs:
        """Return the packs of this thread, which open files of their own."""
        # `Packs` closes the descriptor used longest ago, which another thread could be reading from.
        packs: Packs | None = getattr(self._local, "packs", None)
        if packs is None:
            packs = self._local.packs = self._packs.reopen()
            self._all_packs.append(packs)
        return packs
