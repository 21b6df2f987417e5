"""Checking the payloads of segments: read in large pieces, by a few threads, while the next ones are read ahead.

Guarantees: every byte between the table and the next segment is looked at, payloads by both of their hashes, padding for being zero;
what is wrong is told in the order of its place. Memory: a buffer and a decompressed chunk for each thread, the records of
the segments in work.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple

import zstandard

from ciuic.repository import packformat as pf
from ciuic.repository.chunks import (
    READ_ERRORS,
    BadCopyError,
    chunk_id,
    location_of,
    read_copy,
    read_stored,
    unpack,
)
from ciuic.repository.model import PackDamage, PackRecord
from ciuic.repository.packs import Packs, Segment

_RUN_BYTES = 1 << 20
"""One read: small enough to be in the processor's cache while it is hashed twice."""
_AHEAD_BYTES = 32 << 20
_AHEAD_SEGMENTS = 64


class _Run(NamedTuple):
    """What one read covers: padding and payloads in turn, from the end of what was before."""

    start: int
    end: int
    records: list[PackRecord]


class Checker:
    """For one caller; context manager."""

    def __init__(self, packs: Packs, seed: int) -> None:
        self._packs = packs
        self._seed = seed
        self._mine = threading.local()
        self._opened: list[Packs] = []
        self._executor = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "scrub")
        self._current: Future[list[PackDamage]] | None = None

    def __enter__(self) -> Checker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.shutdown(cancel_futures=True)
        for packs in self._opened:
            packs.close()

    def ahead(self, number: int, segments: Iterator[Segment]) -> Iterator[Segment]:
        """Each segment, when `result` has (or will have) what is wrong with it. NotFound."""
        waiting: deque[tuple[Segment, Future[list[PackDamage]]]] = deque()
        waiting_bytes = 0
        end = self._packs.footer_offset(number)
        for segment in segments:
            with suppress(OSError):  # only advice
                self._packs.will_need(number, segment.offset, segment.end - segment.offset)
            waiting.append((segment, self._executor.submit(self._check, number, segment, end)))
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

    def _check(self, number: int, segment: Segment, footer: int) -> list[PackDamage]:
        mine = self._mine
        if not hasattr(mine, "packs"):
            mine.packs = Packs(self._packs.directory, self._packs.repository_id)
            self._opened.append(mine.packs)
            mine.checked = _Segments(mine.packs, self._seed)
        checked: _Segments = mine.checked
        return list(checked.damages(number, segment, footer))


class _Segments:
    """For one thread."""

    def __init__(self, packs: Packs, seed: int) -> None:
        self._packs = packs
        self._seed = seed
        self._buffer = bytearray(_RUN_BYTES)
        self._decompressor = zstandard.ZstdDecompressor()

    def damages(self, number: int, segment: Segment, footer: int) -> Iterator[PackDamage]:
        padded = segment.damage is None
        at = segment.offset + pf.SEGMENT_HEAD_BYTES + len(segment.records) * pf.RECORD_BYTES + 8
        if not padded:
            at = segment.records[0].offset if segment.records else segment.end
        for run in _runs(at, segment.records):
            yield from self._run(number, run, padded=padded)
        if padded:
            yield from check_padding(self._packs, number, segment.end, min(pf.align(segment.end), footer))

    def _run(self, number: int, run: _Run, *, padded: bool) -> Iterator[PackDamage]:
        length = run.end - run.start
        if length > len(self._buffer):
            self._buffer = bytearray(length)
        try:
            whole = self._packs.read_into(number, run.start, memoryview(self._buffer)[:length]) == length
        except OSError as error:
            if error.errno not in READ_ERRORS:
                raise
            whole = False
        at = run.start
        for record in run.records:
            if padded:
                yield from self._padding(number, run.start, at, record.offset, whole=whole)
            if not whole or not self._is_good(record, record.offset - run.start):
                yield from check_record(self._packs, number, self._seed, record)
            at = record.offset + record.stored_bytes

    def _padding(self, number: int, base: int, start: int, end: int, *, whole: bool) -> Iterator[PackDamage]:
        if not whole:
            yield from check_padding(self._packs, number, start, end)
        elif self._buffer.count(0, start - base, end - base) < end - start:
            yield PackDamage(number, start, None, _PADDING)

    def _is_good(self, record: PackRecord, at: int) -> bool:
        stored = memoryview(self._buffer)[at : at + record.stored_bytes]
        if pf.checksum(stored) != record.checksum:
            return False
        if not record.flags & pf.FLAG_ZSTD:
            return chunk_id(stored, self._seed) == record.id
        try:
            content = unpack(stored, record.raw_bytes, record.flags, self._decompressor)
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


def check_record(packs: Packs, number: int, seed: int, record: PackRecord) -> Iterator[PackDamage]:
    """One payload alone, with the reason in words."""
    location = location_of(number, record)
    try:
        if pf.checksum(read_stored(packs, location)) != record.checksum:
            raise BadCopyError("its bytes do not match their checksum")
        read_copy(packs, location, record.id, seed)
    except BadCopyError as error:
        yield PackDamage(number, record.offset, record.id, str(error))
