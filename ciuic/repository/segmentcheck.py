"""Checking the payloads of segments: one thread reads them whole and in order, others check what was read.

In order and in large pieces, because the kernel then reads ahead by itself, into large folios: measured cold, 2.3 to 3.2 GB/s; asked
for the same ranges (WILLNEED) it reads them a page at a time, 0.6 to 1.5 GB/s.

Guarantees: every byte between the table and the next segment is looked at, payloads by both of their hashes, padding for being zero;
what is wrong is told in the order of its place. Memory: what was read and is not checked yet (32 MiB and a segment), a
decompressed chunk for each thread, the records of the segments in work.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple

import zstandard

from ciuic.repository import packformat as pf
from ciuic.repository.chunks import (
    READ_ERRORS,
    BadCopyError,
    ChunkReader,
    chunk_id,
    location_of,
    read_base,
    read_copy,
    read_stored,
    unpack,
)
from ciuic.repository.finder import ReaderFinder
from ciuic.repository.ids import is_zero
from ciuic.repository.model import PackDamage, PackRecord
from ciuic.repository.packs import Packs, Segment

_RUN_BYTES = 1 << 20
"""One read: small enough to be in the processor's cache while it is hashed twice."""
_AHEAD_BYTES = 32 << 20
_AHEAD_SEGMENTS = 64
_SEGMENT_BYTES = (4 << 20) + (64 << 10)
"""Nearly all segments are of that size or smaller: their buffers fit each other."""


class _Run(NamedTuple):
    """What one read covers: padding and payloads in turn, from the end of what was before."""

    start: int
    end: int
    records: list[PackRecord]


class Checker:
    """For one caller; context manager."""

    def __init__(self, packs: Packs, seed: int, index_path: str) -> None:
        self._packs = packs
        self._seed = seed
        self._index_path = index_path
        self._mine = threading.local()
        self._opened: list[Packs] = []
        self._finders: list[ReaderFinder] = []
        self._reader: ChunkReader | None = None
        self._executor = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "scrub")
        self._current: Future[list[PackDamage]] | None = None
        self._free: list[bytearray] = []
        """To be used again."""

    @property
    def bases(self) -> ChunkReader:
        """For the caller's own thread."""
        if self._reader is None:
            finder = ReaderFinder(self._packs, self._index_path)
            self._finders.append(finder)
            self._reader = ChunkReader(self._packs, finder, self._seed)
        return self._reader

    def __enter__(self) -> Checker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.shutdown(cancel_futures=True)
        for finder in self._finders:
            finder.close()
        for packs in self._opened:
            packs.close()

    def ahead(self, number: int, segments: Iterator[Segment]) -> Iterator[Segment]:
        """Each segment, when `result` has (or will have) what is wrong with it. NotFound."""
        waiting: deque[tuple[Segment, Future[list[PackDamage]]]] = deque()
        waiting_bytes = 0
        end = self._packs.footer_offset(number)
        for segment in segments:
            read = self._read(number, segment)
            waiting.append((segment, self._executor.submit(self._check, number, segment, end, read)))
            waiting_bytes += segment.end - segment.offset
            while waiting_bytes > _AHEAD_BYTES or len(waiting) > _AHEAD_SEGMENTS:
                done, self._current = waiting.popleft()
                waiting_bytes -= done.end - done.offset
                yield done
        for done, self._current in waiting:
            yield done

    def result(self) -> list[PackDamage]:
        """What is wrong with the segment that `ahead` has given last. NotFound; OSError."""
        assert self._current is not None
        return self._current.result()

    def _read(self, number: int, segment: Segment) -> bytearray | None:
        """The whole segment; None where that cannot be, or is too much at once: then it is read piece by piece."""
        length = segment.end - segment.offset
        if length > _AHEAD_BYTES:
            return None
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = bytearray(max(length, _SEGMENT_BYTES))
        if len(buffer) < length:
            buffer = bytearray(length)
        try:
            if self._packs.read_into(number, segment.offset, memoryview(buffer)[:length]) == length:
                return buffer
        except OSError as error:
            if error.errno not in READ_ERRORS:
                raise
        return None

    def _check(self, number: int, segment: Segment, footer: int, read: bytearray | None) -> list[PackDamage]:
        mine = self._mine
        if not hasattr(mine, "packs"):
            mine.packs = Packs(self._packs.directory, self._packs.repository_id)
            self._opened.append(mine.packs)
            finder = ReaderFinder(mine.packs, self._index_path)
            self._finders.append(finder)
            mine.checked = _Segments(mine.packs, self._seed, ChunkReader(mine.packs, finder, self._seed))
        checked: _Segments = mine.checked
        found = list(checked.damages(number, segment, footer, read))
        if read is not None:
            self._free.append(read)
        return found


