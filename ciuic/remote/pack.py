"""Packs of a remote: header, records, table, trailer; encode, decode with checks, read by ranges, and write into one buffer.

A pack is one object, written once. Its records lie one directly after the other and are sealed one by one, so
that they can be read by ranges. A reader knows the header from the pack's name: it needs the table, from the
end of the object, and then ranges of records. A writer fills one buffer, which is sent as one object.

References:
    docs/remote-format.md, section 5
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec
import xxhash

from ciuic.errors import UsageError
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.object_names import PackRef, new_pack_ref, pack_name, split_ref, table_name
from ciuic.remote.objects.model import ArchivedObject, NoSuchObject, Objects, RefusedBody, read_verified
from ciuic.remote.sealing.sealer import TAG_BYTES, PackSeal, Sealer
from ciuic.repository import log as events
from ciuic.repository.errors import UnsupportedFormat
from ciuic.repository.identity import Bytes
from ciuic.repository.model import PackKind, PackRecord
from ciuic.repository.pack_format import CODED_FLAGS, FLAG_DIFFERENCE, KINDS, MAX_CHUNK_BYTES
from ciuic.types import CHUNK_ID_BYTES, ChunkId

VERSION: Final = 1
MAX_ROWS: Final = 1 << 20
"""Limit of records in a pack; bounds what a crafted trailer can make a reader allocate."""
MAX_PACK_BYTES: Final = 1 << 30
"""Limit of a pack that is read; see `LARGEST_PACK_BYTES`."""

# Magic, version, kind, sealed, 0, pack id, remote id, 0.
_HEADER: Final = struct.Struct("<8sHBBI16s16s16s")
_HEADER_MAGIC: Final = b"CIUICRPK"
# Id, offset, stored, raw, flags, 0, base, checksum of the stored bytes.
_ROW: Final = struct.Struct("<16sQIIII16sQ")
# Magic, rows, 0, offset of the table.
_TRAILER: Final = struct.Struct("<8sIIQ")
_TRAILER_MAGIC: Final = b"CIUICRPT"
_CHECKSUM: Final = struct.Struct("<Q")
_COUNT: Final = struct.Struct("<I")

HEADER_BYTES: Final = _HEADER.size
ROW_BYTES: Final = _ROW.size
TRAILER_BYTES: Final = _TRAILER.size + _CHECKSUM.size
_NO_BASE: Final = bytes(CHUNK_ID_BYTES)
# Flags of a chunk: as it is, zstd, planes, planes of a difference.
_FLAGS: Final = frozenset((0, 1, 2, 6))


class PackTrailer(NamedTuple):
    """Last bytes of a pack."""

    rows: int
    table_offset: int
    table_bytes: int
    """Size of the table as it is stored."""
    checksum: int

    @property
    def tail_bytes(self) -> int:
        """Bytes from the beginning of the table to the end of the pack."""
        return self.table_bytes + TRAILER_BYTES


class PackLayout:
    """Header, seals and table of one pack; may be used by several threads at once.

    Args:
        sealer: seals of the remote.
        ref: kind and id of the pack (`PackRef`).
        name: name of its object, for messages.
    """

    __slots__ = ("header", "name", "ref", "seal")

    def __init__(self, sealer: Sealer, ref: str, name: str) -> None:
        kind, pack_id = split_ref(ref)
        self.ref: Final = ref
        self.name: Final = name
        self.header: Final = _HEADER.pack(
            _HEADER_MAGIC, VERSION, KINDS[kind], int(sealer.sealed), 0, pack_id, sealer.remote_id, bytes(16)
        )
        self.seal: Final[PackSeal] = sealer.for_pack(name, pack_id, self.header)

    def check_header(self, data: bytes) -> None:
        """Raise DamagedRemote unless these are the first 64 bytes of this pack.

        Raises:
            UnsupportedFormat: a later version of ciuic wrote it.
        """
        if len(data) == HEADER_BYTES and data.startswith(_HEADER_MAGIC):
            version = _HEADER.unpack(data)[1]
            if version > VERSION:
                raise UnsupportedFormat(
                    f"{self.name} in the remote has version {version}; this ciuic reads version {VERSION}"
                )
        if data != self.header:
            raise DamagedRemote(self.name, "its header is not that of this pack of this remote")

    def encode_table(self, records: Iterable[PackRecord], offset: int) -> bytes:
        """Return table and trailer of the pack, whose last record ends at ``offset``."""
        table = b"".join(map(_encode_row, records))
        count = len(table) // ROW_BYTES
        stored = bytearray(len(table) + self.seal.tag_bytes)
        with memoryview(stored) as view:
            self.seal.seal_into(offset, table, view, bound=_COUNT.pack(count))
        trailer = _TRAILER.pack(_TRAILER_MAGIC, count, 0, offset)
        return b"".join((stored, trailer, _CHECKSUM.pack(self._checksum(stored, trailer))))

    def decode_trailer(self, tail: Bytes, size_bytes: int) -> PackTrailer:
        """Return the trailer in the last bytes of the pack.

        Args:
            tail: at least the last `TRAILER_BYTES` bytes.
            size_bytes: size of the pack.

        Raises:
            DamagedRemote: it is none, or does not agree with the size.
        """
        if len(tail) < TRAILER_BYTES or size_bytes > MAX_PACK_BYTES:
            raise DamagedRemote(self.name, f"it has {size_bytes} bytes, which no pack has")
        magic, rows, zero, offset = _TRAILER.unpack_from(tail, len(tail) - TRAILER_BYTES)
        (checksum,) = _CHECKSUM.unpack_from(tail, len(tail) - _CHECKSUM.size)
        table_bytes = rows * ROW_BYTES + self.seal.tag_bytes
        if magic != _TRAILER_MAGIC or zero or not 0 < rows <= MAX_ROWS:
            raise DamagedRemote(self.name, "it does not end as a pack")
        if offset < HEADER_BYTES or offset + table_bytes + TRAILER_BYTES != size_bytes:
            raise DamagedRemote(self.name, f"its table does not lie where its end says, at {offset}")
        return PackTrailer(rows, offset, table_bytes, checksum)

    def table_offset(self, tail: Bytes) -> int:
        """Return where the trailer at the end of ``tail`` says that the table begins; not verified."""
        return int(_TRAILER.unpack_from(tail, len(tail) - TRAILER_BYTES)[3])

    def decode_table(self, trailer: PackTrailer, stored: Bytes) -> list[PackRecord]:
        """Return the records of the pack, in their order, with offsets in this pack.

        Args:
            trailer: of this pack.
            stored: the table as it is stored, ``trailer.table_bytes`` bytes.

        Raises:
            DamagedRemote: it was altered, or its records do not cover the pack.
            UnsupportedFormat: a later version of ciuic wrote it.
        """
        plain = _TRAILER.pack(_TRAILER_MAGIC, trailer.rows, 0, trailer.table_offset)
        if len(stored) != trailer.table_bytes or trailer.checksum != self._checksum(stored, plain):
            raise DamagedRemote(self.name, "its table does not match its checksum")
        table = self.seal.open(trailer.table_offset, stored, bound=_COUNT.pack(trailer.rows))
        return self._decode_rows(table, trailer.table_offset)

    def _decode_rows(self, table: bytes, table_offset: int) -> list[PackRecord]:
        records = []
        end = HEADER_BYTES
        tag_bytes = self.seal.tag_bytes
        for id_, offset, stored, raw, flags, zero, base, checksum in _ROW.iter_unpack(table):
            if flags & ~CODED_FLAGS:
                raise UnsupportedFormat(
                    f"{self.name} in the remote holds a chunk with unknown flags {flags:#x}"
                )
            # Records cover the pack without a gap, so that a check of them reads every byte.
            if (
                offset != end
                or zero
                or flags not in _FLAGS
                or (base == _NO_BASE) is bool(flags & FLAG_DIFFERENCE)
            ):
                raise DamagedRemote(self.name, f"impossible row for chunk {id_.hex()} in its table")
            if stored > MAX_CHUNK_BYTES or raw > MAX_CHUNK_BYTES or (not flags and stored != raw):
                raise DamagedRemote(self.name, f"impossible lengths for chunk {id_.hex()} in its table")
            end = offset + stored + tag_bytes
            records.append(
                PackRecord(
                    ChunkId(id_), offset, stored, raw, flags, checksum, ChunkId(base) if flags & 4 else b""
                )
            )
        if end != table_offset:
            raise DamagedRemote(self.name, "its records do not end where its table begins")
        return records

    def open_record(self, offset: int, stored_bytes: int, data: Bytes, checksum: int | None = None) -> bytes:
        """Return the stored bytes of the record at ``offset``, as a local pack has them.

        In a sealed pack they are authentic. In one that is not sealed they are verified only if ``checksum``
        is given: a caller without it compares the content with the chunk's id.

        Args:
            offset: position in the pack.
            stored_bytes: length before sealing, as the table says.
            data: ``stored_bytes + seal.tag_bytes`` bytes of the pack from ``offset``.
            checksum: XXH3-64 of the stored bytes, as the table says.

        Raises:
            DamagedRemote: they were altered or moved.
        """
        if len(data) != stored_bytes + self.seal.tag_bytes:
            raise DamagedRemote(self.name, f"the record at offset {offset} is cut short")
        stored = self.seal.open(offset, data)
        if checksum is not None and xxhash.xxh3_64_intdigest(stored) != checksum:
            raise DamagedRemote(self.name, f"the record at offset {offset} does not match its checksum")
        return stored

    def _checksum(self, stored: Bytes, trailer: bytes) -> int:
        digest = xxhash.xxh3_64(self.header)
        digest.update(stored)
        digest.update(trailer)
        return digest.intdigest()


def _encode_row(record: PackRecord) -> bytes:
    return _ROW.pack(
        record.id,
        record.offset,
        record.stored_bytes,
        record.raw_bytes,
        record.flags,
        0,
        record.base or _NO_BASE,
        record.checksum,
    )


assert HEADER_BYTES == ROW_BYTES == 64
assert TRAILER_BYTES == 32


MAX_TABLE_BYTES: Final = MAX_ROWS * ROW_BYTES + TAG_BYTES + TRAILER_BYTES
"""Limit of a copy of a table."""
TAIL_GUESS_BYTES: Final = 64 << 10
"""Bytes of a pack's end that are read at first at most: the table of a pack of 64 MiB in blocks of 256 KiB takes 16 KiB."""
_MIN_TAIL_GUESS_BYTES: Final = 2 << 10
# Bytes of a data pack for each byte of its table, at least: blocks of 256 KiB that were compressed to half.
_BYTES_PER_TABLE_BYTE: Final = (128 << 10) // ROW_BYTES


