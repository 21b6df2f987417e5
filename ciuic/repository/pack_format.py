"""Bytes of a pack: header, segments, footer; encoding, and decoding with checks.

A pack is a header block, then segments, then (once sealed) a footer. A segment is a table of records followed
by their payloads. The table comes first so that a scan can find everything without a footer, and holds
several records so that its 4 KiB alignment costs little.

References:
    docs/format.md, section on packs
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import msgspec
import xxhash

from ciuic.repository.errors import DamagedPack, UnsupportedFormat
from ciuic.repository.identity import HashName
from ciuic.repository.model import DIFFERENCE, PackKind, PackRecord
from ciuic.types import CHUNK_ID_BYTES, ChunkId

# Block size of XFS and btrfs as a rule: FICLONERANGE takes only whole blocks.
ALIGN_BYTES = 4096
ALIGN_PAYLOAD_FROM_BYTES = 65536
"""Size from which raw payloads begin on a 4 KiB boundary, so that extents can be shared with other files."""
# Twice the largest block of a file.
MAX_CHUNK_BYTES = 16 << 20
MAX_RECORDS = 1 << 16
"""Limit of records in one segment; bounds what a crafted table can make a reader allocate."""

MAX_FOOTER_RECORDS = 1 << 23
"""Limit of records in one pack, above what half a gigabyte of one-byte chunks comes to; bounds what a crafted
trailer of a sparse file can make a reader allocate."""

FLAG_ZSTD = 1
FLAG_PLANES = 2
"""Content stored as byte planes (ciuic.repository.byte_planes)."""
FLAG_DIFFERENCE = DIFFERENCE
"""Content stored as the difference from the base that the next record names; only together with planes."""
FLAG_BASE = 8
"""Record that is no chunk, but the id of the base of the record before."""
KNOWN_FLAGS = FLAG_ZSTD | FLAG_PLANES | FLAG_DIFFERENCE | FLAG_BASE
CODED_FLAGS = FLAG_ZSTD | FLAG_PLANES | FLAG_DIFFERENCE
"""Flags of content that is coded."""
_CHUNK_FLAGS = (0, FLAG_ZSTD, FLAG_PLANES, FLAG_PLANES | FLAG_DIFFERENCE)
# Trees and maps lie in packs of their own, so that walking them reads little.
KINDS: dict[PackKind, int] = {"data": 1, "meta": 2}
VERSION = 1

# Magic, version, kind, hash, 0, number, repository id, 0.
_HEADER = struct.Struct("<8sHBBIQ16s16s")
_HEADER_MAGIC = b"CIUICPAK"
# Magic, records, 0, segment offset, payload bytes.
_SEGMENT = struct.Struct("<8sIIQQ")
_SEGMENT_MAGIC = b"CIUICSEG"
_FOOTER_MAGIC = b"CIUICFOO"
# Magic, records, 0, footer offset, checksum of records and trailer.
_TRAILER = struct.Struct("<8sIIQQ")
# Id, offset, stored, raw, flags, 0, checksum of the stored bytes.
_RECORD = struct.Struct("<16sQIIIIQ")
_CHECKSUM = struct.Struct("<Q")

HEADER_BYTES = _HEADER.size + _CHECKSUM.size
SEGMENT_HEAD_BYTES = _SEGMENT.size
RECORD_BYTES = _RECORD.size
TRAILER_BYTES = _TRAILER.size
_HASHES: dict[HashName, int] = {"xxh3-128": 1, "blake3-128": 2}
_EMPTY_CHECKSUM = xxhash.xxh3_64_intdigest(b"")


class PackHeader(msgspec.Struct, frozen=True):
    """First block of a pack."""

    number: int
    kind: PackKind
    repository_id: bytes
    hash: HashName
    """Hash that names the chunks of the pack."""


class SegmentHead(msgspec.Struct, frozen=True):
    """Fixed part of a segment table."""

    records: int
    payload_bytes: int
    """Bytes from the end of the table to the end of the last payload, padding between payloads included."""

    @property
    def table_bytes(self) -> int:
        """Size of head, records and checksum."""
        return SEGMENT_HEAD_BYTES + self.records * RECORD_BYTES + _CHECKSUM.size


def align(offset: int) -> int:
    """Return the next multiple of 4096."""
    return -(-offset // ALIGN_BYTES) * ALIGN_BYTES


def checksum(data: bytes | bytearray | memoryview) -> int:
    """Return XXH3-64 without a seed: it guards stored bytes, independently of how chunks are named."""
    return xxhash.xxh3_64_intdigest(data)


def encode_header(header: PackHeader) -> bytes:
    """Return the first 4096 bytes of a pack."""
    fields = (_HEADER_MAGIC, VERSION, KINDS[header.kind], _HASHES[header.hash], 0, header.number)
    raw = _HEADER.pack(*fields, header.repository_id, bytes(16))
    return (raw + _CHECKSUM.pack(checksum(raw))).ljust(ALIGN_BYTES, b"\0")


def decode_header(data: bytes, number: int, repository_id: bytes, hash_name: HashName) -> PackHeader:
    """Return the header of pack ``number``. DamagedPack unless it is whole and of this repository."""
    if len(data) < ALIGN_BYTES:
        raise DamagedPack(number, 0, "the header is cut short")
    raw, rest = data[: _HEADER.size], data[_HEADER.size : ALIGN_BYTES]
    magic, version, kind_code, hash_code, _, found, owner, _ = _HEADER.unpack(raw)
    if (
        magic != _HEADER_MAGIC
        or _CHECKSUM.unpack_from(rest)[0] != checksum(raw)
        # The rest of the block must be zero: otherwise a flipped bit there would be found by nobody.
        or any(rest[_CHECKSUM.size :])
    ):
        raise DamagedPack(number, 0, "the header does not match its checksum")
    # After the checksum: a damaged version number must not look like a later format.
    found_hash = next((name for name, code in _HASHES.items() if code == hash_code), None)
    if version != VERSION or found_hash is None:
        raise UnsupportedFormat(
            f"pack {number:016x} has format {version}, hash {hash_code}: this ciuic reads format 1 with hash 1 or 2"
        )
    kind: PackKind | None = next((k for k, code in KINDS.items() if code == kind_code), None)
    if kind is None or found != number or owner != repository_id:
        raise DamagedPack(number, 0, f"the header is that of pack {found:016x} of repository {owner.hex()}")
    if found_hash != hash_name:
        raise DamagedPack(number, 0, f"the header says {found_hash}, the repository {hash_name}")
    return PackHeader(number, kind, owner, found_hash)


def encode_table(offset: int, records: Sequence[PackRecord], payload_bytes: int) -> bytes:
    """Return head and table of the segment at ``offset``."""
    table = b"".join(map(encode_record, records))
    raw = _SEGMENT.pack(_SEGMENT_MAGIC, len(table) // RECORD_BYTES, 0, offset, payload_bytes) + table
    return raw + _CHECKSUM.pack(checksum(raw))


def table_bytes(records: int, bases: int) -> int:
    """Return the size of the table of a segment with this many chunks, and this many with a base."""
    return SEGMENT_HEAD_BYTES + (records + bases) * RECORD_BYTES + _CHECKSUM.size


def encode_record(record: PackRecord) -> bytes:
    """Return the record, followed by that of its base if it has one."""
    raw = _RECORD.pack(
        record.id, record.offset, record.stored_bytes, record.raw_bytes, record.flags, 0, record.checksum
    )
    if not record.base:
        return raw
    end = record.offset + record.stored_bytes
    return raw + _RECORD.pack(record.base, end, 0, 0, FLAG_BASE, 0, _EMPTY_CHECKSUM)


def decode_segment_head(data: bytes, offset: int) -> SegmentHead | None:
    """Return the head of a segment; None where none begins. `decode_table` checks the table's checksum."""
    if len(data) < SEGMENT_HEAD_BYTES:
        return None
    magic, records, zero, own_offset, payload_bytes = _SEGMENT.unpack_from(data)
    # A head that names another offset is content which looks like a segment.
    if magic != _SEGMENT_MAGIC or zero or own_offset != offset or not 0 < records <= MAX_RECORDS:
        return None
    # Bounds what a crafted head can make a reader skip or allocate.
    if payload_bytes > records * (MAX_CHUNK_BYTES + ALIGN_BYTES):
        return None
    return SegmentHead(records, payload_bytes)


