"""Read many chunks at once: one lookup, in the order of their positions, neighbours with one read.

Guarantees: every byte handed out matches its chunk's id, as with `ChunkReader.get`. A chunk that is damaged,
or not where the index says, is left to `get`, which searches further.

`BulkReader` hands out one chunk after another in a reused buffer, and leaves differences, which take several
reads, to `get`; it takes that buffer and one decompressed chunk of memory. `IntoMemory` reads into buffers of
the caller: content that a pack has as it is arrives without a copy, differences are read with all their bases.
It takes the stored bytes of eight chunks with their bases.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import zstandard

from ciuic.errors import NotFound
from ciuic.repository import byte_planes
from ciuic.repository.chunk_reader import (
    MAX_READ_BASE_DEPTH,
    READ_ERRORS,
    BadCopyError,
    ManyFinder,
    PackSource,
    unpack,
    unpacked,
)
from ciuic.repository.identity import Bytes, Identity
from ciuic.repository.model import ChunkLocation
from ciuic.repository.pack_format import CODED_FLAGS, FLAG_DIFFERENCE, FLAG_PLANES, MAX_CHUNK_BYTES
from ciuic.types import ChunkId

_RUN_BYTES = 1 << 20
"""Size of one read: large enough that calls cost nothing, small enough to be in the processor's cache when it
is checked and written."""
# Largest gap between two payloads of one read; reading the gap is cheaper than a second call.
_GAP_BYTES: Final = 4096
# Longest range that is announced at once.
_ADVICE_BYTES = 8 << 20


_NOTHING: Final = memoryview(b"")


class ReadChunk(NamedTuple):
    """Content of one requested chunk, valid until the next one is taken."""

    position: int
    """Index in the requested sequence."""
    source: bytes | bytearray | None
    """Buffer with the content; None where only `ChunkReader.get` can tell."""
    start: int
    end: int
    location: ChunkLocation | None
    """Position of the checked bytes in a pack."""
    stored: memoryview
    """The bytes as the pack has them, from which the content was made; valid as long as it."""

    @property
    def is_raw(self) -> bool:
        """True if the pack has the content as it is."""
        return self.location is not None and not self.location.flags & CODED_FLAGS


_Wanted = tuple[ChunkLocation, int]


class BulkReader:
    """Reader of many chunks, for one thread and one `read` at a time."""

    def __init__(self, packs: PackSource, finder: ManyFinder, identity: Identity) -> None:
        self.packs = packs
        self._finder = finder
        self._chunk_id = identity.chunk_id
        # Used again for every run; a caller that keeps content has to copy it.
        self._buffer = bytearray(_RUN_BYTES)
        self._decompressor = zstandard.ZstdDecompressor()

    def read(self, chunks: Sequence[ChunkId]) -> Iterator[ReadChunk]:
        """Yield each of the chunks in the order of their positions. OSError other than of a bad disk.

        On return the disk has been asked for all of it; it is read with the first chunk that is taken.
        """
        found = self._finder.find_many(chunks)
        placed: list[_Wanted] = []
        unknown: list[int] = []
        for position, chunk in enumerate(chunks):
            location = found.get(chunk)
            if location is None or not _possible(location) or location.flags & FLAG_DIFFERENCE:
                unknown.append(position)
            else:
                placed.append((location, position))
        # In file order, so that the kernel reads ahead and neighbours come with one read.
        placed.sort(key=lambda wanted: (wanted[0].pack, wanted[0].offset))
        runs = list(_runs(placed))
        self._announce(runs)
        return self._pieces(unknown, runs, chunks)

    def _pieces(
        self, unknown: list[int], runs: list[list[_Wanted]], chunks: Sequence[ChunkId]
    ) -> Iterator[ReadChunk]:
        for position in unknown:
            yield ReadChunk(position, None, 0, 0, None, _NOTHING)
        for run in runs:
            yield from self._read_run(run, chunks)

    def locate(self, chunks: Sequence[ChunkId]) -> dict[bytes, ChunkLocation]:
        """Return the possible positions of the chunks according to the index; nothing is read there."""
        found = self._finder.find_many(chunks)
        return {chunk: location for chunk, location in found.items() if _possible(location)}

    def _announce(self, runs: list[list[_Wanted]]) -> None:
        """Let the kernel, or the remote's client, start reading all runs while the first is worked on."""
        for number, start, end in _adjoining((run[0][0].pack, *_span(run)) for run in runs):
            # Only advice.
            with suppress(OSError, NotFound):
                self.packs.will_need(number, start, end - start)

    def _read_run(self, run: list[_Wanted], chunks: Sequence[ChunkId]) -> Iterator[ReadChunk]:
        start, end = _span(run)
        # A single chunk may be larger than a run.
        if end - start > len(self._buffer):
            self._buffer = bytearray(end - start)
        try:
            records = (location for location, _ in run)
            target = memoryview(self._buffer)[: end - start]
            length = self.packs.read_run(run[0][0].pack, records, start, target)
        except NotFound:
            length = 0
        except OSError as error:
            if error.errno not in READ_ERRORS:
                raise
            # Then one by one: perhaps only one block of it is bad.
            length = 0
        for location, position in run:
            at = location.offset - start
            upto = at + location.stored_bytes
            piece = ReadChunk(position, None, 0, 0, None, _NOTHING)
            if upto <= length:
                with suppress(BadCopyError):
                    piece = self._checked(position, chunks[position], location, at, upto)
            yield piece

    def _checked(
        self, position: int, chunk: ChunkId, location: ChunkLocation, at: int, upto: int
    ) -> ReadChunk:
        stored = memoryview(self._buffer)[at:upto]
        if not location.flags & CODED_FLAGS:
            if self._chunk_id(stored) != chunk:
                raise BadCopyError("its bytes do not match their id")
            return ReadChunk(position, self._buffer, at, upto, location, stored)
        content = unpack(stored, location.raw_bytes, location.flags, self._decompressor)
        if self._chunk_id(content) != chunk:
            raise BadCopyError("its bytes do not match their id")
        return ReadChunk(position, content, 0, len(content), location, stored)


def _adjoining(spans: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield fewer (pack, start, end): those that lie beside one another in a pack as one, up to 8 MiB.

    An object store takes as long for a request as for a mebibyte or two: 512 MiB in ranges of 768 KiB took 1.3 s, in
    ranges of 8 MiB 0.45 s.
    """
    pending: tuple[int, int, int] | None = None
    for number, start, end in spans:
        if pending is not None:
            near = number == pending[0] and 0 <= start - pending[2] <= _GAP_BYTES
            if near and end - pending[1] <= _ADVICE_BYTES:
                pending = (number, pending[1], end)
                continue
            yield pending
        pending = (number, start, end)
    if pending is not None:
        yield pending


def _possible(location: ChunkLocation) -> bool:
    return 0 <= location.stored_bytes <= MAX_CHUNK_BYTES and location.offset >= 0


def _runs(placed: list[_Wanted]) -> Iterator[list[_Wanted]]:
    """Yield runs of neighbours, as many as one read is for."""
    run: list[_Wanted] = []
    start = end = 0
    for wanted in placed:
        location = wanted[0]
        upto = location.offset + location.stored_bytes
        near = bool(run) and location.pack == run[0][0].pack and location.offset <= end + _GAP_BYTES
        if near and upto - start <= _RUN_BYTES:
            run.append(wanted)
            end = max(end, upto)
            continue
        if run:
            yield run
        run, start, end = [wanted], location.offset, upto
    if run:
        yield run


def _span(run: list[_Wanted]) -> tuple[int, int]:
    return run[0][0].offset, max(location.offset + location.stored_bytes for location, _ in run)


_INTO_RUN_BYTES: Final = 4 << 20

# Bounds the memory for the stored bytes of coded chunks and their bases.
_CODED_AT_ONCE: Final = 8

# Position of stored bytes, and the buffer for them.
_Place = tuple[ChunkLocation, memoryview]


class IntoMemory:
    """Reader into buffers of the caller, for one thread."""

    def __init__(self, packs: PackSource, finder: ManyFinder, identity: Identity) -> None:
        self._packs = packs
        self._finder = finder
        self._chunk_id = identity.chunk_id
        self._stored = bytearray()

    def read(self, chunks: Sequence[ChunkId], targets: Sequence[memoryview]) -> list[int]:
        """Read each chunk into its target, which is as long as its content.

        Returns the indices of the chunks that could not be read in this way: only `ChunkReader.get` can tell.
        OSError other than of a bad disk.
        """
        found = self._with_bases(chunks)
        failed: list[int] = []
        plain: list[int] = []
        coded: list[int] = []
        for position, (chunk, target) in enumerate(zip(chunks, targets, strict=True)):
            location = found.get(chunk)
            if location is None or location.raw_bytes != len(target) or not _possible(location):
                failed.append(position)
            else:
                (coded if location.flags & CODED_FLAGS else plain).append(position)
        self._announce(found)
        # Read to where the content is to stand, without a copy: a load of 202 MB takes 1.25 of torch.load's
        # processor time, and took 1.73. Each run is checked right after it is read, while it is in the cache.
        positions = {id(targets[position]): position for position in plain}
        places = [(found[chunks[position]], targets[position]) for position in plain]
        for run in _runs_apart(places):
            # A record with other lengths is damaged: its target keeps its old bytes, which match no id.
            self._read_run([place for place in run if len(place[1]) == place[0].stored_bytes])
            for _, target in run:
                position = positions[id(target)]
                if self._chunk_id(target) != chunks[position]:
                    failed.append(position)
        for first in range(0, len(coded), _CODED_AT_ONCE):
            some = coded[first : first + _CODED_AT_ONCE]
            stored = self._stored_of([chunks[position] for position in some], found)
            for position in some:
                target = targets[position]
                with suppress(BadCopyError):
                    content = _content(chunks[position], found, stored, target)
                    if self._chunk_id(content) == chunks[position]:
                        if content is not target:
                            target[:] = content
                        continue
                failed.append(position)
        return failed

    def _with_bases(self, chunks: Sequence[ChunkId]) -> dict[bytes, ChunkLocation]:
        """Return the positions of the chunks and of all their bases."""
        found = self._finder.find_many(chunks)
        new = list(found.values())
        # One query for each layer of bases, not one for each chunk.
        for _ in range(MAX_READ_BASE_DEPTH):
            bases = list({location.base for location in new if location.base and location.base not in found})
            if not bases:
                break
            more = self._finder.find_many(bases)
            found.update(more)
            new = list(more.values())
        return found

    def _announce(self, found: dict[bytes, ChunkLocation]) -> None:
        """Let the kernel, or the remote's client, start reading all runs while the first is worked on."""
        runs = _runs_apart(
            [(location, memoryview(b"")) for location in found.values() if _possible(location)]
        )
        for number, start, end in _adjoining(
            (run[0][0].pack, run[0][0].offset, run[-1][0].offset + run[-1][0].stored_bytes) for run in runs
        ):
            # Only advice.
            with suppress(OSError, NotFound):
                self._packs.will_need(number, start, end - start)

    def _stored_of(
        self, chunks: Sequence[bytes], found: dict[bytes, ChunkLocation]
    ) -> dict[bytes, memoryview]:
        """Return the stored bytes of these chunks and of all their bases; they are valid until the next call."""
        wanted: dict[bytes, ChunkLocation] = {}
        for chunk in chunks:
            at: bytes = chunk
            # Ends at a chunk that is wanted already, and so on a cycle of bases, which a crafted index may
            # have.
            while at and at not in wanted and at in found and _possible(found[at]):
                wanted[at] = found[at]
                at = found[at].base
        size_bytes = sum(location.stored_bytes for location in wanted.values())
        # Kept for the next chunks: fetching zeroed pages from the kernel took a fifth of a load's time.
        if len(self._stored) < size_bytes:
            self._stored = bytearray(size_bytes)
        room = memoryview(self._stored)
        stored: dict[bytes, memoryview] = {}
        start = 0
        for chunk, location in wanted.items():
            stored[chunk] = room[start : start + location.stored_bytes]
            start += location.stored_bytes
        # Read each position into its buffer; an unreadable one keeps its old bytes, which match no id.
        for run in _runs_apart([(location, stored[chunk]) for chunk, location in wanted.items()]):
            self._read_run(run)
        return stored

    def _read_run(self, run: list[_Place]) -> None:
        try:
            if run:
                self._packs.read_scattered(run[0][0].pack, run)
        except NotFound:
            pass
        except OSError as error:
            if error.errno not in READ_ERRORS:
                raise


def _content(
    chunk: bytes,
    found: dict[bytes, ChunkLocation],
    stored: dict[bytes, memoryview],
    into: memoryview | None = None,
    depth: int = 0,
) -> Bytes:
    """Return the content of a chunk, decoding its bases too; see `unpacked` for ``into``.

    Raises:
        BadCopyError: The copy cannot be used.
    """
    location = _read_location(chunk, found, stored, depth)
    raw_bytes = location.raw_bytes
    if not location.flags & FLAG_PLANES or raw_bytes > MAX_CHUNK_BYTES:
        return unpacked(stored[chunk], raw_bytes, location.flags)
    # Bases that are planes of the same length are decoded with the chunk: none of them becomes content.
    chain = [stored[chunk]]
    base: Bytes | None = None
    while location.flags & FLAG_DIFFERENCE or location.base:
        if not location.flags & FLAG_DIFFERENCE or not location.base:
            raise BadCopyError("the index has impossible flags for it")
        depth += 1
        at = location.base
        location = _read_location(at, found, stored, depth)
        if not location.flags & FLAG_PLANES or location.raw_bytes != raw_bytes:
            base = _content(at, found, stored, depth=depth)
            break
        chain.append(stored[at])
    try:
        return byte_planes.decode_chain(reversed(chain), raw_bytes, base, into)
    except ValueError as error:
        raise BadCopyError(str(error)) from None


def _read_location(
    chunk: bytes, found: dict[bytes, ChunkLocation], stored: dict[bytes, memoryview], depth: int
) -> ChunkLocation:
    """Return the position of a chunk whose stored bytes were read.

    Raises:
        BadCopyError: They were not, or the chain of bases is too long.
    """
    if chunk not in stored or depth > MAX_READ_BASE_DEPTH:
        raise BadCopyError("its base cannot be read")
    return found[chunk]


def _runs_apart(places: list[_Place]) -> Iterator[list[_Place]]:
    """Yield runs of neighbours, as many as one read is for, in order of position."""
    run: list[_Place] = []
    start = end = 0
    for place in sorted(places, key=lambda place: (place[0].pack, place[0].offset)):
        location = place[0]
        upto = location.offset + location.stored_bytes
        # Records of a crafted index may overlap: one preadv(2) cannot put the same bytes into two buffers, so
        # such a record begins a run of its own.
        near = bool(run) and location.pack == run[0][0].pack and 0 <= location.offset - end <= _GAP_BYTES
        if near and upto - start <= _INTO_RUN_BYTES:
            run.append(place)
            end = upto
            continue
        if run:
            yield run
        run, start, end = [place], location.offset, upto
    if run:
        yield run
