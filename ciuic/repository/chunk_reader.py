"""Read chunks: find, read, check. Never returns a byte that does not match the chunk's id.

The index only says where to look. A chunk that is missing or damaged there is searched for in the pack's own
list, in packs that the index does not know, and at last in all packs. So a stale, lost or wrong index costs
time, never content.

`PackSource` and `Finder` are what readers read from: packs of a directory, or of something else. Every read
names the records that it is for. So a source may keep records in another form than a pack of a directory, for
instance each sealed by itself; and it need not be right, because readers check all content against its id.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, Literal, Protocol

import zstandard

from ciuic.errors import Damaged, NotFound
from ciuic.repository.errors import DamagedChunk, MissingChunk
from ciuic.repository.identity import Bytes, Identity
from ciuic.repository.model import ChunkLocation, PackRecord
from ciuic.repository.pack_format import CODED_FLAGS, FLAG_DIFFERENCE, FLAG_PLANES, MAX_CHUNK_BYTES
from ciuic.types import ChunkId


class Finder(Protocol):
    """Lookup of chunks."""

    def find(self, chunk: bytes) -> list[ChunkLocation]:
        """Return known copies, the best first."""

    def search(self, chunk: bytes, failed: list[ChunkLocation]) -> list[ChunkLocation]:
        """Search harder, after `find` gave nothing good. May return the failed ones again."""


class ManyFinder(Protocol):
    """Lookup of many chunks at once."""

    def find_many(self, chunks: Sequence[bytes]) -> dict[bytes, ChunkLocation]:
        """Return the copy to read first for each chunk that is known."""


class ChunkLookup(Finder, ManyFinder, Protocol):
    """Lookup of one open repository, for one thread."""


class PackSource(Protocol):
    """Stored bytes of packs, for one thread.

    A pack has any number that the lookup gives. Every method raises NotFound when the pack is gone, and
    OSError when a record cannot be read: with one of `READ_ERRORS` (EBADMSG where a seal does not open),
    readers go on to another copy.
    """

    def read(self, number: int, offset: int, length: int) -> bytes:
        """Return the stored bytes of the record at this offset; fewer where the pack ends before its end."""

    def read_run(self, number: int, records: Iterable[ChunkLocation], start: int, target: memoryview) -> int:
        """Read neighbouring records: the byte at ``start`` + n of the pack to the n-th of the target.

        Between records the target may get any bytes. Returns how much of the target is read, less than all
        only where the pack ends before. Records are in order of position and may overlap.
        """

    def read_scattered(self, number: int, records: Sequence[tuple[ChunkLocation, memoryview]]) -> None:
        """Read neighbouring records, each into its target, as far as the pack goes.

        Records are in order of position and do not overlap. A target is as long as its record.
        """

    def will_need(self, number: int, offset: int, length: int) -> None:
        """Begin to read a range, which reads of its records follow. Only advice."""

    def descriptor(self, number: int) -> int:
        """Return a descriptor of the file that has the pack's records at their offsets, to share its extents.

        Raises:
            NotFound: the pack is gone, or is no such file.
        """


READ_ERRORS = (errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EOVERFLOW, errno.EINVAL)
"""Errors of a bad disk, or of a bad position in the index: another copy may be good."""

MAX_READ_BASE_DEPTH: Final = 8
"""Longest chain of bases that a reader follows: writers make chains of `MAX_WRITTEN_BASE_DEPTH`, and a
crafted cycle ends here."""


_MAX_COPIES_READ: Final = 64
"""Limit of copies read for one chunk with all its bases. An honest repository has one copy of a chunk, or two
after an interrupted collection. Where each of n copies is a difference from a chunk with n bad ones, a reader
without this limit tries n**8."""


class BadCopyError(Exception):
    """Stored copy that cannot be used; the text says why."""


class ChunkReader:
    """Chunks by id. Takes no lock; safe beside a writer and prune. Not thread-safe."""

    def __init__(self, packs: PackSource, finder: Finder, identity: Identity) -> None:
        self._packs = packs
        self._finder = finder
        self.identity = identity

    def get(self, chunk: ChunkId) -> bytes:
        """Return the content, checked against its id.

        MissingChunk or DamagedChunk when no copy of it is good.
        """
        return self._get(MAX_READ_BASE_DEPTH, [_MAX_COPIES_READ], chunk)

    def _get(self, bases: int, left: list[int], chunk: ChunkId) -> bytes:
        """Return the content of a chunk.

        ``bases`` is how many bases may still follow, ``left`` how many copies the whole call may still read.
        """
        base = partial(self._get, bases - 1, left) if bases else _too_deep
        failed: list[ChunkLocation] = []
        reason = ""
        # The search reads lists of whole packs, so it comes only after every known copy has failed.
        for locations in (self._finder.find, lambda id_: self._finder.search(id_, failed)):
            for location in locations(chunk):
                # The search may return copies that have failed already.
                if location in failed:
                    continue
                # One counter for the chunk and all its bases.
                left[0] -= 1
                if left[0] < 0:
                    raise DamagedChunk(
                        chunk, location.pack, location.offset, f"none of {_MAX_COPIES_READ} copies is good"
                    )
                try:
                    return read_copy(self._packs, location, chunk, self.identity, base)
                except BadCopyError as error:
                    failed.append(location)
                    reason = reason or str(error)
        if not failed:
            raise MissingChunk(chunk)
        raise DamagedChunk(chunk, failed[0].pack, failed[0].offset, reason)

    def has(self, chunk: ChunkId) -> bool:
        """Return whether some pack claims to hold the chunk; its bytes are not read."""
        return bool(self._finder.find(chunk) or self._finder.search(chunk, []))

    def size(self, chunk: ChunkId) -> int:
        """Return the recorded length of the content in bytes.

        Raises:
            MissingChunk: no pack has the chunk.
        """
        return self.locate(chunk).raw_bytes

    def locate(self, chunk: ChunkId) -> ChunkLocation:
        """Return the position of the copy that `get` would read first, for sorting reads.

        Raises:
            MissingChunk: no pack has the chunk.
        """
        found = self._finder.find(chunk) or self._finder.search(chunk, [])
        if not found:
            raise MissingChunk(chunk)
        return found[0]

    def locate_all(self, chunk: ChunkId) -> list[ChunkLocation]:
        """Return positions like `locate`, with those of the bases that are read with the chunk.

        Raises:
            MissingChunk: no pack has the chunk.
            DamagedChunk: a base is missing.
        """
        found = [self.locate(chunk)]
        while found[-1].base:
            try:
                # A crafted index may name a cycle of bases.
                if len(found) > MAX_READ_BASE_DEPTH:
                    _too_deep(found[-1].base)
                found.append(self.locate(found[-1].base))
            except Damaged as error:
                reason = f"it is stored as a difference: {error.message}"
                raise DamagedChunk(chunk, found[0].pack, found[0].offset, reason) from None
        return found


def _too_deep(base: ChunkId) -> bytes:
    raise MissingChunk(base)


def location_of(number: int, record: PackRecord) -> ChunkLocation:
    """Return the location of a record in pack ``number``."""
    return ChunkLocation(
        number, record.offset, record.stored_bytes, record.raw_bytes, record.flags, record.base
    )


def read_stored(packs: PackSource, location: ChunkLocation) -> bytes:
    """Return the stored bytes of a copy, unchecked. BadCopyError when they cannot be read."""
    # The index is not trusted: a length in it must not decide how much is allocated.
    if not 0 <= location.stored_bytes <= MAX_CHUNK_BYTES or location.offset < 0:
        raise BadCopyError("the index has an impossible position for it")
    try:
        data = packs.read(location.pack, location.offset, location.stored_bytes)
    except NotFound:
        # Prune moved it between the lookup and the read; the search finds the new place.
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
    """Return the content of stored bytes; never more than ``raw_bytes``, whatever the frame claims.

    Args:
        data: Stored bytes.
        raw_bytes: Length of the content.
        flags: How it is stored.
        decompressor: A kept decompressor saves making one for every chunk.
        base: Content of the base, for a difference.

    Raises:
        BadCopyError: the bytes cannot be decoded.
    """
    return bytes(unpacked(data, raw_bytes, flags, decompressor, base))


def unpacked(
    data: Bytes,
    raw_bytes: int,
    flags: int,
    decompressor: zstandard.ZstdDecompressor | None = None,
    base: Bytes | None = None,
    into: memoryview | None = None,
) -> Bytes:
    """Return the same as `unpack`, without a copy where none is needed.

    With ``into``, memory of ``raw_bytes`` bytes, the result may be this memory; it is undefined otherwise, and
    after an error.
    """
    if not flags & CODED_FLAGS:
        return data
    if flags & FLAG_PLANES:
        return _unpack_planes(data, raw_bytes, flags, base, into)
    try:
        # The declared size first: a crafted frame may decompress to gigabytes.
        if raw_bytes > MAX_CHUNK_BYTES or zstandard.get_frame_parameters(data).content_size != raw_bytes:
            raise BadCopyError("the compressed frame has another length than its record")
        return (decompressor or zstandard.ZstdDecompressor()).decompress(data, max_output_size=raw_bytes)
    except zstandard.ZstdError as error:
        raise BadCopyError(f"it cannot be decompressed: {error}") from None


def _unpack_planes(
    data: Bytes, raw_bytes: int, flags: int, base: Bytes | None, into: memoryview | None
) -> bytearray | memoryview:
    # The flags come from the index, and must agree with the base that it names.
    if raw_bytes > MAX_CHUNK_BYTES or bool(flags & FLAG_DIFFERENCE) != (base is not None):
        raise BadCopyError("the index has impossible flags or lengths for it")
    # Imported here: most commands read trees alone, which are never stored so.
    from ciuic.repository import byte_planes

    try:
        return byte_planes.decode(data, raw_bytes, base, into)
    except ValueError as error:
        raise BadCopyError(str(error)) from None


def read_base(base: ChunkId | Literal[b""], get: Callable[[ChunkId], bytes]) -> bytes | None:
    """Return the content of a base through ``get``; None for no base.

    Raises:
        BadCopyError: the copy cannot be used; the text says why.
    """
    if not base:
        return None
    try:
        return get(base)
    except Damaged as error:
        raise BadCopyError(f"it is stored as a difference: {error.message}") from None


def read_copy(
    packs: PackSource,
    location: ChunkLocation,
    chunk: bytes,
    identity: Identity,
    get: Callable[[ChunkId], bytes],
) -> bytes:
    """Return the content of one copy, checked; ``get`` reads the content of a base.

    Raises:
        BadCopyError: the copy cannot be used; the text says why.
    """
    stored = read_stored(packs, location)
    data = unpack(stored, location.raw_bytes, location.flags, base=read_base(location.base, get))
    if identity.chunk_id(data) != chunk:
        raise BadCopyError("its bytes do not match its id")
    return data