def decode_table(data: bytes, number: int, offset: int, head: SegmentHead) -> list[PackRecord]:
    """Return the records of a segment.

    Raises:
        DamagedPack: the table is incomplete, or its records do not lie in the segment, in order.
    """
    if len(data) != head.table_bytes:
        raise DamagedPack(number, offset, "a segment table is cut short")
    if _CHECKSUM.unpack_from(data, len(data) - _CHECKSUM.size)[0] != checksum(
        memoryview(data)[: -_CHECKSUM.size]
    ):
        raise DamagedPack(number, offset, "a segment table does not match its checksum")
    records = _decode_records(data[SEGMENT_HEAD_BYTES : -_CHECKSUM.size], number, offset)
    end = offset + head.table_bytes
    for record in records:
        # Records and padding cover the segment without a gap, so that a scrub of both reads every byte once.
        if not 0 <= record.offset - end < ALIGN_BYTES:
            raise DamagedPack(number, offset, "the records of a segment overlap or leave gaps")
        end = record.offset + record.stored_bytes
    if end != offset + head.table_bytes + head.payload_bytes:
        raise DamagedPack(number, offset, "the payload of a segment has another length than its head says")
    return records


def _decode_records(data: bytes, number: int, offset: int) -> list[PackRecord]:
    records = []
    # Record before, if the next one must name its base.
    based: PackRecord | None = None
    for id_, at, stored, raw, flags, zero, digest in _RECORD.iter_unpack(data):
        # A later version wrote this: its content must not be reported as damaged.
        if flags & ~KNOWN_FLAGS:
            raise UnsupportedFormat(f"pack {number:016x} holds a chunk with unknown flags {flags:#x}")
        if zero or stored > MAX_CHUNK_BYTES or raw > MAX_CHUNK_BYTES or (not flags and stored != raw):
            raise DamagedPack(number, offset, f"impossible lengths for chunk {id_.hex()}")
        if based is not None:
            if flags != FLAG_BASE or stored or raw or at != based.offset + based.stored_bytes:
                raise DamagedPack(number, offset, f"no record of its base follows chunk {based.id.hex()}")
            records.append(msgspec.structs.replace(based, base=ChunkId(id_)))
            based = None
            continue
        if flags not in _CHUNK_FLAGS:
            raise DamagedPack(number, offset, f"impossible flags {flags:#x} for chunk {id_.hex()}")
        record = PackRecord(ChunkId(id_), at, stored, raw, flags, digest)
        if flags & FLAG_DIFFERENCE:
            based = record
        else:
            records.append(record)
    if based is not None:
        raise DamagedPack(number, offset, f"no record of its base follows chunk {based.id.hex()}")
    return records


