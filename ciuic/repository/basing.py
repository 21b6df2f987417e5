"""What a new chunk may be stored as the difference from, and how that is read by the thread that needs it.

Guarantees: no chunk comes to have more than `MOST_BASES` behind it, whichever copies of them are read, and none itself; the content of a base
was checked against its id.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

from ciuic.repository.chunks import BadCopyError, chunk_id, read_stored, unpack
from ciuic.repository.coding import MOST_BASES, Codec
from ciuic.repository.ids import Bytes
from ciuic.repository.model import ChunkLocation
from ciuic.repository.packformat import FLAG_DIFFERENCE
from ciuic.repository.packs import Packs
from ciuic.repository.planes import WIDE
from ciuic.types import ChunkId


class Held(NamedTuple):
    """What is not written yet."""

    stored: Bytes
    """The content itself until it is packed."""
    raw_bytes: int
    flags: int
    """0 until it is packed."""
    base: ChunkId | Literal[b""]
    """That it has or may come to have."""
    undecided: bool = False
    """It may come to have another: until it is packed nobody knows what lies behind it."""


class Bases:
    """`found` and `close` belong to one thread; what `found` returns reads in any."""

    def __init__(
        self,
        packs: Packs,
        held: Callable[[ChunkId], Held | None],
        find: Callable[[ChunkId], list[ChunkLocation]],
        seed: int,
    ) -> None:
        self._packs = packs
        self._held = held
        self._find = find
        self._seed = seed
        self._own = threading.local()
        self._all_packs: list[Packs] = []

    def found(self, chunk: ChunkId, size_bytes: int, codec: Codec) -> Codec:
        """A codec for this chunk that can read its base and its twin; one without, where they cannot be that."""
        base, twin = codec.base, codec.twin
        if base is not None:
            below = self._below(chunk, base)
            if below and below[0].raw_bytes == size_bytes:
                codec = codec._replace(read_base=partial(self._content, base, below))
            else:
                codec = codec._replace(base=None)
        if twin is not None:
            below = self._below(chunk, twin.base) if codec.width == WIDE else []
            read = partial(self._content, twin.base, below)
            codec = codec._replace(twin=twin._replace(read=read) if below else None)
        return codec

    def close(self) -> None:
        """When no thread reads any more."""
        while self._all_packs:
            self._all_packs.pop().close()

    def _below(self, chunk: ChunkId, base: ChunkId) -> list[Held | ChunkLocation]:
        """The base, and its own one behind the other, as each is stored; [] where they are too many or not to be found in one way."""
        found: list[Held | ChunkLocation] = []
        at: ChunkId | Literal[b""] = base
        while at:
            if at == chunk or len(found) == MOST_BASES:
                return []
            held = self._held(at)
            copies = self._find(at)
            if (held is None and not copies) or (held is not None and held.undecided):
                return []
            one = held or copies[0]
            if any(copy.base != one.base for copy in copies):
                return []
            found.append(one)
            at = one.base
        return found

    def _content(self, base: ChunkId, below: list[Held | ChunkLocation]) -> bytes | None:
        content: bytes | None = None
        try:
            for one in reversed(below):
                stored = one.stored if isinstance(one, Held) else read_stored(self._packs_here(), one)
                content = unpack(
                    stored,
                    one.raw_bytes,
                    one.flags,
                    base=content if one.flags & FLAG_DIFFERENCE else None,
                )
        except (BadCopyError, OSError):
            return None
        return content if content is not None and chunk_id(content, self._seed) == base else None

    def _packs_here(self) -> Packs:
        """For this thread: files are opened and closed as they are needed."""
        packs: Packs | None = getattr(self._own, "packs", None)
        if packs is None:
            packs = self._own.packs = Packs(self._packs.directory, self._packs.repository_id)
            self._all_packs.append(packs)
        return packs
