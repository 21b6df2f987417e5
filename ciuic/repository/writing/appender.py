"""Append to the packs of one kind: buffer records, write them as segments, seal a full pack.

Large segments are written by a write-behind queue, two at most; syncs, and everything that changes which file
is written, wait for them. A failed write or sync truncates the pack to what was good before and ends the
appender: after a failed fsync the state of the disk is unknown, and a second fsync would report success.

Guarantees of the queue: one job runs at a time, and none after a failed one; results and errors of jobs reach the caller
in its own thread, in `settle`. The background thread starts with the first job that is worth one: a caller
with small jobs alone has none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from ciuic.repository.codecs.compression import PackedChunk
from ciuic.repository.disk.extent_sharing import StagedExtent
from ciuic.repository.disk.operations import Disk
from ciuic.repository.format import pack_format as pf
from ciuic.repository.ids import Bytes
from ciuic.repository.model import PackKind, PackRecord
from ciuic.repository.packs.pack_directory import Packs
from ciuic.repository.writing.recovery import Tail
from ciuic.types import ChunkId

# Limit of jobs queued or running. More would cost memory and gain nothing: with two the disk always has work.
_MAX_JOBS: Final = 2

Job = Callable[[], int]
Then = Callable[[int], None]


class _SkippedError(Exception):
    """A job was skipped because one before it failed."""


class WriteBehind:
    """Queue of jobs that return a number. Belongs to one thread, which calls every method."""

    def __init__(self) -> None:
        # In the order of `submit`, which is that of the calls of `then`.
        self._jobs: deque[tuple[Future[int], Then]] = deque()
        self._thread: ThreadPoolExecutor | None = None
        # Read by queued jobs in the thread: they skip themselves after a failure.
        self._failed = False

    def submit(self, job: Job, then: Then, *, worth_a_thread: bool) -> None:
        """Queue the job; ``then`` gets its result in `settle`. May raise what an earlier job raised."""
        # A small job on an empty queue is done here: handing it over costs more, and the order is kept.
        if not self._jobs and not worth_a_thread:
            then(job())
            return
        while len(self._jobs) >= _MAX_JOBS:
            self._settle_first()
        if self._thread is None:
            # One thread for all jobs: with several, a job could still run after one before it has failed.
            self._thread = ThreadPoolExecutor(1, "ciuic-behind")
        self._jobs.append((self._thread.submit(self._run, job), then))

    def settle(self, *, wait: bool) -> None:
        """Pass the results of finished jobs to their ``then``; with ``wait``, of all jobs.

        Raises what a job raised. The jobs after it are dropped, and none of them is running any more.
        """
        while self._jobs and (wait or self._jobs[0][0].done()):
            self._settle_first()

    def close(self) -> None:
        """Wait for the running job and drop the queued ones. Raises nothing."""
        # Set before the wait, so that a queued job that starts meanwhile skips itself.
        self._failed = True
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._thread = None
        self._jobs.clear()
        self._failed = False

    def _settle_first(self) -> None:
        future, then = self._jobs.popleft()
        try:
            result = future.result()
        except BaseException:
            self.close()
            raise
        then(result)

    def _run(self, job: Job) -> int:
        if self._failed:
            raise _SkippedError
        try:
            return job()
        except BaseException:
            self._failed = True
            raise


# Table and alignment cost 0.1 % of such a segment, and prune moves packs by segments: with no more free space
# than one takes (docs/decisions/collection.md).
SEGMENT_BYTES = 4 << 20
# A table of at most 48 KiB.
SEGMENT_RECORDS = 1024
PACK_BYTES: dict[PackKind, int] = {"data": 64 << 20, "meta": 64 << 20}
"""Size from which a pack is sealed: larger ones make no capture faster, and prune copies more of what lives
in them (docs/decisions/collection.md)."""
# A million tiny files in one pack took a prune 375 MB and a verification 570.
PACK_RECORDS = 1 << 16
"""Number of records of one writer from which a pack is sealed: a pack is listed as a whole, at 300 bytes of
memory a record."""
# Smaller segments are written by the caller; only large ones are worth a thread.
_BEHIND_FROM_BYTES = 1 << 20


class _Shared(NamedTuple):
    """Payload whose bytes are staged, so that it can be cloned."""

    offset: int
    """Offset in the pack."""
    length: int
    part: int
    """Index among the parts of the segment."""
    place: StagedExtent


Durable = Callable[[int, int, bool, list[PackRecord]], None]
"""Called with (pack, its size, sealed, records) when these records are durable."""


class Appender:
    """Appender to the packs of one kind."""

    def __init__(
        self,
        disk: Disk,
        packs: Packs,
        kind: PackKind,
        tail: Tail | None,
        new_number: Callable[[], int],
        durable: Durable,
        *,
        pack_bytes: int | None = None,
    ) -> None:
        self._disk = disk
        self._packs = packs
        self._kind: PackKind = kind
        self._new_number = new_number
        self._durable = durable
        self._pack_bytes = pack_bytes or PACK_BYTES[kind]
        self._fd = -1
        # True if the pack's name is durable.
        self._named = True
        self.number = tail.number if tail else 0
        # Ends of what is queued, what is written, and what is durable.
        self._end = self._written_end = self._synced_end = tail.end if tail else 0
        self._buffer: list[tuple[ChunkId, int, PackedChunk]] = []
        self._buffered_bytes = 0
        # Number of records that this writer has put into the current pack.
        self._pack_records = 0
        self._behind = WriteBehind()
        # Written records that the caller does not know of yet.
        self._written: list[tuple[int, PackRecord]] = []
        self._unsynced: list[PackRecord] = []
        self._failure: OSError | None = None
        self.grown_bytes = 0
        self.keep_cached = False
        """True to keep written pages in the page cache."""

    @property
    def end(self) -> int:
        """Offset at which the current pack's next segment begins."""
        return self._end

    @property
    def unsynced_bytes(self) -> int:
        """Bytes of the current pack that are not yet synced."""
        return self._end - self._synced_end

    @property
    def unsynced_records(self) -> int:
        """Records that are written and not yet synced."""
        return len(self._unsynced)

    def append(self, chunk: ChunkId, raw_bytes: int, packed: PackedChunk) -> list[tuple[int, PackRecord]]:
        """Buffer a record; return the records (with their pack) that were written meanwhile.

        Raises:
            OSError: the disk failed, perhaps for an earlier segment.
        """
        self._raise_failure()
        self._buffer.append((chunk, raw_bytes, packed))
        self._buffered_bytes += len(packed.stored)
        if self._buffered_bytes >= SEGMENT_BYTES or len(self._buffer) >= SEGMENT_RECORDS:
            self._begin_segment()
            self._settle(wait=False)
        return self._take_written()

    def flush(self) -> list[tuple[int, PackRecord]]:
        """Write what is buffered (not yet durable); return all written records not returned before."""
        self._raise_failure()
        if self._buffer:
            self._begin_segment()
        self._settle(wait=True)
        return self._take_written()

    def _begin_segment(self) -> None:
        """Start writing the buffer as one segment."""
        self._open()
        start = pf.align(self._end)
        bases = sum(1 for _, _, packed in self._buffer if packed.base)
        table_end = start + pf.table_bytes(len(self._buffer), bases)
        records: list[PackRecord] = []
        parts: list[Bytes] = []
        at = table_end
        shared: list[_Shared] = []
        for chunk, raw_bytes, packed in self._buffer:
            stored = packed.stored
            if not packed.flags and len(stored) >= pf.ALIGN_PAYLOAD_FROM_BYTES:
                parts.append(bytes(pf.align(at) - at))
                at = pf.align(at)
                # Whole blocks only (FICLONERANGE): the last, partial block of a file is copied.
                if packed.place is not None and len(stored) % pf.ALIGN_BYTES == 0:
                    shared.append(_Shared(at, len(stored), len(parts), packed.place))
            facts = at, len(stored), raw_bytes, packed.flags, packed.checksum, packed.base
            records.append(PackRecord(chunk, *facts))
            parts.append(stored)
            at += len(stored)
        # The table comes first in the file and is made last: it has the offsets of all payloads.
        parts.insert(0, pf.encode_table(start, records, at - table_end))
        worth_a_thread = self._buffered_bytes >= _BEHIND_FROM_BYTES
        self._buffer.clear()
        self._buffered_bytes = 0
        self._end = at
        write = partial(self._write_sharing, self._fd, parts, start, shared) if shared else None
        self._write(parts, start, partial(self._segment_written, records), worth_a_thread, write)
        self._pack_records += len(records)
        if self._end >= self._pack_bytes or self._pack_records >= PACK_RECORDS:
            # Before the seal, which lists what is in the file: all segments have to be there.
            self._settle(wait=True)
            self._seal()

    def _segment_written(self, records: list[PackRecord], end: int) -> None:
        self._grow(end)
        self._unsynced += records
        self._written += [(self.number, record) for record in records]

    def _take_written(self) -> list[tuple[int, PackRecord]]:
        written, self._written = self._written, []
        return written

    def _settle(self, *, wait: bool) -> None:
        try:
            self._behind.settle(wait=wait)
        except OSError as error:
            # Earlier segments were written whole; a failed sync alone puts those in doubt.
            self._fail(error, self._written_end)
            raise

    def sync(self) -> None:
        """Make everything appended durable, and call `durable`. Call `flush` before.

        Raises:
            OSError: the disk failed.
        """
        if not self._unsynced:
            return
        self._sync_file()
        self._report_durable(sealed=False)

    def seal(self, min_bytes: int) -> None:
        """Seal the current pack if it has at least this size and this writer has appended to it.

        Call `flush` before.

        Raises:
            OSError: the disk failed.
        """
        if self._fd >= 0 and self._end >= min_bytes:
            self._seal()

    def close_pack(self) -> None:
        """Release the pack, so that the next record begins another. Call `sync` before."""
        if self._fd >= 0:
            self._disk.close(self._fd)
        self._fd, self.number = -1, 0
        self._end = self._written_end = self._synced_end = 0
        self._pack_records = 0

    def close(self) -> None:
        """Close without writing what is still buffered."""
        self._buffer.clear()
        self._behind.close()
        self.close_pack()

    def _open(self) -> None:
        if self._fd >= 0:
            return
        if self.number:
            self._fd = self._disk.open_write(self._packs.path(self.number))
            return
        number = self._new_number()
        self._fd = self._disk.create(self._packs.path(number))
        self.number, self._named = number, False
        self._end = self._written_end = self._synced_end = 0
        header = pf.encode_header(
            pf.PackHeader(number, self._kind, self._packs.repository_id, self._packs.hash_name)
        )
        self._end = len(header)
        self._write([header], 0, self._grow)

    def _write(
        self,
        parts: list[Bytes],
        offset: int,
        then: Callable[[int], None],
        worth_a_thread: bool = False,
        write: Callable[[], int] | None = None,
    ) -> None:
        """Queue a write of the parts, through ``write`` if given; ``then`` gets the offset after them."""
        write = write or partial(self._write_now, self._fd, parts, offset)
        try:
            self._behind.submit(write, then, worth_a_thread=worth_a_thread)
        except OSError as error:
            self._fail(error, self._written_end)
            raise

    def _write_now(self, fd: int, parts: list[Bytes], offset: int) -> int:
        end = self._disk.write_at(fd, parts, offset)
        # Start writeback now: otherwise the next fsync would send up to SYNC_BYTES at once.
        if self._kind == "data":
            self._disk.start_writing(fd, offset, end - offset)
        return end

    def _write_sharing(self, fd: int, parts: list[Bytes], offset: int, shared: list[_Shared]) -> int:
        """Write like `_write_now`, but clone staged payloads instead of writing them, where possible."""
        taken: set[int] = set()
        for run in _contiguous(shared):
            first = run[0]
            length = sum(item.length for item in run)
            if self._disk.share(first.place.file.fd, first.place.offset, length, fd, first.offset):
                # The table is the first part, before all payloads.
                taken.update(item.part + 1 for item in run)
        run_parts: list[Bytes] = []
        run_start = at = offset
        for number, part in enumerate(parts):
            if number in taken:
                if run_parts:
                    self._write_now(fd, run_parts, run_start)
                run_parts, run_start = [], at + len(part)
            else:
                run_parts.append(part)
            at += len(part)
        return self._write_now(fd, run_parts, run_start) if run_parts else at

    def _grow(self, end: int) -> None:
        self.grown_bytes += end - self._written_end
        self._written_end = end

    def _sync_file(self) -> None:
        try:
            self._disk.sync(self._fd)
            # A new file's name is durable only after a sync of its directory (fsync(2)).
            if not self._named:
                self._disk.sync_dir(self._packs.directory)
                self._named = True
        except OSError as error:
            # After a failed fsync only what was synced before is known to be on the disk.
            self._fail(error, self._synced_end)
            raise
        # Packs are rarely read again soon, and the page cache belongs to the job.
        if self._kind == "data" and not self.keep_cached:
            self._disk.uncache(self._fd, self._synced_end, self._end - self._synced_end)
        self._synced_end = self._end

    def _seal(self) -> None:
        # Synced before the footer is written: a whole footer vouches for everything before it.
        self._sync_file()
        # From the file, a segment at a time: a pack may hold a million small chunks.
        records = (record for segment in self._packs.scan(self.number) for record in segment.records)
        footer = pf.encode_footer(self._end, records)
        self._write([footer], self._end, self._grow)
        self._end += len(footer)
        self._sync_file()
        self._report_durable(sealed=True)
        self.close_pack()

    def _report_durable(self, *, sealed: bool) -> None:
        records, self._unsynced = self._unsynced, []
        self._durable(self.number, self._end, sealed, records)

    def _fail(self, error: OSError, good_end: int) -> None:
        self._failure = error
        self._buffer.clear()
        # A running write must not end after the truncation.
        self._behind.close()
        # If this fails, the next writer truncates the pack.
        with suppress(OSError):
            self._disk.truncate(self._fd, good_end)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise OSError(self._failure.errno, f"an earlier write failed: {self._failure.strerror}")


def _contiguous(shared: list[_Shared]) -> list[list[_Shared]]:
    """Return runs of neighbours that one clone can copy."""
    runs: list[list[_Shared]] = []
    for item in shared:
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and item.place.file is last.place.file
            and item.offset == last.offset + last.length
            and item.place.offset == last.place.offset + last.length
        ):
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs
