"""Check every byte of the packs, and the index against them, for verify and check.

Each thread reads a pack of its own from end to end, in pieces that are still in the processor's cache when
they are hashed. In order, because the kernel then reads ahead by itself, into large folios: measured cold, 2.3
to 3.2 GB/s; asked for the same ranges (WILLNEED) it reads them a page at a time, 0.6 to 1.5 GB/s.

Guarantees: every byte between the table and the next segment is checked, payloads by both of their hashes,
padding for being zero; damage is reported in order of position. Memory for each thread: a piece (512 KiB, or a
chunk that is larger), a decompressed chunk, the records of its pack.
"""

from __future__ import annotations

import math
import os
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import islice
from queue import SimpleQueue
from types import TracebackType
from typing import NamedTuple

import zstandard

from ciuic.errors import NotFound
from ciuic.repository import pack_format as pf
from ciuic.repository.chunk_lookup import ReaderFinder
from ciuic.repository.chunk_reader import (
    READ_ERRORS,
    BadCopyError,
    ChunkReader,
    location_of,
    read_base,
    read_copy,
    read_stored,
    unpack,
)
from ciuic.repository.errors import DamagedPack, UnsupportedFormat
from ciuic.repository.identity import Identity, is_zero
from ciuic.repository.index_database import ForeignIndexError, IndexDatabase, MissingIndexError
from ciuic.repository.model import PackDamage, PackRecord
from ciuic.repository.pack_directory import Packs, Segment
from ciuic.units import plural

# Size of one read, small enough to be in the processor's cache while it is hashed twice.
_RUN_BYTES = 512 << 10
_AHEAD_SEGMENTS = 8
"""Segments that are read while the caller pauses: up to 4 MiB each, but for a chunk that is larger."""


class _Run(NamedTuple):
    """Range of one read: padding and payloads in turn, from the end of the range before."""

    start: int
    end: int
    records: list[PackRecord]


