"""Chunks of numbers, stored by byte planes: all lowest bytes, then all second ones and so on, each compressed where that helps.

In floating-point numbers the exponents repeat and the mantissas are noise; together they hardly compress, apart the exponents do. With a
*base*, a chunk of the same length, the differences are stored in the same way: numbers that moved little leave the highest planes empty.
The base of numbers of 4 bytes may be their *twin*, which has them rounded to 2: then the differences are what rounding took from them.
What comes out depends on the content (and the base's) alone. docs/format.md, section 4, has the bytes.

Guarantees: `decode(encode(x)) == x` for any bytes and each width; bytes that `encode` never made give ValueError or other content (which
then does not match its id), and never more memory than the content takes.
"""

from __future__ import annotations

import struct
import threading
from typing import Final, NamedTuple

import zstandard

from ciuic.repository.ids import Bytes
from ciuic.repository.lanes import (
    HALVES,
    WIDTHS,
    differences,
    joined,
    put_back,
    remainders,
    turn_back,
    turned,
    undo,
    widened,
)

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
_WIDENING = struct.Struct("<i")
WIDE: Final = 4


class Widening(NamedTuple):
    """How a base of numbers of 2 bytes becomes one of numbers of 4."""

    kind: int
    """One of `HALVES`."""
    start: int
    """The number of the base, which may be none of its own, that is the first number's."""


def wide_base(base: Bytes, widening: Widening, size_bytes: int) -> bytes:
    """What it is for content of this length."""
    return widened(base, widening.kind, widening.start, size_bytes // WIDE).ljust(size_bytes, b"\0")


def encode(data: Bytes, width: int, base: Bytes | None = None) -> bytes:
    """``data`` as planes of numbers of this width, or of their differences to ``base``, which is as long."""
    whole = len(data) - len(data) % width
    body = memoryview(data)[:whole]
    numbers = turned(body, width) if base is None else differences(body, memoryview(base)[:whole], width)
    return _put_together(numbers, width, data)


def encode_beside(data: Bytes, wide: Bytes, widening: Widening) -> bytes:
    """As what is left of numbers of 4 bytes beside those in ``wide``, which is what `wide_base` made of the base."""
    whole = len(data) - len(data) % WIDE
    numbers = remainders(memoryview(data)[:whole], memoryview(wide)[:whole], widening.kind)
    return _put_together(numbers, WIDE, data, widening)


def _put_together(numbers: bytes, width: int, data: Bytes, widening: Widening | None = None) -> bytes:
    blind, seeing = _compressors()
    planes = [_packed(numbers[at::width], blind, seeing) for at in range(width)]
    head = _head(width).pack(width, 0 if widening is None else widening.kind, *map(len, planes))
    if widening is not None:
        head += _WIDENING.pack(widening.start)
    return b"".join((head, *planes, bytes(memoryview(data)[len(numbers) :])))


def decode(stored: Bytes, size_bytes: int, base: Bytes | None = None) -> bytearray:
    """The content, ``size_bytes`` long, as is ``base`` unless it is widened. ValueError."""
    view = memoryview(stored)
    width = view[0] if view else 0
    if width not in WIDTHS or len(view) < _head(width).size:
        raise ValueError("the head of its planes is damaged")
    _, kind, *lengths = _head(width).unpack_from(view)
    count, rest = divmod(size_bytes, width)
    at = _head(width).size
    if kind:
        base = _widened_for(view, kind, base, size_bytes)
        at += _WIDENING.size
    if at + sum(lengths) + rest != len(view) or (not kind and base is not None and len(base) != size_bytes):
        raise ValueError("its planes have not the lengths that are said")
    decompressor = zstandard.ZstdDecompressor()
    planes = []
    for length in lengths:
        planes.append(_plane(view[at : at + length], count, decompressor))
        at += length
    numbers = joined(planes, width)
    if base is None:
        turn_back(numbers, width)
    elif kind:
        put_back(numbers, memoryview(base)[: count * width], kind)
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


def _widened_for(view: memoryview, kind: int, base: Bytes | None, size_bytes: int) -> bytes:
    """The base as wide as the numbers whose planes these are. ValueError."""
    at = _head(WIDE).size
    if view[0] != WIDE or kind not in HALVES or base is None or len(view) < at + _WIDENING.size:
        raise ValueError("the head of its planes is damaged")
    return wide_base(base, Widening(kind, *_WIDENING.unpack_from(view, at)), size_bytes)


def _head(width: int) -> struct.Struct:
    return struct.Struct(f"<BB2x{width}I")
