"""Numbers that a state has twice: in 32 bits (*masters*), and rounded to 16 (their *twins*).

Mixed precision trains weights of bfloat16 or float16 and keeps them in float32 beside, in the optimizer. One of the two says all that the other does
but for the bits that rounding takes: so masters may be stored as these bits, twins by themselves. This and not the other way round, because what a block of
masters needs lies in one block of its twin, and of a twin in three of its masters; both ways take the same.

Guarantees: none for the content, which comes back the same whichever pairs are found. Where no file has numbers of 16 bits nothing is looked at; else
a few numbers of each that could be one of a pair.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from ciuic.repository import coding
from ciuic.repository.lanes import BFLOAT16, FLOAT16
from ciuic.repository.planes import Widening
from ciuic.training.layout import OWN_FILE_BYTES, decode_header
from ciuic.training.messages import File
from ciuic.types import ChunkId

_SAMPLES: Final = 32
"""Numbers of each that are compared before the whole is tried: tensors of one shape are many, and only one of them is the twin."""
_KINDS: Final = {"BF16": BFLOAT16, "F16": FLOAT16}
_Print = tuple[int, int, tuple[int, ...]]
"""Kind, how many numbers, and a few of them in 16 bits."""


class Twin(NamedTuple):
    """The file with the same numbers in 16 bits, and how they lie to each other."""

    path: str
    kind: int
    ahead_bytes: int
    """Of a number in there against half of where it is in the masters' file."""

    def of_block(self, number: int, block_size: int, stored: Mapping[int, ChunkId]) -> coding.Twin | None:
        """What this block of the masters may rest on. ``stored``: the blocks of the twin. The one that has most of its numbers, or the one
        before."""
        start = number * block_size // 2 + self.ahead_bytes
        for at in ((start + block_size // 4) // block_size, start // block_size):
            if at in stored:
                return coding.Twin(stored[at], Widening(self.kind, (start - at * block_size) // 2))
        return None


class _Numbers(NamedTuple):
    """A file that is one tensor."""

    dtype: str
    start: int
    """From the beginning of the file."""
    data: memoryview


def found_among(files: Sequence[File], memory: memoryview) -> dict[str, Twin]:
    """Of masters, by their paths."""
    narrow = [
        (file, numbers)
        for file in files
        if file.width == 2 and (numbers := _numbers(file, memory)) is not None and numbers.dtype in _KINDS
    ]
    if not narrow:
        return {}
    lengths = {2 * len(numbers.data) for _, numbers in narrow}
    printed: dict[_Print, tuple[File, _Numbers]] = {}
    for file, numbers in narrow:
        printed.setdefault(_print_of_narrow(numbers), (file, numbers))
    twins = {}
    for file in files:
        masters = _numbers(file, memory, lengths) if file.width == 4 else None
        if masters is None or masters.dtype != "F32":
            continue
        for print_ in _prints_of_wide(masters):
            if print_ in printed and any(print_[2]):
                other, numbers = printed[print_]
                ahead_bytes = numbers.start - masters.start // 2
                if masters.start % 4 == ahead_bytes % 2 == 0:
                    twins[file.path] = Twin(other.path, print_[0], ahead_bytes)
    return twins


def with_masters_behind(files: Sequence[File], twins: Mapping[str, Twin]) -> list[File]:
    """As they are, but for masters, each of which comes after its twin: it may rest on that."""
    if not twins:
        return list(files)
    masters: dict[str, list[File]] = {}
    for file in files:
        if file.path in twins:
            masters.setdefault(twins[file.path].path, []).append(file)
    ordered = []
    for file in files:
        if file.path not in twins:
            ordered += [file, *masters.get(file.path, ())]
    return ordered


def _numbers(file: File, memory: memoryview, lengths: Iterable[int] | None = None) -> _Numbers | None:
    """None unless it is one large tensor. ``lengths``: in bytes, of those that are of interest."""
    if file.size_bytes < OWN_FILE_BYTES:
        return None
    content = memory[file.offset : file.offset + file.size_bytes]
    start = 8 + int.from_bytes(content[:8], "little")
    if (
        len(content) != file.size_bytes
        or start > len(content)
        or (lengths is not None and len(content) - start not in lengths)
    ):
        return None
    try:
        found = decode_header(bytes(content[:start]), file.size_bytes)
    except ValueError:
        return None
    if isinstance(found, int) or len(found) != 1:
        return None
    tensor = next(iter(found.values()))
    data = content[tensor.start : tensor.stop]
    return _Numbers(tensor.dtype, tensor.start, data) if len(data) >= 4 * _SAMPLES else None


def _print_of_narrow(numbers: _Numbers) -> _Print:
    return _KINDS[numbers.dtype], len(numbers.data) // 2, _some(numbers.data, "<H")


def _prints_of_wide(numbers: _Numbers) -> list[_Print]:
    some = _some(numbers.data, "<I")
    count = len(numbers.data) // 4
    return [
        (BFLOAT16, count, tuple(map(_as_bfloat16, some))),
        (FLOAT16, count, tuple(map(_as_float16, some))),
    ]


def _some(data: memoryview, format_: str) -> tuple[int, ...]:
    """As many of any data, at the same places of as many numbers."""
    width = struct.calcsize(format_)
    count = len(data) // width
    places = (count * part // _SAMPLES for part in range(_SAMPLES))
    return tuple(struct.unpack_from(format_, data, place * width)[0] for place in places)


def _as_bfloat16(bits: int) -> int:
    """To the nearest, of two to the even one."""
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16 & 0xFFFF


def _as_float16(bits: int) -> int:
    try:
        half = struct.pack("<e", struct.unpack("<f", struct.pack("<I", bits))[0])
    except OverflowError:
        return bits >> 31 << 15 | 0x7C00
    return int(struct.unpack("<H", half)[0])
