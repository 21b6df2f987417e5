"""Read remote packs: tables from the end of the object, records by ranges.

References:
    docs/remote-format.md, section 5
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from ciuic.remote.errors import DamagedRemote
from ciuic.remote.format.names import pack_name, split_ref, table_name
from ciuic.remote.format.pack import HEADER_BYTES, MAX_ROWS, ROW_BYTES, TRAILER_BYTES, PackLayout
from ciuic.remote.objects.model import ArchivedObject, NoSuchObject, Objects
from ciuic.remote.objects.verified import read_verified
from ciuic.remote.sealing.sealer import TAG_BYTES, Sealer
from ciuic.repository.ids import Bytes
from ciuic.repository.model import PackRecord

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