def encode_footer(offset: int, records: Iterable[PackRecord]) -> bytearray:
    """Return all records once more, and the trailer, which end a sealed pack.

    ``offset`` is where the footer will be. Takes the memory of one footer: a pack of tiny chunks has a
    million records.
    """
    footer = bytearray()
    for record in records:
        footer += encode_record(record)
    count = len(footer) // RECORD_BYTES
    footer += _TRAILER.pack(_FOOTER_MAGIC, count, 0, offset, 0)
    # The checksum covers the trailer with 0 in its own field.
    footer[-TRAILER_BYTES:] = _TRAILER.pack(_FOOTER_MAGIC, count, 0, offset, checksum(footer))
    return footer


def decode_trailer(data: bytes, size_bytes: int) -> tuple[int, int] | None:
    """Return (footer offset, number of records) if these last bytes of a pack end a footer, else None."""
    if len(data) != TRAILER_BYTES:
        return None
    magic, records, zero, offset, _ = _TRAILER.unpack(data)
    if magic != _FOOTER_MAGIC or zero or records > MAX_FOOTER_RECORDS:
        return None
    # Otherwise the file was cut or extended, or these bytes are content of a chunk.
    if offset + records * RECORD_BYTES + TRAILER_BYTES != size_bytes:
        return None
    return offset, records


def decode_footer(data: bytes, number: int, offset: int) -> list[PackRecord]:
    """Return all records of a sealed pack from its whole footer (records and trailer).

    Raises:
        DamagedPack: its structure is damaged.
    """
    body, trailer = data[:-TRAILER_BYTES], data[-TRAILER_BYTES:]
    magic, count, _, own_offset, digest = _TRAILER.unpack(trailer)
    plain = _TRAILER.pack(magic, count, 0, own_offset, 0)
    if count * RECORD_BYTES != len(body) or digest != checksum(body + plain):
        raise DamagedPack(number, offset, "the footer does not match its checksum")
    return _decode_records(body, number, offset)


assert CHUNK_ID_BYTES == 16
assert RECORD_BYTES == 48
