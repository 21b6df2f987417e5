"""Reading chunks: find, read, check. Never returns a byte that does not match the chunk's id.

The index only says where to look. What it names and is not there, or is not right, is looked for again: in
the pack's own list, in packs that the index does not know, at last in all packs. So a stale, lost or lying
index costs time, never content.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from typing import Final, Literal, Protocol

import xxhash
import zstandard

from ciuic.errors import Damaged, NotFound
from ciuic.repository import planes
from ciuic.repository.errors import DamagedChunk, MissingChunk
from ciuic.repository.ids import Bytes
from ciuic.repository.model import ChunkLocation, PackRecord
from ciuic.repository.packformat import (
    CODED_FLAGS,
    FLAG_DIFFERENCE,
    FLAG_PLANES,
    MAX_CHUNK_BYTES,
)
from ciuic.repository.packs import Packs
from ciuic.types import ChunkId

READ_ERRORS = (errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EOVERFLOW, errno.EINVAL)
"""Of a bad disk, or a bad place in the index: another copy may do."""

MOST_BASES: Final = 8
"""Of one chunk, one behind the other: what writers write has `packing.MOST_BASES`, and what goes in circles has an end."""


MAX_COPIES_READ: Final = 64
"""For one chunk with all its bases. An honest repository has one copy of a chunk, or two after an interrupted collection; where
each of n copies is a difference from a chunk with n bad ones, a reader without this limit tries n**8.
"""


class Finder(Protocol):
    """Where chunks are."""

    def find(self, chunk: bytes) -> list[ChunkLocation]:
        """Known copies, the best first."""
        ...

    def search(self, chunk: bytes, failed: list[ChunkLocation]) -> list[ChunkLocation]:
        """Looks harder, after `find` gave nothing or nothing good. May return the failed ones again."""
        ...


class BadCopyError(Exception):
    """One stored copy cannot be used; the text says why."""


class ChunkReader:
    """Chunks by id. Takes no lock; safe beside a writer and garbage collection. Not for several threads at
    once.
    """

    def __init__(self, packs: Packs, finder: Finder, seed: int) -> None:
        self._packs = packs
        self._finder = finder
        self._seed = seed

    def get(self, chunk: ChunkId) -> bytes:
        """The content, checked against its id. MissingChunk or DamagedChunk when no copy of it is good."""
        return self._get(MOST_BASES, [MAX_COPIES_READ], chunk)

    def _get(self, bases: int, left: list[int], chunk: ChunkId) -> bytes:
        """``bases``: so many may still be behind it. ``left``: the number of copies that may still be read for the whole call."""
        base = partial(self._get, bases - 1, left) if bases else _too_deep
        failed: list[ChunkLocation] = []
        reason = ""
        for locations in (self._finder.find, lambda id_: self._finder.search(id_, failed)):
            for location in locations(chunk):
                if location in failed:
                    continue
                left[0] -= 1
                if left[0] < 0:
                    raise DamagedChunk(chunk, location.pack, location.offset, "none of many copies is good")
                try:
                    return read_copy(self._packs, location, chunk, self._seed, base)
                except BadCopyError as error:
                    failed.append(location)
                    reason = reason or str(error)
        if not failed:
            raise MissingChunk(chunk)
        raise DamagedChunk(chunk, failed[0].pack, failed[0].offset, reason)

    def has(self, chunk: ChunkId) -> bool:
        """Whether some pack claims to hold it (its bytes are not read)."""
        return bool(self._finder.find(chunk) or self._finder.search(chunk, []))

    def size(self, chunk: ChunkId) -> int:
        """Length of the content in bytes, as recorded; MissingChunk."""
        return self.locate(chunk).raw_bytes

    def locate(self, chunk: ChunkId) -> ChunkLocation:
        """Where the copy that `get` would read first lies; MissingChunk. For sorting reads by place."""
        found = self._finder.find(chunk) or self._finder.search(chunk, [])
        if not found:
            raise MissingChunk(chunk)
        return found[0]

    def locate_all(self, chunk: ChunkId) -> list[ChunkLocation]:
        """As `locate`, and the bases that are read with it. MissingChunk; DamagedChunk where a base is missing."""
        found = [self.locate(chunk)]
        while found[-1].base:
            try:
                if len(found) > MOST_BASES:
                    _too_deep(found[-1].base)
                found.append(self.locate(found[-1].base))
            except Damaged as error:
                reason = f"it is stored as a difference: {error.message}"
                raise DamagedChunk(chunk, found[0].pack, found[0].offset, reason) from None
        return found

    def id_of(self, data: Bytes) -> ChunkId:
        """The id that content has in this repository, stored or not: to compare a live file without a writer."""
        return chunk_id(data, self._seed)


def _too_deep(base: ChunkId) -> bytes:
    raise MissingChunk(base)


def chunk_id(data: Bytes, seed: int) -> ChunkId:
    """The id of this content."""
    return ChunkId(xxhash.xxh3_128_digest(data, seed=seed))


def location_of(number: int, record: PackRecord) -> ChunkLocation:
    return ChunkLocation(
        number, record.offset, record.stored_bytes, record.raw_bytes, record.flags, record.base
    )


def read_stored(packs: Packs, location: ChunkLocation) -> bytes:
    """The stored bytes of a copy, unchecked. BadCopyError when they cannot be read."""
    if not 0 <= location.stored_bytes <= MAX_CHUNK_BYTES or location.offset < 0:
        raise BadCopyError("the index names an impossible place")
    try:
        data = packs.read(location.pack, location.offset, location.stored_bytes)
    except NotFound:
        raise BadCopyError("its pack is gone") from None
    except OSError as error:
        if error.errno not in READ_ERRORS:
            raise
        raise BadCopyError(f"it cannot be read: {error.strerror}") from None
    if len(data) != location.stored_bytes:
        raise BadCopyError("the pack ends before it")
    return data


def unpack(
    data: Bytes,
    raw_bytes: int,
    flags: int,
    decompressor: zstandard.ZstdDecompressor | None = None,
    base: Bytes | None = None,
) -> bytes:
    """Stored bytes → content; never more than ``raw_bytes``, whatever the frame claims. BadCopyError.

    A decompressor that is kept spares making one for every chunk. ``base``: content of the base, for a difference.
    """
    return bytes(unpacked(data, raw_bytes, flags, decompressor, base))


def unpacked(
    data: Bytes,
    raw_bytes: int,
    flags: int,
    decompressor: zstandard.ZstdDecompressor | None = None,
    base: Bytes | None = None,
) -> Bytes:
    """As `unpack`, without a copy of what needs none."""
    if not flags & CODED_FLAGS:
        return data
    if flags & FLAG_PLANES:
        return _unpack_planes(data, raw_bytes, flags, base)
    try:
        if raw_bytes > MAX_CHUNK_BYTES or zstandard.get_frame_parameters(data).content_size != raw_bytes:
            raise BadCopyError("the compressed frame has another length than its record")
        return (decompressor or zstandard.ZstdDecompressor()).decompress(data, max_output_size=raw_bytes)
    except zstandard.ZstdError as error:
        raise BadCopyError(f"it cannot be decompressed: {error}") from None


def _unpack_planes(data: Bytes, raw_bytes: int, flags: int, base: Bytes | None) -> bytearray:
    if raw_bytes > MAX_CHUNK_BYTES or bool(flags & FLAG_DIFFERENCE) != (base is not None):
        raise BadCopyError("the index says of it what cannot be")
    try:
        return planes.decode(data, raw_bytes, base)
    except ValueError as error:
        raise BadCopyError(str(error)) from None


def read_base(base: ChunkId | Literal[b""], get: Callable[[ChunkId], bytes]) -> bytes | None:
    """The content of a base with `get`; None for what has none. BadCopyError."""
    if not base:
        return None
    try:
        return get(base)
    except Damaged as error:
        raise BadCopyError(f"it is stored as a difference: {error.message}") from None


def read_copy(
    packs: Packs, location: ChunkLocation, chunk: bytes, seed: int, get: Callable[[ChunkId], bytes]
) -> bytes:
    """The content of one copy, checked; BadCopyError. ``get``: reads the content of a base."""
    stored = read_stored(packs, location)
    data = unpack(stored, location.raw_bytes, location.flags, base=read_base(location.base, get))
    if chunk_id(data, seed) != chunk:
        raise BadCopyError("its bytes do not match its id")
    return data
