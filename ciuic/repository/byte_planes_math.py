"""Arithmetic on many numbers of 2, 4 or 8 bytes at once, for the transformations of `byte_planes`.

Guarantees: the same bytes with NumPy and without. With it a gigabyte takes about a tenth of a second for each
step; without it Python's long integers carry all numbers side by side, at some 100 MB/s.

A *turned* number is one whose bits are rotated left by one: the sign of a floating-point number becomes the
lowest bit, and the exponent is alone in the highest byte (float32) or begins there. Data and base have the
same length, a multiple of the width.

Intermediate results lie in buffers that each thread keeps (`_Scratch`): where the C library returns memory to
the kernel between two blocks, fetching it again page by page takes longer than the arithmetic.
"""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ciuic.repository.identity import Bytes

WIDTHS: Final = (2, 4, 8)
# Codes in the head of planes (docs/format.md, section 4).
BFLOAT16: Final = 1
FLOAT16: Final = 2
HALVES: Final = (BFLOAT16, FLOAT16)
"""Kinds of numbers of 2 bytes that `widened` knows."""
# Largest error of rounding to nearest, as an integer: with it added, no remainder is below zero.
_HALF_A_STEP: Final = {BFLOAT16: 1 << 15, FLOAT16: 1 << 12}


# Chunks of the usual size or less; larger ones use memory of their own.
_MAX_SCRATCH_BYTES: Final = 1 << 20


class _Scratch(threading.local):
    """Buffers of one thread for intermediate results."""

    def __init__(self) -> None:
        self._buffers: dict[str, Any] = {}

    def array(self, purpose: str, like: Any, width: int | None = None) -> Any:
        """Return an array with the length of ``like``, whose content is undefined.

        The same memory is returned for the same purpose until the thread ends. The dtype is that of ``like``,
        or an unsigned integer of ``width`` bytes.
        """
        numpy = _numpy()
        dtype = like.dtype if width is None else numpy.dtype(f"<u{width}")
        size_bytes = like.size * dtype.itemsize
        if size_bytes > _MAX_SCRATCH_BYTES:
            return numpy.empty(like.size, dtype)
        buffer = self._buffers.get(purpose)
        if buffer is None or buffer.nbytes < size_bytes:
            buffer = self._buffers[purpose] = numpy.empty(size_bytes, "u1")
        return buffer[:size_bytes].view(dtype)


_scratch = _Scratch()


@functools.cache
def _numpy() -> Any:
    """Return the module, or None; imported on first use, because that takes a tenth of a second."""
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def planes_of(data: Bytes, width: int) -> list[Bytes]:
    """Return the byte planes of the data's turned numbers, lowest bytes first."""
    numpy = _numpy()
    if numpy is None:
        return _planes_long(_turn_long(data, width), width)
    return _planes(numpy, _turn(numpy, data, width, "turned"))


def join(planes: Sequence[Bytes], width: int, into: memoryview) -> None:
    """Write the numbers made of these byte planes, lowest bytes first, to ``into``."""
    numpy = _numpy()
    if numpy is None:
        for place, plane in enumerate(planes):
            into[place::width] = plane
        return
    arrays = [numpy.frombuffer(plane, "u1") for plane in planes]
    _join(numpy, arrays, numpy.frombuffer(into, f"<u{width}"))


def turn(data: Bytes, width: int, into: memoryview) -> None:
    """Write the data's turned numbers to ``into``, which may be the same memory."""
    numpy = _numpy()
    if numpy is None:
        into[:] = _turn_long(data, width)
    else:
        numpy.copyto(numpy.frombuffer(into, f"<u{width}"), _turn(numpy, data, width, "turned"))


def turn_back(data: memoryview, width: int) -> None:
    """Undo the turning of numbers, in place."""
    numpy = _numpy()
    if numpy is None:
        data[:] = _turn_back_long(data, width)
    else:
        _turn_back(numpy, numpy.frombuffer(data, f"<u{width}"), width)


def planes_of_differences(data: Bytes, base: Bytes, width: int) -> list[Bytes]:
    """Return the byte planes of the differences of turned numbers, zigzag-encoded.

    Small differences of either sign are small numbers.
    """
    numpy = _numpy()
    if numpy is None:
        return _planes_long(_differences_long(data, base, width), width)
    change = _turn(numpy, data, width, "turned")
    numpy.subtract(change, _turn(numpy, base, width, "turned base"), out=change)
    # Zigzag: the sign becomes the lowest bit, so that small changes of either sign leave the high bytes 0.
    sign = _scratch.array("sign", change)
    numpy.right_shift(change.view(f"<i{width}"), 8 * width - 1, out=sign.view(f"<i{width}"))
    numpy.left_shift(change, _array_of(numpy, width, 1), out=change)
    numpy.bitwise_xor(change, sign, out=change)
    return _planes(numpy, change)


