"""Appending to the packs of one kind: buffers records, writes them as segments, seals a pack when it is full.

Large segments are written behind the caller's back, two at most; syncs, and all that changes which file is written, wait
for them. A failed write or sync cuts the pack back to what was good before and ends the appender: after a failed fsync
nobody knows what is on the disk, and a retry would be told that all is well.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from ciuic.repository import packformat as pf
from ciuic.repository.behind import Behind
from ciuic.repository.disk import Disk
from ciuic.repository.ids import Bytes
from ciuic.repository.model import PackKind, PackRecord
from ciuic.repository.packing import Packed
from ciuic.repository.packs import Packs
from ciuic.repository.recovery import Tail
from ciuic.repository.sharing import Place
from ciuic.types import ChunkId

SEGMENT_BYTES = 4 << 20
SEGMENT_RECORDS = 1024
PACK_BYTES: dict[PackKind, int] = {"data": 64 << 20, "meta": 64 << 20}
"""A pack is sealed when it is at least this long: larger ones make no capture faster, and prune copies more of what lives in them."""
PACK_RECORDS = 1 << 16
"""Or holds so many that one writer has put there: a pack is listed as a whole, at 300 bytes of memory a record."""
_BEHIND_FROM_BYTES = 1 << 20


class _Shared(NamedTuple):
    """A payload whose bytes are staged."""

    offset: int
    """In the pack."""
    length: int
    part: int
    """Its number among the parts."""
    place: Place


Durable = Callable[[int, int, bool, list[PackRecord]], None]
"""(pack, its size, sealed, records): told when these are durable."""


class Appender:
    """The packs of one kind, written at one end."""

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
        self._named = True
        """Whether the pack's name is durable."""
        self.number = tail.number if tail else 0
        self._end = self._written_end = self._synced_end = tail.end if tail else 0
        self._buffer: list[tuple[ChunkId, int, Packed]] = []
        self._buffered_bytes = 0
        self._pack_records = 0
        """Of the pack in work, put there by this writer."""
        self._behind = Behind()
        self._written: list[tuple[int, PackRecord]] = []
        """Records whose writing has ended and of which the caller does not know yet."""
        self._unsynced: list[PackRecord] = []
        self._failure: OSError | None = None
        self.grown_bytes = 0
        self.keep_cached = False
        """Whether what is written stays in the page cache."""

    @property
    def end(self) -> int:
        """Where the next segment of the pack in work begins."""
        return self._end

    @property
    def unsynced_bytes(self) -> int:
        return self._end - self._synced_end

    @property
    def unsynced_records(self) -> int:
        return len(self._unsynced)

    def append(self, chunk: ChunkId, raw_bytes: int, packed: Packed) -> list[tuple[int, PackRecord]]:
        """Takes a record; returns the records (with their pack) whose writing has ended meanwhile, if any.
        OSError, also of an earlier segment.
        """
        self._raise_failure()
        self._buffer.append((chunk, raw_bytes, packed))
        self._buffered_bytes += len(packed.stored)
        if self._buffered_bytes >= SEGMENT_BYTES or len(self._buffer) >= SEGMENT_RECORDS:
            self._begin_segment()
            self._settle(wait=False)
        return self._take_written()

    def flush(self) -> list[tuple[int, PackRecord]]:
        """Writes what is buffered (not yet durable); returns all records that were written and not returned before."""
        self._raise_failure()
        if self._buffer:
            self._begin_segment()
        self._settle(wait=True)
        return self._take_written()

    def _begin_segment(self) -> None:
        """Begins to write what is buffered as one segment."""
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
                if packed.place is not None and len(stored) % pf.ALIGN_BYTES == 0:
                    shared.append(_Shared(at, len(stored), len(parts), packed.place))
            facts = at, len(stored), raw_bytes, packed.flags, packed.checksum, packed.base
            records.append(PackRecord(chunk, *facts))
            parts.append(stored)
            at += len(stored)
        parts.insert(0, pf.encode_table(start, records, at - table_end))
        worth_a_thread = self._buffered_bytes >= _BEHIND_FROM_BYTES
        self._buffer.clear()
        self._buffered_bytes = 0
        self._end = at
        write = partial(self._write_sharing, self._fd, parts, start, shared) if shared else None
        self._write(parts, start, partial(self._segment_written, records), worth_a_thread, write)
        self._pack_records += len(records)
        if self._end >= self._pack_bytes or self._pack_records >= PACK_RECORDS:
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
            self._fail(error, self._written_end)
            raise

    def sync(self) -> None:
        """Everything appended is durable on return, and `durable` has been told. `flush` before. OSError."""
        if not self._unsynced:
            return
        self._sync_file()
        self._told(sealed=False)

    def close_pack(self) -> None:
        """Lets go of the pack, so that the next record begins another. Call `sync` before."""
        if self._fd >= 0:
            self._disk.close(self._fd)
        self._fd, self.number = -1, 0
        self._end = self._written_end = self._synced_end = 0
        self._pack_records = 0

    def close(self) -> None:
        """Closes without writing what is still buffered."""
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
        header = pf.encode_header(pf.PackHeader(number, self._kind, self._packs.repository_id))
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
        """Writes the parts in their turn, by ``write`` if given; ``then`` gets the offset behind them."""
        write = write or partial(self._write_now, self._fd, parts, offset)
        try:
            self._behind.submit(write, then, worth_a_thread=worth_a_thread)
        except OSError as error:
            self._fail(error, self._written_end)
            raise

    def _write_now(self, fd: int, parts: list[Bytes], offset: int) -> int:
        end = self._disk.write_at(fd, parts, offset)
        if self._kind == "data":
            self._disk.start_writing(fd, offset, end - offset)
        return end

    def _write_sharing(self, fd: int, parts: list[Bytes], offset: int, shared: list[_Shared]) -> int:
        """As `_write_now`, but what is shared is not written, where that can be."""
        taken: set[int] = set()
        for run in _contiguous(shared):
            first = run[0]
            length = sum(item.length for item in run)
            if self._disk.share(first.place.file.fd, first.place.offset, length, fd, first.offset):
                taken.update(item.part + 1 for item in run)  # the table stands before all of them
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
            if not self._named:
                self._disk.sync_dir(self._packs.directory)
                self._named = True
        except OSError as error:
            self._fail(error, self._synced_end)
            raise
        if self._kind == "data" and not self.keep_cached:
            self._disk.uncache(self._fd, self._synced_end, self._end - self._synced_end)
        self._synced_end = self._end

    def _seal(self) -> None:
        self._sync_file()  # a footer vouches for what stands before it
        records = (record for segment in self._packs.scan(self.number) for record in segment.records)
        footer = pf.encode_footer(self._end, records)
        self._write([footer], self._end, self._grow)
        self._end += len(footer)
        self._sync_file()
        self._told(sealed=True)
        self.close_pack()

    def _told(self, *, sealed: bool) -> None:
        records, self._unsynced = self._unsynced, []
        self._durable(self.number, self._end, sealed, records)

    def _fail(self, error: OSError, good_end: int) -> None:
        self._failure = error
        self._buffer.clear()
        self._behind.close()  # whatever it is at must not come behind what is cut off
        with suppress(OSError):  # the next writer cuts it off if this fails
            self._disk.truncate(self._fd, good_end)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise OSError(self._failure.errno, f"an earlier write failed: {self._failure.strerror}")


def _contiguous(shared: list[_Shared]) -> list[list[_Shared]]:
    """Runs that one clone can take over."""
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
