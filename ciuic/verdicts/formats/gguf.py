"""Structure of GGUF: keys and values, descriptions of tensors, and the tensors, each aligned.

References:
    https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from typing import Final

from ciuic.units import plural
from ciuic.verdicts.model import BoundedReader, NotJudged, OtherFormat, Piece, Structure, TornContent

_MAGIC: Final = b"GGUF"
_MAX_STRING_BYTES: Final = 1 << 20
_MAX_TENSORS: Final = 1 << 18
_MAX_VALUES: Final = 1 << 22
_MAX_NESTED: Final = 4
_MAX_NUMBER: Final = 1 << 62
_PAGE_BYTES: Final = 1 << 16
# Bytes of a value by its type: u8, i8, u16, i16, u32, i32, f32, bool, then (from 10) u64, i64, f64.
_VALUE_BYTES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
# (numbers in a block, bytes of a block) by the type of a tensor: `ggml_type` and its traits.
_BLOCKS: Final = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82),
    23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2),
    34: (256, 54), 35: (256, 66), 39: (32, 17),
}  # fmt: skip
_INTEGERS: Final = (24, 25, 26, 27)


class _Stream:
    """Sequential reads of the header, in pages."""

    def __init__(self, reader: BoundedReader) -> None:
        self._reader = reader
        self.at = 0
        self._page = b""
        self._page_start = 0

    def take(self, length: int) -> bytes:
        end = self.at + length
        if end > self._page_start + len(self._page):
            want = max(length, _PAGE_BYTES)
            self._page_start = self.at
            self._page = self._reader.up_to(self.at, want, "its header")
            if len(self._page) < length:
                raise TornContent("its header is cut")
        start = self.at - self._page_start
        self.at = end
        return self._page[start : start + length]

    def number(self, form: str) -> int:
        value: int = struct.unpack("<" + form, self.take(struct.calcsize(form)))[0]
        return value

    def text(self) -> bytes:
        length = self.number("Q")
        if length > _MAX_STRING_BYTES:
            raise NotJudged("its header has a text that is longer than what is read for a verdict")
        return self.take(length)


def read_gguf(reader: BoundedReader) -> Structure:
    """Return the structure; raise TornContent, OtherFormat or NotJudged."""
    if reader.up_to(0, 4, "the beginning") != _MAGIC:
        if reader.has_suffix(".gguf"):
            raise TornContent("it does not begin with GGUF")
        raise OtherFormat
    stream = _Stream(reader)
    stream.take(4)
    version = stream.number("I")
    if version not in (2, 3):
        raise NotJudged(f"GGUF of version {version} is not known here")
    count, keys = stream.number("Q"), stream.number("Q")
    if count > _MAX_TENSORS or keys > _MAX_TENSORS:
        raise NotJudged("its header is larger than what is read for a verdict")
    values = _Values(stream)
    for _ in range(keys):
        values.pair()
    tensors = [_tensor(stream) for _ in range(count)]
    return _structure(reader, stream.at, values.alignment, tensors)


class _Values:
    """Keys and values, of which the alignment alone is wanted."""

    def __init__(self, stream: _Stream) -> None:
        self._stream = stream
        self._left = _MAX_VALUES
        self.alignment = 32

    def pair(self) -> None:
        key = self._stream.text()
        kind = self._stream.number("I")
        if key == b"general.alignment" and kind == 4:
            self.alignment = self._stream.number("I")
            if not 0 < self.alignment <= 1 << 24 or self.alignment & (self.alignment - 1):
                raise TornContent("its alignment is impossible")
            return
        self._skip(kind, 0)

    def _skip(self, kind: int, depth: int) -> None:
        if kind == _STRING:
            self._stream.text()
        elif kind == _ARRAY:
            inner, count = self._stream.number("I"), self._stream.number("Q")
            self._left -= count
            if self._left < 0 or depth == _MAX_NESTED:
                raise NotJudged("its header is larger than what is read for a verdict")
            if inner in _VALUE_BYTES:
                self._stream.take(count * _VALUE_BYTES[inner])
                return
            for _ in range(count):
                self._skip(inner, depth + 1)
        elif kind in _VALUE_BYTES:
            self._stream.take(_VALUE_BYTES[kind])
        else:
            raise TornContent(f"its header has a value of the unknown type {kind}")


def _tensor(stream: _Stream) -> tuple[int, int, int]:
    """Return (offset, bytes, length of an end that is not zero) of the next tensor."""
    stream.text()
    dimensions = stream.number("I")
    if dimensions > 8:
        raise TornContent("a tensor has an impossible shape")
    shape = [stream.number("Q") for _ in range(dimensions)]
    kind, offset = stream.number("I"), stream.number("Q")
    if kind not in _BLOCKS:
        raise NotJudged(f"its type of numbers {kind} is not known here")
    block, block_bytes = _BLOCKS[kind]
    numbers = math.prod(shape)
    if numbers >= _MAX_NUMBER or offset >= _MAX_NUMBER or numbers % block:
        raise TornContent("a tensor has an impossible shape")
    # The last byte of a float or of a block shows more than all of it; an integer may end in zeros.
    return offset, numbers // block * block_bytes, block_bytes if kind in _INTEGERS else 1


def _structure(
    reader: BoundedReader, header_end: int, alignment: int, tensors: list[tuple[int, int, int]]
) -> Structure:
    start = -(-header_end // alignment) * alignment
    at, last = 0, (0, 0, 0)
    for tensor in sorted(tensors):
        # Each begins at the next multiple of the alignment after the one before.
        if tensor[0] != -(-at // alignment) * alignment:
            raise TornContent("its tensors do not follow one another")
        at = tensor[0] + tensor[1]
        last = tensor if tensor[1] else last
    end = start + at
    padded = -(-end // alignment) * alignment
    # Of a vocabulary alone nothing follows the header.
    if not (end if tensors else header_end) <= reader.size_bytes <= padded:
        raise TornContent(f"its header promises {end} bytes, the file has {reader.size_bytes}")
    last_end = start + last[0] + last[1]
    last_item = (last_end - last[2], last_end) if last[1] else None
    return Structure("gguf", plural(len(tensors), "tensor"), (Piece(start, end),), last_item)
