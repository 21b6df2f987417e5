"""Chunks of the writer: what is stored already is not stored again, what is new is appended to packs.

`ChunkStore` decides what is new, and finds what is buffered and not yet written. Chunks are packed
(compression.py) and segments written in other threads; the position of each depends on the order of the calls
alone. `Bases` decides which chunk may be the base of a difference: no chunk gets a chain of more than
`MAX_WRITTEN_BASE_DEPTH` bases, whichever copies of them are read, and none is in its own chain; the content of a
base is checked against its id. An `Appender` buffers the records of one kind, writes them as segments, and seals a
full pack.

Large segments are written by a write-behind queue, two at most; syncs, and everything that changes which file
is written, wait for them. A failed write or sync truncates the pack to what was good before and ends the
appender: after a failed fsync the state of the disk is unknown, and a second fsync would report success.

Memory: the content that waits to be packed, the segment that is being filled and two that are being written,
plus one small entry for each chunk that is written and not yet synced (bounded by _SYNC_BYTES and
_SYNC_RECORDS).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final, Literal, NamedTuple

from ciuic.repository import pack_format as pf
from ciuic.repository.byte_planes import WIDE
from ciuic.repository.chunk_reader import (
    BadCopyError,
    ChunkReader,
    location_of,
    read_base,
    read_stored,
    unpack,
)
from ciuic.repository.compression import MAX_WRITTEN_BASE_DEPTH, Codec, Content, Job, PackedChunk, Packer
from ciuic.repository.extent_sharing import StagedExtent
from ciuic.repository.identity import Bytes, Identity
from ciuic.repository.model import ChunkLocation, PackKind, PackRecord
from ciuic.repository.pack_directory import Packs
from ciuic.repository.pack_format import FLAG_DIFFERENCE
from ciuic.repository.writer_index import Tail, WriterIndex
from ciuic.system.disk import Disk
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


# Limit of jobs queued or running. More would cost memory and gain nothing: with two the disk always has work.
_MAX_JOBS: Final = 2

_WriteJob = Callable[[], int]
_Then = Callable[[int], None]


class _SkippedError(Exception):
    """A job was skipped because one before it failed."""


class WriteBehind:
    """Queue of jobs that return a number. Belongs to one thread, which calls every method."""

    def __init__(self) -> None:
        # In the order of `submit`, which is that of the calls of `then`.
        self._jobs: deque[tuple[Future[int], _Then]] = deque()
        self._thread: ThreadPoolExecutor | None = None
        # Read by queued jobs in the thread: they skip themselves after a failure.
        self._failed = False

    def submit(self, job: _WriteJob, then: _Then, *, worth_a_thread: bool) -> None:
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

    def _run(self, job: _WriteJob) -> int:
        if self._failed:
            raise _SkippedError
        try:
            return job()
        except BaseException:
            self._failed = True
            raise


# Table and alignment cost 0.1 % of such a segment, and prune moves packs by segments: with no more free space
# than one takes (docs/decisions/collection.md).
_SEGMENT_BYTES = 4 << 20
# A table of at most 48 KiB.
SEGMENT_RECORDS = 1024
_PACK_BYTES: dict[PackKind, int] = {"data": 64 << 20, "meta": 64 << 20}
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
        self._pack_bytes = pack_bytes or _PACK_BYTES[kind]
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
        if self._buffered_bytes >= _SEGMENT_BYTES or len(self._buffer) >= SEGMENT_RECORDS:
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
        # Start writeback now: otherwise the next fsync would send up to _SYNC_BYTES at once.
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


_SYNC_BYTES = 256 << 20
_SYNC_RECORDS = 1 << 15
"""Limits of what may be written and not synced: they bound memory, and what an interrupted first capture has
to repeat."""
# Limit of content that waits to be packed or is being packed.
_PENDING_BYTES = 16 << 20
# Content handed over to one thread at once.
_GROUP_BYTES = 2 << 20


class _Pending(NamedTuple):
    """Chunks being packed, in the order in which they will be appended."""

    chunks: list[tuple[ChunkId, int]]
    """(id, bytes of content)."""
    kind: PackKind
    size_bytes: int
    packed: Job


class Extent(NamedTuple):
    """Extent of the packs, to tell apart what is stored later."""

    last_number: int
    """Highest number that a pack has had."""
    ends: dict[int, int]
    """Number → end in bytes, of the packs that are being appended to."""


class ChunkStore:
    """Store that appends and finds chunks. Also the lookup for the writer's own reads."""

    def __init__(
        self,
        disk: Disk,
        packs: Packs,
        index: WriterIndex,
        identity: Identity,
        tails: dict[PackKind, Tail],
        *,
        pack_bytes: int | None = None,
        before_planes: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the store; ``before_planes`` is called before a record of format 2 is written."""
        self.packs = packs
        self.index = index
        self.identity = identity
        self.id_of: Callable[[Bytes], ChunkId] = identity.chunk_id
        """Function that returns the id of this content, stored or not."""
        # Chunks not yet written.
        self._buffered: dict[bytes, BufferedChunk] = {}
        # Written and not yet durable, so the index does not have them.
        self._written: dict[bytes, ChunkLocation] = {}
        # Packs whose records the index has, because sealing has made them durable.
        self._sealed: set[int] = set()
        # Numbers are never used again: a reader may still have a deleted pack of that number open.
        self._last_number: int = max([index.last_pack(), *(() if index.all_seen else packs.numbers())])
        self.packer = Packer()
        self._before_planes = before_planes
        self._pending: deque[_Pending] = deque()
        self._pending_bytes = 0
        self._reader = ChunkReader(packs, self, identity)
        self._bases = Bases(packs, self._buffered.get, self.find, identity)
        self.appenders: dict[PackKind, Appender] = {
            kind: Appender(
                disk, packs, kind, tails.get(kind), self._new_number, self._durable, pack_bytes=pack_bytes
            )
            for kind in pf.KINDS
        }

    @property
    def grown_bytes(self) -> int:
        """Bytes by which the packs have grown since this store opened."""
        return sum(appender.grown_bytes for appender in self.appenders.values())

    def extent(self) -> Extent:
        """Return how far the packs reach now. Call it when everything is durable."""
        ends = {appender.number: appender.end for appender in self.appenders.values() if appender.number}
        return Extent(self._last_number, ends)

    def put(self, data: Bytes, kind: PackKind) -> ChunkId:
        """Store the content unless it is there, and return its id.

        Raises:
            ValueError: the content is larger than 16 MiB.
            OSError: the disk failed.
        """
        if memoryview(data).nbytes > pf.MAX_CHUNK_BYTES:
            raise ValueError(
                f"a chunk must have at most {pf.MAX_CHUNK_BYTES} bytes, got {memoryview(data).nbytes}"
            )
        chunk = self.id_of(data)
        # A copy that is marked damaged does not count: the content is stored again.
        if chunk in self._buffered or chunk in self._written or self.index.good_among((chunk,)):
            return chunk
        content = Content(data)
        if self._pending or self.packer.worth_a_thread(content):
            self._pack_new({chunk: content}, kind)
        else:
            # No copy when it is bytes.
            content = Content(bytes(data))
            self._append(chunk, len(content.data), self.packer.pack(content, kind), kind)
        return chunk

    def put_all(self, contents: Sequence[Content], kind: PackKind) -> list[ChunkId]:
        """Store what is missing and return all ids.

        Raises:
            ValueError: a content is larger than 16 MiB.
            OSError: the disk failed, perhaps while earlier chunks were written.
        """
        for data, *_ in contents:
            if memoryview(data).nbytes > pf.MAX_CHUNK_BYTES:
                raise ValueError(
                    f"a chunk must have at most {pf.MAX_CHUNK_BYTES} bytes, got {memoryview(data).nbytes}"
                )
        id_of = self.id_of
        ids = [id_of(content.data) for content in contents]
        new = {
            id_: content
            for id_, content in zip(ids, contents, strict=True)
            if id_ not in self._buffered and id_ not in self._written
        }
        if new:
            # One query for the whole run, not one for each block.
            for id_ in self.index.good_among(list(new)):
                del new[ChunkId(id_)]
            self._pack_new(new, kind)
        return ids

    def append(self, record: PackRecord, stored: Bytes, kind: PackKind) -> None:
        """Store these bytes even if the chunk is there already.

        ``record`` says how they were stored elsewhere.
        """
        self._settle_packing()
        packed = PackedChunk(stored, record.flags, pf.checksum(stored), None, record.base)
        self._append(record.id, record.raw_bytes, packed, kind)

    def _pack_new(self, new: dict[ChunkId, Content], kind: PackKind) -> None:
        """Pack and append chunks, none of which is there."""
        group: list[tuple[ChunkId, Content]] = []
        group_bytes = 0
        kept_bytes = sum(len(content.data) for content in new.values())
        for chunk, given in new.items():
            size_bytes = len(given.data)
            codec = given.codec and self._bases.found(chunk, size_bytes, given.codec)
            content = given._replace(data=_stable(given.data, kept_bytes), codec=codec)
            # Before it is packed: equal content that is put meanwhile is found, and trees can refer to it.
            self._buffered[chunk] = _unpacked(content)
            if not self._pending and not group and not self.packer.worth_a_thread(content):
                self._append(chunk, size_bytes, self.packer.pack(content, kind), kind)
                continue
            group.append((chunk, content))
            group_bytes += size_bytes
            if group_bytes >= _GROUP_BYTES:
                self._hand_over(group, group_bytes, kind)
                group, group_bytes = [], 0
        if group:
            self._hand_over(group, group_bytes, kind)

    def _hand_over(self, group: list[tuple[ChunkId, Content]], size_bytes: int, kind: PackKind) -> None:
        # In the order of the calls, so that positions in packs do not depend on which thread is first.
        while self._pending and (
            self._pending_bytes + size_bytes > _PENDING_BYTES or self._pending[0].packed.done()
        ):
            self._settle_packed()
        chunks = [(chunk, len(content.data)) for chunk, content in group]
        packed = self.packer.begin([content for _, content in group], kind)
        self._pending.append(_Pending(chunks, kind, size_bytes, packed))
        self._pending_bytes += size_bytes

    def _settle_packing(self) -> None:
        """Pass everything that was put to its appender."""
        while self._pending:
            self._settle_packed()

    def _settle_packed(self) -> None:
        """Append the group that was handed over first."""
        pending = self._pending[0]
        # Taken off the queue afterwards: if this raises, it raises again, and nothing after it can be
        # committed.
        all_packed = pending.packed.result()
        self._pending.popleft()
        self._pending_bytes -= pending.size_bytes
        for (chunk, raw_bytes), packed in zip(pending.chunks, all_packed, strict=True):
            self._append(chunk, raw_bytes, packed, pending.kind)

    def _append(self, chunk: ChunkId, raw_bytes: int, packed: PackedChunk, kind: PackKind) -> None:
        if packed.flags & pf.FLAG_PLANES:
            # The format of the configuration is raised, durably, before the first record that an earlier
            # ciuic cannot read.
            self._before_planes()
        self._buffered[chunk] = BufferedChunk(packed.stored, raw_bytes, packed.flags, packed.base)
        appender = self.appenders[kind]
        self._note_written(appender.append(chunk, raw_bytes, packed))
        if appender.unsynced_bytes >= _SYNC_BYTES or appender.unsynced_records >= _SYNC_RECORDS:
            self._sync()

    def get(self, chunk: ChunkId) -> bytes:
        """Return the content, also of a buffered chunk.

        Raises:
            MissingChunk: no pack has the chunk.
            DamagedChunk: no copy of it is good.
        """
        held = self._buffered.get(chunk)
        if held is not None:
            stored, raw_bytes, flags, base, _ = held
            # Until it is packed, the content is here as it is, and `base` only the one that it may get.
            content = read_base(base if flags & pf.FLAG_DIFFERENCE else b"", self.get)
            return unpack(bytes(stored), raw_bytes, flags, base=content)
        return self._reader.get(chunk)

    def has(self, chunk: ChunkId) -> bool:
        """Return whether the chunk is buffered or stored."""
        return chunk in self._buffered or bool(self.find(chunk))

    def find(self, chunk: bytes) -> list[ChunkLocation]:
        """Return known copies, the best first."""
        written = self._written.get(chunk)
        return ([written] if written else []) + self.index.find(chunk)

    def search(self, chunk: bytes, failed: list[ChunkLocation]) -> list[ChunkLocation]:
        """Search harder, after `find` gave nothing good."""
        return self.index.search(chunk, failed)

    def sync(self) -> None:
        """Make everything stored durable.

        Raises:
            OSError: the disk failed.
        """
        self._settle_packing()
        self._sync()

    def close(self) -> None:
        """Stop all threads and close the packs; what is buffered is dropped."""
        # The packer first: its threads read bases.
        self.packer.close()
        self._bases.close()
        self._pending.clear()
        for appender in self.appenders.values():
            appender.close()
        self._buffered.clear()

    def _sync(self) -> None:
        """Make everything that the appenders have durable."""
        for appender in self.appenders.values():
            self._note_written(appender.flush())
            appender.sync()

    def _note_written(self, records: list[tuple[int, PackRecord]]) -> None:
        for number, record in records:
            self._buffered.pop(record.id, None)
            # Sealing has told the index before this is reached.
            if number not in self._sealed:
                self._written[record.id] = location_of(number, record)

    def _new_number(self) -> int:
        self._last_number += 1
        # Recorded before the pack exists, so that a crash cannot lead to a second pack of this number.
        self.index.set_last_pack(self._last_number)
        return self._last_number

    def _durable(self, number: int, size_bytes: int, sealed: bool, records: list[PackRecord]) -> None:
        self.index.add(number, size_bytes, sealed, records)
        if sealed:
            self._sealed.add(number)
        for record in records:
            self._written.pop(record.id, None)


def _unpacked(content: Content) -> BufferedChunk:
    """Return the buffered chunk, with the base that it may get."""
    codec = content.codec
    bases = [base for base in (codec.base, codec.twin and codec.twin.base) if base] if codec else []
    return BufferedChunk(
        content.data, len(content.data), 0, bases[0] if bases else b"", undecided=len(bases) > 1
    )


def _stable(data: Bytes, kept_bytes: int) -> Bytes:
    """Return content that cannot change while it waits.

    A view of immutable bytes is kept as it is, unless most of those bytes would be kept for a small part.
    """
    if isinstance(data, bytes):
        return data
    if isinstance(data, memoryview) and isinstance(data.obj, bytes) and 2 * kept_bytes >= len(data.obj):
        return data
    return bytes(data)
