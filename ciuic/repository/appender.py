"""Appending to the packs of one kind: buffers records, writes them as segments, seals a pack when it is full.

A failed write or sync cuts the pack back to what was good before and ends the appender: after a failed fsync
nobody knows what is on the disk, and a retry would be told that all is well.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from ciuic.repository import packformat as pf
from ciuic.repository.disk import Disk
from ciuic.repository.ids import Bytes
from ciuic.repository.model import PackKind, PackRecord
from ciuic.repository.packs import Packs
from ciuic.repository.recovery import Tail
from ciuic.types import ChunkId

SEGMENT_BYTES = 4 << 20
SEGMENT_RECORDS = 1024
PACK_BYTES: dict[PackKind, int] = {"data": 512 << 20, "meta": 64 << 20}
"""A pack is sealed when it is at least this long."""

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
        self._end = self._synced_end = tail.end if tail else 0
        self._buffer: list[tuple[ChunkId, Bytes, int, int]] = []
        self._buffered_bytes = 0
        self._unsynced: list[PackRecord] = []
        self._failure: OSError | None = None
        self.grown_bytes = 0

    @property
    def unsynced_bytes(self) -> int:
        return self._end - self._synced_end

    @property
    def unsynced_records(self) -> int:
        return len(self._unsynced)

    def append(
        self, chunk: ChunkId, stored: Bytes, raw_bytes: int, flags: int
    ) -> list[tuple[int, PackRecord]]:
        """Takes a record; returns the records (with their pack) that this caused to be written, if any.
        OSError.
        """
        self._raise_failure()
        self._buffer.append((chunk, stored, raw_bytes, flags))
        self._buffered_bytes += len(stored)
        if self._buffered_bytes >= SEGMENT_BYTES or len(self._buffer) >= SEGMENT_RECORDS:
            return self.flush()
        return []

    def flush(self) -> list[tuple[int, PackRecord]]:
        """Writes what is buffered as one segment (not yet durable); returns its records."""
        self._raise_failure()
        if not self._buffer:
            return []
        self._open()
        start = pf.align(self._end)
        table_end = start + pf.SEGMENT_HEAD_BYTES + len(self._buffer) * pf.RECORD_BYTES + 8
        records: list[PackRecord] = []
        parts: list[Bytes] = []
        at = table_end
        for chunk, stored, raw_bytes, flags in self._buffer:
            if not flags and len(stored) >= pf.ALIGN_PAYLOAD_FROM_BYTES:
                parts.append(bytes(pf.align(at) - at))
                at = pf.align(at)
            records.append(PackRecord(chunk, at, len(stored), raw_bytes, flags, pf.checksum(stored)))
            parts.append(stored)
            at += len(stored)
        self._write([pf.encode_table(start, records, at - table_end), *parts], start)
        self._buffer.clear()
        self._buffered_bytes = 0
        self._unsynced += records
        number = self.number
        if self._end >= self._pack_bytes:
            self._seal()
        return [(number, record) for record in records]

    def sync(self) -> None:
        """Everything appended is durable on return, and `durable` has been told. OSError."""
        self.flush()
        if not self._unsynced:
            return
        self._sync_file()
        self._told(sealed=False)

    def close_pack(self) -> None:
        """Lets go of the pack, so that the next record begins another. Call `sync` before."""
        if self._fd >= 0:
            self._disk.close(self._fd)
        self._fd, self.number, self._end, self._synced_end = -1, 0, 0, 0

    def close(self) -> None:
        """Closes without writing what is still buffered."""
        self._buffer.clear()
        self.close_pack()

    def _open(self) -> None:
        if self._fd >= 0:
            return
        if self.number:
            self._fd = self._disk.open_write(self._packs.path(self.number))
            return
        number = self._new_number()
        self._fd = self._disk.create(self._packs.path(number))
        self.number, self._end, self._synced_end, self._named = number, 0, 0, False
        header = pf.PackHeader(number, self._kind, self._packs.repository_id)
        self._write([pf.encode_header(header)], 0)

    def _write(self, parts: list[Bytes], offset: int) -> None:
        try:
            end = self._disk.write_at(self._fd, parts, offset)
        except OSError as error:
            self._fail(error, self._end)
            raise
        if self._kind == "data":
            self._disk.start_writing(self._fd, offset, end - offset)
        self.grown_bytes += end - self._end
        self._end = end

    def _sync_file(self) -> None:
        try:
            self._disk.sync(self._fd)
            if not self._named:
                self._disk.sync_dir(self._packs.directory)
                self._named = True
        except OSError as error:
            self._fail(error, self._synced_end)
            raise
        if self._kind == "data":
            self._disk.uncache(self._fd, self._synced_end, self._end - self._synced_end)
        self._synced_end = self._end

    def _seal(self) -> None:
        self._sync_file()  # a footer vouches for what stands before it
        records = [record for segment in self._packs.scan(self.number) for record in segment.records]
        self._write([pf.encode_footer(self._end, records)], self._end)
        self._sync_file()
        self._told(sealed=True)
        self.close_pack()

    def _told(self, *, sealed: bool) -> None:
        records, self._unsynced = self._unsynced, []
        self._durable(self.number, self._end, sealed, records)

    def _fail(self, error: OSError, good_end: int) -> None:
        self._failure = error
        self._buffer.clear()
        with suppress(OSError):  # the next writer cuts it off if this fails
            self._disk.truncate(self._fd, good_end)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise OSError(self._failure.errno, f"an earlier write failed: {self._failure.strerror}")