def add_differences(planes: Sequence[Bytes], width: int, numbers: memoryview) -> None:
    """Add the differences of `planes_of_differences` to turned numbers, in place."""
    numpy = _numpy()
    if numpy is None:
        changes = bytearray(len(numbers))
        join(planes, width, memoryview(changes))
        numbers[:] = _changed_long(changes, numbers, width)
        return
    turned = numpy.frombuffer(numbers, f"<u{width}")
    lowest, *higher = (numpy.frombuffer(plane, "u1") for plane in planes)
    # Zigzag is undone while the planes are joined: halving and the sign take arrays of bytes instead of
    # numbers. 98 us for 64 Ki numbers of 4 bytes, where joining them first took 131.
    sign, half = _scratch.array("sign", lowest), _scratch.array("half", lowest)
    one = _array_of(numpy, 1, 1)
    numpy.bitwise_and(lowest, one, out=sign)
    numpy.negative(sign, out=sign)
    numpy.right_shift(lowest, one, out=half)
    change = _scratch.array("turned", turned)
    _join(numpy, [half, *higher], change, 7)
    # Cast to the width with its sign: all bits are set where the difference is negative.
    signed = change.view(f"<i{width}")
    numpy.bitwise_xor(signed, sign.view("i1"), out=signed)
    numpy.add(turned, change, out=turned)


