"""Chunks of numbers, stored by byte planes: all lowest bytes, then all second ones and so on, each compressed where that helps.

In floating-point numbers the exponents repeat and the mantissas are noise; together they hardly compress, apart the exponents do. With a
*base*, a chunk of the same length, the differences are stored in the same way: numbers that moved little leave the highest planes empty.
What comes out depends on the content (and the base's) alone. docs/format.md, section 4, has the bytes.

Guarantees: `decode(encode(x)) == x` for any bytes and each width; bytes that `encode` never made give ValueError or other content (which
then does not match its id), and never more memory than the content takes.
"""

from __future__ import annotations

import struct
import threading
from typing import Final

import zstandard

from ciuic.repository.ids import Bytes
from ciuic.repository.lanes import WIDTHS, differences, joined, turn_back, turned, undo

_PARAMETERS: Final = (
    zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=6),
    zstandard.ZstdCompressionParameters.from_level(1),
)
"""All but blind to repetitions, and not. Exponents have few, and what zstd takes for one costs more than their Huffman code: a plane of
normally distributed weights becomes 0.33 instead of 0.37 (its entropy is 0.32).
"""
_WORTH: Final = 31, 32
"""Of one plane: less is not worth the time of decompressing it."""
_REPEATS: Final = 4
"""Becomes so many times shorter what may have repetitions."""
_own = threading.local()


def encode(data: Bytes, width: int, base: Bytes | None = None) -> bytes:
    """``data`` as planes of numbers of this width, or of their differences to ``base``, which is as long."""
    count, rest = divmod(len(data), width)
    body = memoryview(data)[: count * width]
    if base is None:
        numbers = turned(body, width)
    else:
        numbers = differences(body, memoryview(base)[: count * width], width)
    blind, seeing = _compressors()
    planes = [_packed(numbers[at::width], blind, seeing) for at in range(width)]
    lengths = map(len, planes)
    return b"".join(
        (_head(width).pack(width, *lengths), *planes, bytes(data[len(data) - rest :]) if rest else b"")
    )


def decode(stored: Bytes, size_bytes: int, base: Bytes | None = None) -> bytearray:
    """The content, ``size_bytes`` long, as is ``base``. ValueError."""
    view = memoryview(stored)
    width = view[0] if view else 0
    if width not in WIDTHS or len(view) < _head(width).size:
        raise ValueError("the head of its planes is damaged")
    _, *lengths = _head(width).unpack_from(view)
    count, rest = divmod(size_bytes, width)
    at = _head(width).size
    if at + sum(lengths) + rest != len(view) or (base is not None and len(base) != size_bytes):
        raise ValueError("its planes have not the lengths that are said")
    decompressor = zstandard.ZstdDecompressor()
    planes = []
    for length in lengths:
        planes.append(_plane(view[at : at + length], count, decompressor))
        at += length
    numbers = joined(planes, width)
    if base is None:
        turn_back(numbers, width)
    else:
        undo(numbers, memoryview(base)[: count * width], width)
    if rest:
        numbers += view[at:]
    return numbers


def _packed(plane: bytes, blind: zstandard.ZstdCompressor, seeing: zstandard.ZstdCompressor) -> bytes:
    """In the shortest form that is worth it."""
    packed = blind.compress(plane)
    if len(packed) * _REPEATS < len(plane):
        packed = min(packed, seeing.compress(plane), key=len)
    return packed if len(packed) * _WORTH[1] < len(plane) * _WORTH[0] else plane


def _compressors() -> tuple[zstandard.ZstdCompressor, zstandard.ZstdCompressor]:
    """Of this thread: one is not for two at once, and making one for each block takes a tenth of the time."""
    found: tuple[zstandard.ZstdCompressor, zstandard.ZstdCompressor] | None = getattr(_own, "made", None)
    if found is None:
        blind, seeing = (zstandard.ZstdCompressor(compression_params=one) for one in _PARAMETERS)
        found = _own.made = blind, seeing
    return found


def _plane(packed: memoryview, count: int, decompressor: zstandard.ZstdDecompressor) -> Bytes:
    if len(packed) == count:
        return packed
    try:
        if zstandard.get_frame_parameters(packed).content_size == count:
            return decompressor.decompress(packed, max_output_size=count)
    except zstandard.ZstdError as error:
        raise ValueError(f"a plane cannot be decompressed: {error}") from None
    raise ValueError("a plane has another length than its record")


def _head(width: int) -> struct.Struct:
    return struct.Struct(f"<B3x{width}I")
