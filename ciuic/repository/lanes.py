"""Arithmetic on many numbers of 2, 4 or 8 bytes at once, for the transformations of `planes`.

Guarantees: the same bytes with NumPy and without. With it a gigabyte takes about a tenth of a second for each step; without it Python's
long integers carry all numbers side by side, at some 100 MB/s.

A *turned* number is one whose bits are rotated to the left by one: the sign of a floating-point number comes to lie lowest, and the
exponent is alone in the highest byte (float32) or begins there. Data and base are as long as each other and multiples of the width.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ciuic.repository.ids import Bytes

WIDTHS: Final = (2, 4, 8)


@functools.cache
def _numpy() -> Any:
    """The module, or None: imported when it is first needed, for it takes a tenth of a second."""
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def turned(data: Bytes, width: int) -> bytes:
    """Every number turned."""
    numpy = _numpy()
    return bytes(_turn_long(data, width)) if numpy is None else _turn(numpy, data, width).tobytes()


def joined(planes: Sequence[Bytes], width: int) -> bytearray:
    """The numbers of which these are the bytes: all lowest ones first."""
    numpy = _numpy()
    data = bytearray(len(planes[0]) * width)
    if numpy is None:
        for place, plane in enumerate(planes):
            data[place::width] = plane
        return data
    numbers = numpy.frombuffer(data, f"<u{width}")
    numpy.copyto(numbers, numpy.frombuffer(planes[-1], "u1"))
    for plane in reversed(planes[:-1]):
        numpy.left_shift(numbers, _of(numpy, width, 8), out=numbers)
        numpy.bitwise_or(numbers, numpy.frombuffer(plane, "u1"), out=numbers)
    return data


def turn_back(data: bytearray, width: int) -> None:
    """The inverse of `turned`, in place."""
    numpy = _numpy()
    if numpy is None:
        data[:] = _turn_back_long(data, width)
    else:
        _turn_back(numpy, numpy.frombuffer(data, f"<u{width}"), width)


def differences(data: Bytes, base: Bytes, width: int) -> bytes:
    """How each turned number differs from the one at the same place of ``base``, small ones of either sign as small numbers."""
    numpy = _numpy()
    if numpy is None:
        return _differences_long(data, base, width)
    change = _turn(numpy, data, width) - _turn(numpy, base, width)
    sign = (change.view(f"<i{width}") >> (8 * width - 1)).view(change.dtype)
    return bytes((change << _of(numpy, width, 1) ^ sign).tobytes())


def undo(changes: bytearray, base: Bytes, width: int) -> None:
    """Makes the data of it again of which `differences` made this, in place."""
    numpy = _numpy()
    if numpy is None:
        changes[:] = _undone_long(changes, base, width)
        return
    numbers = numpy.frombuffer(changes, f"<u{width}")
    one = _of(numpy, width, 1)
    sign = numbers & one
    numpy.negative(sign, out=sign)
    numpy.right_shift(numbers, one, out=numbers)
    numpy.bitwise_xor(numbers, sign, out=numbers)
    numpy.add(numbers, _turn(numpy, base, width), out=numbers)
    _turn_back(numpy, numbers, width)


def _turn_back(numpy: Any, numbers: Any, width: int) -> None:
    lowest = numbers << _of(numpy, width, 8 * width - 1)
    numpy.right_shift(numbers, _of(numpy, width, 1), out=numbers)
    numpy.bitwise_or(numbers, lowest, out=numbers)


def _turn(numpy: Any, data: Bytes, width: int) -> Any:
    numbers = numpy.frombuffer(data, f"<u{width}")
    return numbers << _of(numpy, width, 1) | numbers >> _of(numpy, width, 8 * width - 1)


def _of(numpy: Any, width: int, value: int) -> Any:
    """As an array of one: what a scalar would become differs between versions of NumPy, and some warn when it wraps."""
    return numpy.array([value], f"<u{width}")


class _Masks(NamedTuple):
    """In every number: the lowest bit; all but the highest; the highest."""

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
    lowest, rest, highest = _masks(width, len(data) // width)
    new, old = _turned_long(data, width), _turned_long(base, width)
    # No borrow leaves its number: the highest bits are set before, and put right after (Hacker's Delight, 2-18).
    change = ((new | highest) - (old & rest)) ^ ((new ^ old ^ highest) & highest)
    sign = change >> (8 * width - 1) & lowest
    folded = (change & rest) << 1 ^ ((sign << 8 * width) - sign)
    return folded.to_bytes(len(data), "little")


def _undone_long(changes: Bytes, base: Bytes, width: int) -> bytes:
    lowest, rest, highest = _masks(width, len(changes) // width)
    folded, old = int.from_bytes(changes, "little"), _turned_long(base, width)
    sign = folded & lowest
    change = folded >> 1 & rest ^ ((sign << 8 * width) - sign)
    new = ((change & rest) + (old & rest)) ^ ((change ^ old) & highest)
    return _turn_back_long(new.to_bytes(len(changes), "little"), width)