def widened(base: Bytes, kind: int, start: int, count: int) -> bytes:
    """Return ``count`` numbers of ``base`` from ``start`` on as float32; 0 outside of the base.

    The bits are the same everywhere, also for NaN: floating-point arithmetic is not used.
    """
    before = min(count, max(0, -start))
    first = max(0, start)
    body = memoryview(base)[2 * first : 2 * min(len(base) // 2, first + count - before)]
    behind = count - before - len(body) // 2
    return b"".join((bytes(4 * before), _wide(body, kind), bytes(4 * behind)))


def planes_of_remainders(data: Bytes, wide: Bytes, kind: int) -> list[Bytes]:
    """Return the byte planes of each number of 4 bytes minus that of ``wide``, plus half a step of this kind.

    The numbers are taken as integers.
    """
    numpy, half = _numpy(), _HALF_A_STEP[kind]
    if numpy is None:
        masks = _masks(4, len(data) // 4)
        more = _minus_long(int.from_bytes(data, "little"), int.from_bytes(wide, "little"), masks)
        return _planes_long(_plus_long(more, masks.lowest * half, masks).to_bytes(len(data), "little"), 4)
    numbers = numpy.frombuffer(data, "<u4")
    more = _scratch.array("turned", numbers)
    numpy.subtract(numbers, numpy.frombuffer(wide, "<u4"), out=more)
    numpy.add(more, _array_of(numpy, 4, half), out=more)
    return _planes(numpy, more)


def put_back(numbers: memoryview, wide: Bytes, kind: int) -> None:
    """Undo `planes_of_remainders`, in place."""
    numpy, half = _numpy(), _HALF_A_STEP[kind]
    if numpy is None:
        masks = _masks(4, len(numbers) // 4)
        less = _minus_long(int.from_bytes(numbers, "little"), masks.lowest * half, masks)
        whole = _plus_long(less, int.from_bytes(wide, "little"), masks)
        numbers[:] = whole.to_bytes(len(numbers), "little")
        return
    array = numpy.frombuffer(numbers, "<u4")
    numpy.add(array, numpy.frombuffer(wide, "<u4"), out=array)
    numpy.subtract(array, _array_of(numpy, 4, half), out=array)


def _join(numpy: Any, planes: Sequence[Any], out: Any, lowest_bits: int = 8) -> None:
    """Write the numbers made of these byte planes to ``out``; the lowest plane has that many bits.

    By halves of numbers, and by shifts that cast: 40 us for 64 Ki numbers of 4 bytes, where shifting whole
    numbers once for each plane takes 49, and writing bytes with a step 76. Without the interpreter's lock.
    """
    half = len(planes) // 2
    low, high = planes[0], planes[-1]
    if half > 1:
        low, high = (_scratch.array(f"{side} {half}", out, half) for side in ("low", "high"))
        _join(numpy, planes[:half], low, lowest_bits)
        _join(numpy, planes[half:], high)
    shift = _array_of(numpy, out.itemsize, 8 * (half - 1) + lowest_bits)
    numpy.left_shift(high, shift, out=out, dtype=out.dtype)
    numpy.bitwise_or(out, low, out=out)


def _planes(numpy: Any, numbers: Any) -> list[Bytes]:
    """Return the byte planes of an array, lowest bytes first; ``numbers`` is changed."""
    # By shifts and casts, which drop the higher bytes: 33 us for 64 Ki numbers of 4 bytes, where slices of the
    # bytes with a step take 73.
    width = numbers.itemsize
    planes = [numbers.astype("u1")]
    for _ in range(1, width):
        numpy.right_shift(numbers, _array_of(numpy, width, 8), out=numbers)
        planes.append(numbers.astype("u1"))
    return [memoryview(plane) for plane in planes]


def _planes_long(numbers: bytes, width: int) -> list[Bytes]:
    return [numbers[at::width] for at in range(width)]


def _wide(body: memoryview, kind: int) -> bytes:
    numpy = _numpy()
    if numpy is not None:
        numbers = numpy.frombuffer(body, "<u2")
        if kind == FLOAT16:
            return bytes(numpy.frombuffer(_wide_halves(), "<u4")[numbers].tobytes())
        return bytes((numbers.astype("<u4") << _array_of(numpy, 4, 16)).tobytes())
    if kind == FLOAT16:
        table = memoryview(_wide_halves())
        return b"".join(table[4 * half : 4 * half + 4] for (half,) in struct.iter_unpack("<H", body))
    wide = bytearray(2 * len(body))
    wide[2::4], wide[3::4] = body[0::2], body[1::2]
    return bytes(wide)


@functools.cache
def _wide_halves() -> bytes:
    """Return every number of IEEE 754's binary16 as binary32, in the order of their bits."""
    return struct.pack("<65536I", *map(_wide_half, range(1 << 16)))


def _wide_half(half: int) -> int:
    sign, exponent, mantissa = half >> 15 << 31, half >> 10 & 31, half & 1023
    if exponent == 31:
        return sign | 255 << 23 | mantissa << 13
    if not exponent:
        if not mantissa:
            return sign
        # Subnormal: normalise the mantissa, because binary32 has the number as a normal one.
        shift = 11 - mantissa.bit_length()
        mantissa, exponent = mantissa << shift & 1023, 1 - shift
    return sign | exponent + 112 << 23 | mantissa << 13


def _turn_back(numpy: Any, numbers: Any, width: int) -> None:
    lowest = _scratch.array("sign", numbers)
    numpy.left_shift(numbers, _array_of(numpy, width, 8 * width - 1), out=lowest)
    numpy.right_shift(numbers, _array_of(numpy, width, 1), out=numbers)
    numpy.bitwise_or(numbers, lowest, out=numbers)


def _turn(numpy: Any, data: Bytes, width: int, purpose: str) -> Any:
    """Return the turned numbers, in the scratch memory for this purpose."""
    numbers = numpy.frombuffer(data, f"<u{width}")
    highest = _scratch.array("highest", numbers)
    numpy.right_shift(numbers, _array_of(numpy, width, 8 * width - 1), out=highest)
    turned = _scratch.array(purpose, numbers)
    numpy.left_shift(numbers, _array_of(numpy, width, 1), out=turned)
    numpy.bitwise_or(turned, highest, out=turned)
    return turned


@functools.cache
def _array_of(numpy: Any, width: int, value: int) -> Any:
    """Return the value as an array of one, not to be written to.

    Scalar promotion differs between versions of NumPy, and some warn on wrap.
    """
    return numpy.array([value], f"<u{width}")


class _Masks(NamedTuple):
    """Bit masks of every number: the lowest bit; all but the highest; the highest."""

    lowest: int
    rest: int
    highest: int


@functools.lru_cache(maxsize=8)
def _masks(width: int, count: int) -> _Masks:
    lowest = int.from_bytes((b"\1" + bytes(width - 1)) * count, "little")
    highest = lowest << (8 * width - 1)
    return _Masks(lowest, highest - lowest, highest)


def _turn_long(data: Bytes, width: int) -> bytes:
    return _turned_long(data, width).to_bytes(len(data), "little")


def _turned_long(data: Bytes, width: int) -> int:
    lowest, rest, _ = _masks(width, len(data) // width)
    all_ = int.from_bytes(data, "little")
    return (all_ & rest) << 1 | all_ >> (8 * width - 1) & lowest


def _turn_back_long(data: Bytes, width: int) -> bytes:
    lowest, rest, _ = _masks(width, len(data) // width)
    all_ = int.from_bytes(data, "little")
    back = all_ >> 1 & rest | (all_ & lowest) << (8 * width - 1)
    return back.to_bytes(len(data), "little")


def _differences_long(data: Bytes, base: Bytes, width: int) -> bytes:
    masks = lowest, rest, _ = _masks(width, len(data) // width)
    change = _minus_long(_turned_long(data, width), _turned_long(base, width), masks)
    sign = change >> (8 * width - 1) & lowest
    folded = (change & rest) << 1 ^ ((sign << 8 * width) - sign)
    return folded.to_bytes(len(data), "little")


def _changed_long(changes: Bytes, turned: Bytes, width: int) -> bytes:
    masks = lowest, rest, _ = _masks(width, len(changes) // width)
    folded = int.from_bytes(changes, "little")
    sign = folded & lowest
    change = folded >> 1 & rest ^ ((sign << 8 * width) - sign)
    return _plus_long(change, int.from_bytes(turned, "little"), masks).to_bytes(len(changes), "little")


def _minus_long(new: int, old: int, masks: _Masks) -> int:
    # No borrow leaves its number: the highest bits are set before and corrected after (Hacker's Delight,
    # 2-18).
    _, rest, highest = masks
    return ((new | highest) - (old & rest)) ^ ((new ^ old ^ highest) & highest)


def _plus_long(one: int, other: int, masks: _Masks) -> int:
    _, rest, highest = masks
    return ((one & rest) + (other & rest)) ^ ((one ^ other) & highest)
