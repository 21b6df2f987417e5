"""Index of a TensorFlow checkpoint: a sorted table of names, and where each tensor lies in the data files beside it.

References:
    tensorflow/core/lib/io/table_format.txt and tensorflow/core/protobuf/tensor_bundle.proto
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from ciuic.verdicts.model import BoundedReader, NotJudged, OtherFormat, TornContent

SUFFIX: Final = ".index"
_FOOTER_BYTES: Final = 48
_MAGIC: Final = bytes.fromhex("57fb808b247547db")
_TRAILER_BYTES: Final = 5
"""Kind of compression and masked CRC-32C behind each block."""
_MAX_TENSORS: Final = 1 << 18
_MAX_SHARDS: Final = 1 << 14
_MAX_BLOCK_BYTES: Final = 4 << 20
"""Limit of a block, whose checksum takes half a second then. TensorFlow writes some 256 KiB."""
_MAX_KEY_BYTES: Final = 4096
_VARINT_BYTES: Final = 10


class TensorBundle(NamedTuple):
    """Data files that an index needs."""

    tensors: int
    shards: int
    """Number of data files."""
    ends: dict[int, int]
    """Offset after the last tensor, by the number of the data file."""


def read_index(reader: BoundedReader) -> TensorBundle:
    """Return what the index needs; raise TornContent, OtherFormat or NotJudged."""
    size = reader.size_bytes
    footer = reader.at(max(0, size - _FOOTER_BYTES), min(size, _FOOTER_BYTES), "its end")
    if footer[-8:] != _MAGIC or len(footer) != _FOOTER_BYTES:
        if reader.has_suffix(SUFFIX):
            raise TornContent("the end of its index is missing")
        raise OtherFormat
    cursor = _Cursor(footer)
    cursor.number()
    cursor.number()
    ends: dict[int, int] = {}
    shards = tensors = 0
    for _, handle in _entries(_block(reader, cursor.number(), cursor.number())):
        inner = _Cursor(handle)
        for key, value in _entries(_block(reader, inner.number(), inner.number())):
            if not key:
                shards = _fields(value).get(1, 0)
                continue
            tensors += 1
            if tensors > _MAX_TENSORS:
                raise NotJudged("its index has more tensors than are read for a verdict")
            shard, start, length = _place(value)
            ends[shard] = max(ends.get(shard, 0), start + length)
    if not 0 < shards <= _MAX_SHARDS or any(shard >= shards for shard in ends):
        raise TornContent("its index is damaged")
    return TensorBundle(tensors, shards, ends)


class _Cursor:
    """Cursor over bytes with numbers of variable length."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    @property
    def is_done(self) -> bool:
        return self.at >= len(self.data)

    def number(self) -> int:
        value = 0
        for index in range(_VARINT_BYTES):
            if self.is_done:
                break
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 0x7F) << (7 * index)
            if byte < 0x80:
                return value
        raise TornContent("its index is damaged")

    def take(self, length: int) -> bytes:
        if self.at + length > len(self.data):
            raise TornContent("its index is damaged")
        self.at += length
        return self.data[self.at - length : self.at]


def _block(reader: BoundedReader, offset: int, length: int) -> bytes:
    if length > _MAX_BLOCK_BYTES:
        raise NotJudged("its index is larger than what is read for a verdict")
    stored = reader.at(offset, length + _TRAILER_BYTES, "its index")
    data, kind, checksum = stored[:length], stored[length], int.from_bytes(stored[length + 1 :], "little")
    if kind:
        raise NotJudged("its index is compressed")
    # In Python: a megabyte takes a tenth of a second, and its entries take as long again.
    reader.spend(len(stored) // 8)
    if masked_crc32c(stored[: length + 1]) != checksum:
        raise TornContent("its index does not match its checksum")
    return data


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield (key, value) of a block, whose keys share their beginnings with the key before."""
    if len(block) < 4:
        raise TornContent("its index is damaged")
    restarts = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 - 4 * restarts
    if end < 0:
        raise TornContent("its index is damaged")
    cursor = _Cursor(block[:end])
    key = b""
    while not cursor.is_done:
        shared, own, length = cursor.number(), cursor.number(), cursor.number()
        if shared > len(key):
            raise TornContent("its index is damaged")
        # Keys that share a long beginning would take far more memory than the index.
        if shared + own > _MAX_KEY_BYTES:
            raise NotJudged("its index has a name that is longer than what is read for a verdict")
        key = key[:shared] + cursor.take(own)
        yield key, cursor.take(length)


def _fields(message: bytes) -> dict[int, int]:
    """Return the numbers of a message by their field; texts and messages within it are passed over."""
    cursor = _Cursor(message)
    found = {}
    while not cursor.is_done:
        tag = cursor.number()
        kind = tag & 7
        if kind == 0:
            found[tag >> 3] = cursor.number()
        elif kind == 2:
            cursor.take(cursor.number())
        elif kind in (1, 5):
            cursor.take(8 if kind == 1 else 4)
        else:
            raise TornContent("its index is damaged")
    return found


def _place(message: bytes) -> tuple[int, int, int]:
    """Return (shard, offset, length): fields 3 to 5, which are left out where they are 0."""
    fields = _fields(message)
    return fields.get(3, 0), fields.get(4, 0), fields.get(5, 0)


def _table() -> tuple[int, ...]:
    values = []
    for number in range(256):
        for _ in range(8):
            # Polynomial of Castagnoli, reversed.
            number = (number >> 1) ^ (0x82F63B78 if number & 1 else 0)
        values.append(number)
    return tuple(values)


_TABLE: Final = _table()


def crc32c(data: bytes) -> int:
    """Return the CRC-32C."""
    value = 0xFFFFFFFF
    for byte in data:
        value = (value >> 8) ^ _TABLE[(value ^ byte) & 0xFF]
    return value ^ 0xFFFFFFFF


def masked_crc32c(data: bytes) -> int:
    """Return the CRC-32C as TensorFlow's files have it, rotated and offset."""
    value = crc32c(data)
    return (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF
