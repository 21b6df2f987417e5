"""Chunks of numbers stored as byte planes: all lowest bytes, then all second ones and so on.

Each plane is compressed where that helps. In floating-point numbers the exponents repeat and the mantissas
are noise; together they hardly compress, apart the exponents do. With a *base*, a chunk of the same length,
the differences are stored in the same way: numbers that moved little leave the highest planes empty. The base
of numbers of 4 bytes may be their *twin*, which has them rounded to 2 bytes: then the differences are what
rounding took from them. The result depends on the content (and the base's) alone.

Guarantees: `decode(encode(x)) == x` for any bytes and each width; bytes that `encode` never made give
ValueError or other content (which then does not match its id), and never more memory than the content takes.

References:
    docs/format.md, section 4
"""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Iterable
from typing import Final, NamedTuple

import zstandard

from ciuic.repository.byte_planes_math import (
    HALVES,
    WIDTHS,
    add_differences,
    join,
    planes_of,
    planes_of_differences,
    planes_of_remainders,
    put_back,
    turn,
    turn_back,
    widened,
)
from ciuic.repository.identity import Bytes

# Parameters without matches (almost), and with. Exponents have few repetitions, and what zstd takes for one
# costs more than their Huffman code: a plane of normally distributed weights becomes 0.33 instead of 0.37
# (its entropy is 0.32).
_PARAMETERS: Final = (
    zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=6),
    zstandard.ZstdCompressionParameters.from_level(1),
)
# Largest ratio at which a plane is stored compressed; less gain is not worth the time of decompressing it.
_MAX_PACKED_RATIO: Final = 31, 32
# Compression factor from which a plane may have repetitions, so that the second parameters are tried.
_MIN_REPEAT_FACTOR: Final = 4
_local = threading.local()
_WIDENING = struct.Struct("<i")
# Width of numbers that may have a twin.
WIDE: Final = 4


class Widening(NamedTuple):
    """Conversion of a base of 2-byte numbers to one of 4-byte numbers."""

    kind: int
    """One of `HALVES`."""
    start: int
    """Index in the base of the content's first number; may lie outside of the base."""


