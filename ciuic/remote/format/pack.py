"""Bytes of a remote pack: header, records, table, trailer; encode, and decode with checks.

A pack is one object, written once. Its records lie one directly after the other and are sealed one by one, so
that they can be read by ranges. A reader knows the header from the pack's name: it needs the table, from the
end of the object, and then ranges of records.

References:
    docs/remote-format.md, section 5
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

import xxhash

from ciuic.remote.errors import DamagedRemote
from ciuic.remote.format.names import split_ref
from ciuic.remote.sealing.sealer import PackSeal, Sealer
from ciuic.repository.errors import UnsupportedFormat
from ciuic.repository.format.pack_format import CODED_FLAGS, FLAG_DIFFERENCE, KINDS, MAX_CHUNK_BYTES
from ciuic.repository.ids import Bytes
from ciuic.repository.model import PackRecord
from ciuic.types import CHUNK_ID_BYTES, ChunkId

VERSION: Final = 1
MAX_ROWS: Final = 1 << 20
"""Limit of records in a pack; bounds what a crafted trailer can make a reader allocate."""
MAX_PACK_BYTES: Final = 1 << 30
"""Limit of a pack; uploaders write packs of at most 64 MiB."""

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