class _Scrubber:
    """Reads and checks packs in threads, one pack in each, for one caller; context manager."""

    def __init__(self, packs: Packs, identity: Identity, index_path: str) -> None:
        self._packs = packs
        self._identity = identity
        self._index_path = index_path
        # Checker of each thread.
        self._mine = threading.local()
        # What the threads have opened, to be closed after they have ended.
        self._opened: list[Packs] = []
        self._finders: list[ReaderFinder] = []
        # One thread a processor: reading, hashing and decompressing release the interpreter lock.
        self.threads = len(os.sched_getaffinity(0))
        self._executor = ThreadPoolExecutor(self.threads, "scrub")
        # True for each segment that was checked, False for each pack.
        self._ended: SimpleQueue[bool] = SimpleQueue()
        # Segments that the threads may read before the caller has had its pause.
        self._turns = threading.Semaphore(_AHEAD_SEGMENTS)
        self._stopped = False

    def __enter__(self) -> _Scrubber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped = True
        self._turns.release(self.threads)
        self._executor.shutdown(cancel_futures=True)
        for finder in self._finders:
            finder.close()
        for packs in self._opened:
            packs.close()

    def begin(
        self, number: int, size_bytes: int, covered: tuple[int, bool], *, fresh: bool
    ) -> Future[list[PackDamage]]:
        """Queue a pack that has this size; see `_scrub_pack`."""
        future = self._executor.submit(self._damages, number, size_bytes, covered, fresh)
        future.add_done_callback(lambda done: self._ended.put(False))
        return future

    def result(self, future: Future[list[PackDamage]], between: Callable[[], None]) -> list[PackDamage]:
        """Wait for a pack and return what is wrong with it; none if it is gone.

        Args:
            future: Result of `begin`.
            between: Called for each segment that was read, of any pack; while it waits, reading ends.

        Raises:
            OSError: the disk failed.
        """
        while not future.done():
            if self._ended.get():
                between()
                self._turns.release()
        return future.result()

    def _damages(
        self, number: int, size_bytes: int, covered: tuple[int, bool], fresh: bool
    ) -> list[PackDamage]:
        mine = self._mine
        if not hasattr(mine, "packs"):
            # Each thread has its own descriptors, index connection and decompressor: none is thread-safe.
            mine.packs = self._packs.reopen()
            self._opened.append(mine.packs)
            finder = ReaderFinder(mine.packs, self._index_path)
            self._finders.append(finder)
            mine.checker = _Segments(
                mine.packs, self._identity, ChunkReader(mine.packs, finder, self._identity)
            )
        packs: Packs = mine.packs
        found: list[PackDamage] = []
        # NotFound: prune may drop the pack meanwhile.
        with suppress(NotFound), packs.page_cache_preserved(number):
            for damage in _scrub_pack(packs, mine.checker, number, covered, fresh=fresh, turn=self._turn):
                if packs.size(number) < size_bytes:
                    # Prune moves chunks elsewhere from the pack's end on; they are checked there.
                    break
                found.append(damage)
        return found

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Occupy one of the turns, which the caller gives back (`result`)."""
        self._turns.acquire()
        if self._stopped:
            raise CancelledError
        yield
        self._ended.put(True)


class _Segments:
    """Checker of segments for one thread."""

    def __init__(self, packs: Packs, identity: Identity, bases: ChunkReader) -> None:
        self._packs = packs
        self._identity = identity
        self._chunk_id = identity.chunk_id
        self._bases = bases
        self._buffer = bytearray(_RUN_BYTES)
        self._decompressor = zstandard.ZstdDecompressor()

    def damages(self, number: int, segment: Segment, footer: int) -> Iterator[PackDamage]:
        """Yield what is wrong with a segment."""
        padded = segment.damage is None
        bases = sum(1 for record in segment.records if record.base)
        at = segment.offset + pf.table_bytes(len(segment.records), bases)
        # The size of a damaged table is unknown: begin at the first record that was found.
        if not padded:
            at = segment.records[0].offset if segment.records else segment.end
        for run in _runs(at, segment.records):
            yield from self._run(number, run, *self._read(number, run), padded=padded)
        if padded:
            yield from _check_padding(self._packs, number, segment.end, min(pf.align(segment.end), footer))

    def record_damage(self, number: int, record: PackRecord) -> Iterator[PackDamage]:
        """Check one payload alone, and say in words what is wrong."""
        location = location_of(number, record)
        try:
            if pf.checksum(read_stored(self._packs, location)) != record.checksum:
                raise BadCopyError("its bytes do not match their checksum")
            read_copy(self._packs, location, record.id, self._identity, self._bases.get)
        except BadCopyError as error:
            yield PackDamage(number, record.offset, record.id, str(error))

    def _read(self, number: int, run: _Run) -> tuple[memoryview, bool]:
        """Return (buffer with what could be read of the run, whether that is all)."""
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
            # The padding was read with the payloads; otherwise it takes a read of its own.
            if padded and whole:
                # Small payloads have no padding, and the call would take most of their time.
                if at != record.offset and not is_zero(data[at - run.start : record.offset - run.start]):
                    yield PackDamage(number, at, None, _PADDING)
            elif padded:
                yield from _check_padding(self._packs, number, at, record.offset)
            start = record.offset - run.start
            # Read once more, alone: that says whether the disk, the checksum or the content is wrong.
            if not whole or not self._is_good(record, data[start : start + record.stored_bytes]):
                yield from self.record_damage(number, record)
            at = record.offset + record.stored_bytes

    def _is_good(self, record: PackRecord, stored: memoryview) -> bool:
        if pf.checksum(stored) != record.checksum:
            return False
        if not record.flags:
            return self._chunk_id(stored) == record.id
        try:
            base = read_base(record.base, self._bases.get)
            content = unpack(stored, record.raw_bytes, record.flags, self._decompressor, base)
        except BadCopyError:
            return False
        return self._chunk_id(content) == record.id


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


def _check_padding(packs: Packs, number: int, start: int, end: int) -> Iterator[PackDamage]:
    """Yield the damage if the range is not zero."""
    if end > start and any(packs.read(number, start, end - start)):
        yield PackDamage(number, start, None, _PADDING)


Progress = Callable[[int, int], None]


def scrub(
    packs: Packs,
    index_path: str,
    identity: Identity,
    progress: Progress | None,
    after: int,
    goes_on: Callable[[int], bool],
    between: Callable[[], None],
) -> Iterator[PackDamage]:
    """Check all packs; see `Repository.scrub`."""
    sizes = packs.sizes()
    covered, newest = _covered(index_path)
    total, done = sum(sizes.values()), 0
    numbers = iter([number for number in sizes if number > after])
    reading: deque[Future[list[PackDamage]]] = deque()
    with _Scrubber(packs, identity, index_path) as scrubber:
        for number, size_bytes in sizes.items():
            if number > after:
                # Twice as many as threads: small packs are read to their end before the first is asked for.
                for ahead in islice(numbers, 2 * scrubber.threads - len(reading)):
                    facts = covered.get(ahead, (-1, False))
                    reading.append(scrubber.begin(ahead, sizes[ahead], facts, fresh=ahead > newest))
                yield from scrubber.result(reading.popleft(), between)
            done += size_bytes
            if progress is not None:
                progress(done, total)
            if number > after and not goes_on(number):
                return


def _covered(index_path: str) -> tuple[dict[int, tuple[int, bool]], float]:
    """Return what the index covers, and its newest pack: infinity if the index says nothing."""
    nothing: tuple[dict[int, tuple[int, bool]], float] = ({}, math.inf)
    try:
        index = IndexDatabase.open(index_path, "read")
    except sqlite3.Error:
        return nothing
    try:
        covered = index.packs()
        # Without that fact the index was just made, and says nothing about which packs are new.
        return covered, max(covered, default=0) if index.fact("last_pack") else math.inf
    except sqlite3.Error:
        return nothing
    finally:
        index.close()


def _scrub_pack(
    packs: Packs,
    checker: _Segments,
    number: int,
    covered: tuple[int, bool],
    *,
    fresh: bool,
    turn: Callable[[], AbstractContextManager[None]],
) -> Iterator[PackDamage]:
    """Check one pack.

    ``fresh`` is True if the pack is newer than all that the index knows: a writer is writing it, or died
    before a commit. ``covered`` is what the index knows of it: (bytes, sealed). ``turn`` is entered for each
    segment.
    """
    # A footer ends what a writer does to a pack: one that has it must be whole, however new it is.
    fresh = fresh and packs.unfinished(number)
    try:
        packs.header(number)
    except (DamagedPack, UnsupportedFormat) as error:
        if not fresh:
            yield PackDamage(number, 0, None, str(error))
    listed: list[PackRecord] | None = None
    try:
        listed = packs.footer(number)
    except DamagedPack as error:
        yield PackDamage(number, error.offset, None, error.reason)
    else:
        # The index remembers the pack as sealed: then a footer was synced, and it is gone.
        if listed is None and covered[1]:
            yield PackDamage(number, packs.size(number), None, "the footer is damaged or missing")
    found: list[PackRecord] = []
    end = packs.footer_offset(number)
    for segment in _segments(packs, number, covered if listed is None else None):
        if segment.damage is not None and not fresh:
            yield PackDamage(number, segment.offset, None, segment.damage.reason)
        with turn():
            damages = list(checker.damages(number, segment, end))
        yield from damages
        found += segment.records
    if listed is not None and listed != found:
        yield PackDamage(
            number, packs.footer_offset(number), None, "the footer and the segments have different records"
        )
        # Records in a segment whose table is damaged are still found through the footer.
        for record in listed:
            if record not in found:
                yield from checker.record_damage(number, record)


def _segments(packs: Packs, number: int, covered: tuple[int, bool] | None) -> Iterator[Segment]:
    """Yield the segments up to the indexed end.

    Beyond that an unsealed pack is a writer's: one that is writing now, or a dead one whose tail the next
    writer recovers.
    """
    for segment in packs.scan(number):
        if covered is not None and 0 < covered[0] <= segment.offset:
            return
        yield segment


def pack_problems(packs: Packs, index_path: str) -> Iterator[tuple[int, str]]:
    """Yield structural damage of packs; see `Repository.pack_problems`."""
    covered, newest = _covered(index_path)
    for number, size_bytes in packs.sizes().items():
        known_bytes, sealed = covered.get(number, (-1, False))
        try:
            if number > newest and packs.unfinished(number):
                # A writer is writing it, or died before a commit.
                continue
            try:
                packs.header(number)
                if packs.footer(number) is None and sealed:
                    yield number, f"pack {number:016x}: the footer is damaged or missing"
            except (DamagedPack, UnsupportedFormat) as error:
                yield number, error.message
        except NotFound:
            # Prune dropped it meanwhile.
            continue
        if size_bytes < known_bytes:
            missing = known_bytes - size_bytes
            yield number, f"pack {number:016x} has {size_bytes} bytes: its last {missing} are missing"


def index_problems(packs: Packs, index_path: str) -> list[str]:
    """Return where index and packs disagree; see `Repository.check_index`."""
    try:
        index = IndexDatabase.open(index_path, "read")
    except (ForeignIndexError, MissingIndexError) as error:
        return [f"the index does not cover anything: {error}"]
    except sqlite3.Error as error:
        return [f"the index cannot be read: {error}"]
    try:
        return _compare(packs, index)
    except sqlite3.Error as error:
        return [f"the index cannot be read: {error}"]
    finally:
        index.close()


def _compare(packs: Packs, index: IndexDatabase) -> list[str]:
    problems = []
    known = index.packs()
    expected_rows, unlisted = 0, False
    sizes = packs.sizes()
    problems += [
        f"the index names pack {number:016x}, which is missing" for number in known.keys() - sizes.keys()
    ]
    for number, size_bytes in sizes.items():
        if known.get(number, (-1, False))[0] != size_bytes:
            problems.append(f"the index does not cover pack {number:016x}")
            continue
        try:
            records = packs.strict_records(number)
        except (DamagedPack, NotFound):
            # Damage of the pack, which scrub reports.
            unlisted = True
            continue
        expected_rows += len(records)
        listed = index.copies_in(number, [record.id for record in records])
        # Without the checksum, which the index does not have.
        wrong = sum(
            (one.id, one.offset, one.stored_bytes, one.raw_bytes, one.flags, one.base) not in listed
            for one in records
        )
        if wrong:
            problems.append(f"the index lacks {plural(wrong, 'chunk')} of pack {number:016x}")
    # Only without other problems: each of them explains a difference in the number of rows.
    rows = index.db.execute("SELECT count(*) FROM chunks").fetchone()[0]
    if not problems and not unlisted and rows != expected_rows:
        problems.append(f"the index has {plural(rows, 'row')} for {plural(expected_rows, 'chunk')}")
    return problems