class _Segments:
    """For one thread."""

    def __init__(self, packs: Packs, seed: int, bases: ChunkReader) -> None:
        self._packs = packs
        self._seed = seed
        self._bases = bases
        self._buffer = bytearray(_RUN_BYTES)
        self._decompressor = zstandard.ZstdDecompressor()

    def damages(
        self, number: int, segment: Segment, footer: int, read: bytearray | None
    ) -> Iterator[PackDamage]:
        """``read``: the segment from its beginning on, where it has been read."""
        padded = segment.damage is None
        bases = sum(1 for record in segment.records if record.base)
        at = segment.offset + pf.table_bytes(len(segment.records), bases)
        if not padded:
            at = segment.records[0].offset if segment.records else segment.end
        for run in _runs(at, segment.records):
            if read is None:
                yield from self._run(number, run, *self._read(number, run), padded=padded)
            else:
                data = memoryview(read)[run.start - segment.offset : run.end - segment.offset]
                yield from self._run(number, run, data, whole=True, padded=padded)
        if padded:
            yield from check_padding(self._packs, number, segment.end, min(pf.align(segment.end), footer))

    def _read(self, number: int, run: _Run) -> tuple[memoryview, bool]:
        """(room for the run with what could be read of it, whether that is all)."""
        length = run.end - run.start
        if length > len(self._buffer):
            self._buffer = bytearray(length)
        data = memoryview(self._buffer)[:length]
        try:
            return data, self._packs.read_into(number, run.start, data) == length
        except OSError as error:
            if error.errno not in READ_ERRORS:
                raise
            return data, False

    def _run(
        self, number: int, run: _Run, data: memoryview, whole: bool, *, padded: bool
    ) -> Iterator[PackDamage]:
        at = run.start
        for record in run.records:
            if padded and whole:
                if not is_zero(data[at - run.start : record.offset - run.start]):
                    yield PackDamage(number, at, None, _PADDING)
            elif padded:
                yield from check_padding(self._packs, number, at, record.offset)
            start = record.offset - run.start
            if not whole or not self._is_good(record, data[start : start + record.stored_bytes]):
                yield from check_record(self._packs, number, self._seed, record, self._bases)
            at = record.offset + record.stored_bytes

    def _is_good(self, record: PackRecord, stored: memoryview) -> bool:
        if pf.checksum(stored) != record.checksum:
            return False
        if not record.flags:
            return chunk_id(stored, self._seed) == record.id
        try:
            base = read_base(record.base, self._bases.get)
            content = unpack(stored, record.raw_bytes, record.flags, self._decompressor, base)
        except BadCopyError:
            return False
        return chunk_id(content, self._seed) == record.id


def _runs(at: int, records: list[PackRecord]) -> Iterator[_Run]:
    start = at
    taken: list[PackRecord] = []
    for record in records:
        end = record.offset + record.stored_bytes
        if taken and end - start > _RUN_BYTES:
            yield _Run(start, at, taken)
            start, taken = at, []
        taken.append(record)
        at = end
    if taken:
        yield _Run(start, at, taken)


_PADDING = "padding is not zero"


def check_padding(packs: Packs, number: int, start: int, end: int) -> Iterator[PackDamage]:
    if end > start and any(packs.read(number, start, end - start)):
        yield PackDamage(number, start, None, _PADDING)


def check_record(
    packs: Packs, number: int, seed: int, record: PackRecord, bases: ChunkReader
) -> Iterator[PackDamage]:
    """One payload alone, with the reason in words."""
    location = location_of(number, record)
    try:
        if pf.checksum(read_stored(packs, location)) != record.checksum:
            raise BadCopyError("its bytes do not match their checksum")
        read_copy(packs, location, record.id, seed, bases.get)
    except BadCopyError as error:
        yield PackDamage(number, record.offset, record.id, str(error))
