"""Read remote packs: tables from the end of the object, records by ranges.

References:
    docs/remote-format.md, section 5
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ciuic.remote.errors import DamagedRemote
from ciuic.remote.format.names import pack_name
from ciuic.remote.format.pack import HEADER_BYTES, TRAILER_BYTES, PackLayout
from ciuic.remote.objects.model import Objects
from ciuic.remote.sealing.sealer import Sealer
from ciuic.repository.model import PackRecord

TAIL_GUESS_BYTES: Final = 64 << 10
"""Bytes of a pack's end that are read at first: the table of a pack of 64 MiB in blocks of 256 KiB takes 16 KiB."""


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

    def read_table(self, objects: Objects) -> list[PackRecord]:
        """Return the records of the pack, in one request, or two if it has many.

        Raises:
            NoSuchObject: there is no such pack.
            DamagedRemote: its end is damaged.
            UnsupportedFormat: a later version of ciuic wrote it.
        """
        try:
            return self._read_table(objects)
        except DamagedRemote:
            # The header of a later version is not the one that the table's checksum was compared with.
            self.layout.check_header(bytes(objects.get_ranges(self.name, [(0, HEADER_BYTES)])[0]))
            raise

    def _read_table(self, objects: Objects) -> list[PackRecord]:
        size_bytes, tail = objects.tail(self.name, TAIL_GUESS_BYTES)
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
        for record, data in zip(records, objects.get_ranges(self.name, ranges), strict=True):
            yield self.layout.open_record(record.offset, record.stored_bytes, data, record.checksum)

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