def wide_base(base: Bytes, widening: Widening, size_bytes: int) -> bytes:
    """Return the base widened for content of this length."""
    return widened(base, widening.kind, widening.start, size_bytes // WIDE).ljust(size_bytes, b"\0")


def encode(data: Bytes, width: int, base: Bytes | None = None) -> bytes:
    """Return ``data`` as planes of numbers of this width, or of their differences to ``base``.

    ``base`` is as long as ``data``.
    """
    # The last bytes, which are less than a number, are stored as they are.
    whole = len(data) - len(data) % width
    body = memoryview(data)[:whole]
    if base is None:
        return _put_together(planes_of(body, width), width, memoryview(data)[whole:])
    planes = planes_of_differences(body, memoryview(base)[:whole], width)
    return _put_together(planes, width, memoryview(data)[whole:])


def encode_beside(data: Bytes, wide: Bytes, widening: Widening) -> bytes:
    """Return ``data`` as planes of its differences to ``wide``, the base as `wide_base` returns it."""
    whole = len(data) - len(data) % WIDE
    planes = planes_of_remainders(memoryview(data)[:whole], memoryview(wide)[:whole], widening.kind)
    return _put_together(planes, WIDE, memoryview(data)[whole:], widening)


def _put_together(
    raw_planes: list[Bytes], width: int, rest: memoryview, widening: Widening | None = None
) -> bytes:
    unmatched, matched = _compressors()
    planes = [_packed(plane, unmatched, matched) for plane in raw_planes]
    head = _head(width).pack(width, 0 if widening is None else widening.kind, *map(len, planes))
    if widening is not None:
        head += _WIDENING.pack(widening.start)
    return b"".join((head, *planes, rest))


class _Layer(NamedTuple):
    """Planes of one chunk, decompressed."""

    width: int
    widening: Widening | None
    planes: list[Bytes]
    rest: memoryview
    """Last bytes of the content, which are less than a number."""


def decode(
    stored: Bytes, size_bytes: int, base: Bytes | None = None, into: memoryview | None = None
) -> bytearray | memoryview:
    """Return the content of ``size_bytes`` bytes; `decode_chain` for planes alone."""
    return decode_chain((stored,), size_bytes, base, into)


def decode_chain(
    chain: Iterable[Bytes], size_bytes: int, base: Bytes | None = None, into: memoryview | None = None
) -> bytearray | memoryview:
    """Return the content of planes that are differences from others, which have no content of their own made.

    Args:
        chain: What `encode` or `encode_beside` returned, the first one for ``base``, each other one for the
            content of the one before it.
        size_bytes: Length of the content of each of them.
        base: Content of the first one's base, as long as the content unless it is widened.
        into: Memory of ``size_bytes`` bytes for the content, which is returned then; undefined after an error.

    Raises:
        ValueError: The bytes cannot be decoded.
    """
    content: bytearray | memoryview = bytearray(size_bytes) if into is None else into
    view = memoryview(content)
    # Width of the turned numbers that `content` has. They stay turned from one difference to the next.
    turned = 0
    for stored in chain:
        layer = _layer(stored, size_bytes, base)
        width = layer.width
        numbers = view[: size_bytes - len(layer.rest)]
        if turned and (turned != width or layer.widening is not None):
            turn_back(view[: size_bytes - size_bytes % turned], turned)
            turned, base = 0, view
        if layer.widening is not None:
            assert base is not None
            wide = wide_base(base, layer.widening, size_bytes)
            join(layer.planes, width, numbers)
            put_back(numbers, memoryview(wide)[: len(numbers)], layer.widening.kind)
            base = view
        else:
            if base is None:
                join(layer.planes, width, numbers)
            else:
                if not turned:
                    turn(memoryview(base)[: len(numbers)], width, numbers)
                add_differences(layer.planes, width, numbers)
            turned, base = width, view
        view[len(numbers) :] = layer.rest
    if turned:
        turn_back(view[: size_bytes - size_bytes % turned], turned)
    return content


def _layer(stored: Bytes, size_bytes: int, base: Bytes | None) -> _Layer:
    """Return the planes of content of ``size_bytes`` bytes.

    Raises:
        ValueError: The bytes cannot be decoded, or not with this base.
    """
    view = memoryview(stored)
    width = view[0] if view else 0
    if width not in WIDTHS or len(view) < _head(width).size:
        raise ValueError("the head of its planes is damaged")
    _, kind, *lengths = _head(width).unpack_from(view)
    count, rest_bytes = divmod(size_bytes, width)
    at = _head(width).size
    widening = _widening(view, kind, base) if kind else None
    if kind:
        at += _WIDENING.size
    # Checked before anything is decompressed, so that a crafted head cannot make this allocate more than the
    # content.
    if at + sum(lengths) + rest_bytes != len(view) or (
        not kind and base is not None and len(base) != size_bytes
    ):
        raise ValueError("its planes have other lengths than its head says")
    planes = []
    for length in lengths:
        planes.append(_plane(view[at : at + length], count))
        at += length
    return _Layer(width, widening, planes, view[at:])


def _packed(plane: Bytes, unmatched: zstandard.ZstdCompressor, matched: zstandard.ZstdCompressor) -> Bytes:
    """Return the plane in the shortest form that is worth it."""
    # Most planes have no repetitions; the second compressor is tried only where the first one shows that
    # there may be some.
    packed = unmatched.compress(plane)
    if len(packed) * _MIN_REPEAT_FACTOR < len(plane):
        packed = min(packed, matched.compress(plane), key=len)
    return packed if len(packed) * _MAX_PACKED_RATIO[1] < len(plane) * _MAX_PACKED_RATIO[0] else plane


def _compressors() -> tuple[zstandard.ZstdCompressor, zstandard.ZstdCompressor]:
    """Return the compressors of this thread.

    A compressor is not thread-safe, and making one for each block takes a tenth of the time.
    """
    found: tuple[zstandard.ZstdCompressor, zstandard.ZstdCompressor] | None = getattr(_local, "made", None)
    if found is None:
        unmatched, matched = (zstandard.ZstdCompressor(compression_params=one) for one in _PARAMETERS)
        found = _local.made = unmatched, matched
    return found


def _decompressor() -> zstandard.ZstdDecompressor:
    """Return the decompressor of this thread: making one takes 9 us, decompressing a plane 25 to 40."""
    found: zstandard.ZstdDecompressor | None = getattr(_local, "decompressor", None)
    if found is None:
        found = _local.decompressor = zstandard.ZstdDecompressor()
    return found


def _plane(packed: memoryview, count: int) -> Bytes:
    if len(packed) == count:
        return packed
    try:
        # The declared size first: a crafted frame may decompress to gigabytes.
        if zstandard.get_frame_parameters(packed).content_size == count:
            return _decompressor().decompress(packed, max_output_size=count)
    except zstandard.ZstdError as error:
        raise ValueError(f"a plane cannot be decompressed: {error}") from None
    raise ValueError("a plane has another length than its record")


def _widening(view: memoryview, kind: int, base: Bytes | None) -> Widening:
    """Return the conversion of the base for these planes.

    Raises:
        ValueError: The bytes cannot be decoded.
    """
    at = _head(WIDE).size
    if view[0] != WIDE or kind not in HALVES or base is None or len(view) < at + _WIDENING.size:
        raise ValueError("the head of its planes is damaged")
    return Widening(kind, *_WIDENING.unpack_from(view, at))


@functools.cache
def _head(width: int) -> struct.Struct:
    return struct.Struct(f"<BB2x{width}I")