class TableSource(Protocol):
    """Part of `Objects` by which the table of a pack is read."""

    def tail(self, name: str, length: int) -> tuple[int, bytes]:
        """Return the size of the object and its last ``length`` bytes."""

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Bytes]:
        """Return the bytes of each (offset, length)."""


class RemotePackReader:
    """Pack of the remote; may be used by several threads at once.

    Args:
        sealer: seals of the remote.
        ref: kind and id of the pack.
    """

    __slots__ = ("layout", "name", "ref")

    def __init__(self, sealer: Sealer, ref: str) -> None:
        self.ref: Final = ref
        self.name: Final = pack_name(ref)
        self.layout: Final = PackLayout(sealer, ref, self.name)

    def read_table(self, objects: Objects, size_bytes: int = 0) -> list[PackRecord]:
        """Return what `read_table_once` does; it is called again where the table does not verify (`read_verified`)."""
        return read_verified(objects, lambda: self.read_table_once(objects, size_bytes))

    def read_table_once(self, objects: TableSource, size_bytes: int = 0) -> list[PackRecord]:
        """Return the records of the pack, in one request, or two if it has many; of an archived one from the copy of its table.

        Args:
            objects: store.
            size_bytes: size of the pack where it is known, by which less is read.

        Raises:
            ArchivedObject: the pack is archived, and there is no copy of its table.
            NoSuchObject: there is no such pack.
            DamagedRemote: its end is damaged.
            UnsupportedFormat: a later version of ciuic wrote it.
        """
        try:
            return self._read_table(objects, self._tail_guess_bytes(size_bytes))
        except ArchivedObject:
            return self._read_copy(objects)
        except DamagedRemote:
            # The header of a later version is not the one that the table's checksum was compared with.
            self.layout.check_header(bytes(objects.get_ranges(self.name, [(0, HEADER_BYTES)])[0]))
            raise

    def copy_of_table(self, objects: Objects) -> bytes:
        """Return the end of the pack from its table on, verified: the content of its object below ``tables/``.

        Raises:
            NoSuchObject, DamagedRemote, ArchivedObject: the pack's end cannot be read.
        """
        return read_verified(objects, lambda: self._copy_of_table(objects))

    def _copy_of_table(self, objects: Objects) -> bytes:
        size_bytes, tail = objects.tail(self.name, TAIL_GUESS_BYTES)
        trailer = self.layout.decode_trailer(tail, size_bytes)
        if trailer.tail_bytes > len(tail):
            (stored,) = objects.get_ranges(self.name, [(trailer.table_offset, trailer.tail_bytes)])
            tail = bytes(stored)
        copy = bytes(tail[-trailer.tail_bytes :])
        self._decode_copy(copy)
        return copy

    def _read_copy(self, objects: TableSource) -> list[PackRecord]:
        if split_ref(self.ref)[0] != "data":
            raise ArchivedObject(self.name)
        try:
            # A range and not the whole: an attacker who can write to the bucket chooses the size.
            (data,) = objects.get_ranges(table_name(self.ref), [(0, MAX_TABLE_BYTES + 1)])
        except NoSuchObject:
            raise ArchivedObject(self.name) from None
        return self._decode_copy(bytes(data))

    def _decode_copy(self, data: bytes) -> list[PackRecord]:
        # Sealed, the table is bound to this pack, and says where the pack ends.
        if not TRAILER_BYTES < len(data) <= MAX_TABLE_BYTES:
            raise DamagedRemote(self.name, f"the copy of its table has {len(data)} bytes, which none has")
        offset = self.layout.table_offset(data)
        trailer = self.layout.decode_trailer(data, offset + len(data))
        return self.layout.decode_table(trailer, data[:-TRAILER_BYTES])

    def _tail_guess_bytes(self, size_bytes: int) -> int:
        if not size_bytes or split_ref(self.ref)[0] != "data":
            return TAIL_GUESS_BYTES
        return min(max(size_bytes // _BYTES_PER_TABLE_BYTE, _MIN_TAIL_GUESS_BYTES), TAIL_GUESS_BYTES)

    def _read_table(self, objects: TableSource, guess_bytes: int) -> list[PackRecord]:
        size_bytes, tail = objects.tail(self.name, guess_bytes)
        trailer = self.layout.decode_trailer(tail, size_bytes)
        if trailer.tail_bytes <= len(tail):
            table = memoryview(tail)[len(tail) - trailer.tail_bytes : len(tail) - TRAILER_BYTES]
            return self.layout.decode_table(trailer, table)
        (stored,) = objects.get_ranges(self.name, [(trailer.table_offset, trailer.table_bytes)])
        return self.layout.decode_table(trailer, stored)

    def read_records(self, objects: Objects, records: Sequence[PackRecord]) -> Iterator[bytes]:
        """Yield the stored bytes of these records of the pack's table, verified.

        Raises:
            NoSuchObject: there is no such pack.
            DamagedRemote: a record is damaged.
        """
        tag_bytes = self.layout.seal.tag_bytes
        ranges = [(record.offset, record.stored_bytes + tag_bytes) for record in records]

        def read() -> list[bytes]:
            read = zip(records, objects.get_ranges(self.name, ranges), strict=True)
            return [
                self.layout.open_record(record.offset, record.stored_bytes, data, record.checksum)
                for record, data in read
            ]

        yield from read_verified(objects, read)

    def check(self, data: bytes) -> list[PackRecord]:
        """Return the records of the whole pack in ``data`` after checking every byte.

        Raises:
            DamagedRemote: any byte of it is not as it was written.
            UnsupportedFormat: a later version of ciuic wrote it.
        """
        layout = self.layout
        if len(data) < HEADER_BYTES:
            raise DamagedRemote(self.name, "it is cut short")
        layout.check_header(data[:HEADER_BYTES])
        view = memoryview(data)
        trailer = layout.decode_trailer(view[-TRAILER_BYTES:], len(data))
        table_end = trailer.table_offset + trailer.table_bytes
        records = layout.decode_table(trailer, view[trailer.table_offset : table_end])
        for record in records:
            end = record.offset + record.stored_bytes + layout.seal.tag_bytes
            layout.open_record(record.offset, record.stored_bytes, view[record.offset : end], record.checksum)
        return records


def in_runs(records: Sequence[PackRecord], size_bytes: int) -> Iterator[list[PackRecord]]:
    """Yield the records in lists of up to so many stored bytes, each of at least one record, for one request each."""
    run: list[PackRecord] = []
    run_bytes = 0
    for record in records:
        if run and run_bytes + record.stored_bytes > size_bytes:
            yield run
            run, run_bytes = [], 0
        run.append(record)
        run_bytes += record.stored_bytes
    if run:
        yield run


LARGEST_PACK_BYTES: Final = 16 << 20
"""Size at which packs are closed at most: those that are filled, sent and copied by the client leave the uploader below 200 MiB."""
SMALLEST_PACK_BYTES: Final = 512 << 10
"""Size below which no pack is divided, whatever the store refuses."""


class RemotePackWriter:
    """New pack. Not to be shared by threads.

    Each record is sealed once, straight into the buffer. A pack that could not be sent completely is sent
    again with the same bytes, or given up with its id: its offsets are nonces.

    Args:
        sealer: seals of the remote.
        ref: kind and id of the pack, from `names.new_pack_ref`; never one that was used before.
        capacity_bytes: size of the pack at most, table included. Ignored if ``buffer`` is given.
        buffer: buffer of an earlier writer whose pack was sent, to be used again.
    """

    def __init__(
        self,
        sealer: Sealer,
        ref: str,
        *,
        capacity_bytes: int = LARGEST_PACK_BYTES,
        buffer: mmap.mmap | None = None,
    ) -> None:
        self.ref: Final = ref
        self.name: Final = pack_name(ref)
        self._layout = PackLayout(sealer, ref, self.name)
        self._seal = self._layout.seal
        # Memory is used only as far as the pack is filled; a bytearray is filled with zeros when it is made.
        self.buffer: Final = mmap.mmap(-1, capacity_bytes) if buffer is None else buffer
        if not HEADER_BYTES + TRAILER_BYTES < len(self.buffer) <= MAX_PACK_BYTES:
            raise ValueError(f"a pack must have at most {MAX_PACK_BYTES} bytes, got {len(self.buffer)}")
        self.buffer[:HEADER_BYTES] = self._layout.header
        self._view = memoryview(self.buffer)
        self._end = HEADER_BYTES
        self._records: list[PackRecord] = []
        self._finished = False

    @property
    def records(self) -> list[PackRecord]:
        """Records so far, with offsets in this pack."""
        return self._records

    @property
    def size_bytes(self) -> int:
        """Size of the pack as it is now, with its table."""
        if self._finished:
            return self._end
        return self._end + len(self._records) * ROW_BYTES + self._seal.tag_bytes + TRAILER_BYTES

    def fits(self, stored_bytes: int) -> bool:
        """Return whether a record of this length can be added."""
        more = stored_bytes + self._seal.tag_bytes + ROW_BYTES
        return len(self._records) < MAX_ROWS and self.size_bytes + more <= len(self.buffer)

    def add(self, record: PackRecord, stored: Bytes) -> PackRecord | None:
        """Seal a record into the pack and return it with its new offset; None if it does not fit.

        Args:
            record: record of a local pack; its offset there is ignored.
            stored: its stored bytes.

        Raises:
            ValueError: ``stored`` is not what the record says; the pack is as it was.
        """
        if self._finished:
            raise UsageError(f"{self.name} is finished: a record needs another pack")
        if len(stored) != record.stored_bytes or xxhash.xxh3_64_intdigest(stored) != record.checksum:
            raise ValueError(f"the stored bytes of chunk {record.id.hex()} do not match their record")
        if not self.fits(record.stored_bytes):
            return None
        offset = self._end
        end = offset + record.stored_bytes + self._seal.tag_bytes
        self._seal.seal_into(offset, stored, self._view[offset:end])
        placed = msgspec.structs.replace(record, offset=offset)
        self._records.append(placed)
        self._end = end
        return placed

    def finish(self) -> list[memoryview]:
        """Add table and trailer and return the whole pack as parts for `Objects.put`.

        The parts are views of `buffer`: they are valid until the buffer is used again.

        Raises:
            ValueError: the pack has no record.
        """
        if not self._records:
            raise ValueError(f"{self.name} has no record: an empty pack is not written")
        if not self._finished:
            tail = self._layout.encode_table(self._records, self._end)
            self._view[self._end : self._end + len(tail)] = tail
            self._end += len(tail)
            self._finished = True
        return [self._view[: self._end]]

    def divided(
        self, size_bytes: int, new_ref: Callable[[], str], sealer: Sealer
    ) -> Iterator[RemotePackWriter]:
        """Yield new packs of about this size with the records of this one, which is finished; each has at least one."""
        part: RemotePackWriter | None = None
        for record in self._records:
            end = record.offset + record.stored_bytes + self._seal.tag_bytes
            stored = self._layout.open_record(
                record.offset, record.stored_bytes, self._view[record.offset : end], record.checksum
            )
            if part is not None and not part.fits(record.stored_bytes):
                yield part
                part = None
            if part is None:
                part = RemotePackWriter(
                    sealer, new_ref(), capacity_bytes=max(size_bytes, pack_bytes_of(record.stored_bytes))
                )
            part.add(record, stored)
        if part is not None:
            yield part


def pack_bytes_of(stored_bytes: int) -> int:
    """Return the size of a pack of one record, at most."""
    return HEADER_BYTES + stored_bytes + ROW_BYTES + 2 * TAG_BYTES + TRAILER_BYTES


class PackLimit:
    """Size of packs that the store takes, as far as it has refused larger ones (413); for several threads.

    Args:
        max_bytes: Largest pack that is tried.
    """

    def __init__(self, max_bytes: int = LARGEST_PACK_BYTES) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()

    def refused(self, size_bytes: int) -> None:
        """Note that the store takes no pack of this size: the next ones have at most half of it."""
        with self._lock:
            self.max_bytes = min(self.max_bytes, max(SMALLEST_PACK_BYTES, size_bytes // 2))


def store_pack(
    objects: Objects, sealer: Sealer, writer: RemotePackWriter, limit: PackLimit, new_ref: Callable[[], str]
) -> list[RemotePackWriter]:
    """Store a pack, or, where the store refuses its size, its records in smaller ones; return the packs that are stored.

    Args:
        objects: Store.
        sealer: Seals of the remote.
        writer: The pack.
        limit: What is known of the size that the store takes; learns of refusals.
        new_ref: Maker of the references of smaller packs.

    Raises:
        RefusedBody: the store takes no pack of the smallest size, or of a single record.
    """
    waiting = [writer]
    stored: list[RemotePackWriter] = []
    while waiting:
        pack = waiting.pop()
        parts = pack.finish()
        can_divide = pack.size_bytes > SMALLEST_PACK_BYTES and len(pack.records) > 1
        if pack.size_bytes <= limit.max_bytes or not can_divide:
            try:
                objects.put(pack.name, parts)
                stored.append(pack)
                continue
            except RefusedBody as error:
                if not can_divide:
                    raise
                limit.refused(pack.size_bytes)
                events.warning("remote_refuses_large_packs", size_bytes=pack.size_bytes, error=error.message)
        waiting += pack.divided(limit.max_bytes, new_ref, sealer)
    return stored


class PackFiller:
    """Fills one new pack of each kind at a time, and stores it when it is full.

    Args:
        objects: Store.
        sealer: Seals of the remote.
        limit: Size of packs that the store takes; None for the usual one.
        new_ref: For tests.
    """

    def __init__(
        self,
        objects: Objects,
        sealer: Sealer,
        *,
        limit: PackLimit | None = None,
        new_ref: Callable[[PackKind], PackRef] = new_pack_ref,
    ) -> None:
        self._objects = objects
        self._sealer = sealer
        self._limit = limit or PackLimit()
        self._new_ref = new_ref
        self._open: dict[PackKind, RemotePackWriter] = {}
        self.written: list[PackRef] = []
        """New packs, stored."""

    def add(self, kind: PackKind, record: PackRecord, stored: Bytes) -> None:
        """Add a record; see `RemotePackWriter.add`."""
        if kind in self._open and not self._open[kind].fits(record.stored_bytes):
            self.send(kind)
        if kind not in self._open:
            room = max(self._limit.max_bytes, pack_bytes_of(record.stored_bytes))
            self._open[kind] = RemotePackWriter(self._sealer, self._new_ref(kind), capacity_bytes=room)
        self._open[kind].add(record, stored)

    def send(self, kind: PackKind) -> None:
        """Store what was added of this kind; durable on return."""
        writer = self._open.pop(kind, None)
        if writer is not None and writer.records:
            packs = store_pack(self._objects, self._sealer, writer, self._limit, lambda: self._new_ref(kind))
            self.written += [PackRef(pack.ref) for pack in packs]
