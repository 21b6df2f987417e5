"""Find numbers that a state has in 32 bits (*masters*) and rounded to 16 bits (*half-precision copies*).

Mixed precision trains weights of bfloat16 or float16 and keeps them in float32 in the optimizer. Either one
says all that the other does but for the bits that rounding takes. So masters may be stored as these bits, and
copies by themselves. This way and not the other, because what a block of masters needs lies in one block of
its copy, while a block of the copy would need three of its masters; both ways take the same space.

Guarantees: the content comes back the same whichever pairs are found. Where no file has numbers of 16 bits
nothing is examined; otherwise a few numbers of each file that could belong to a pair.

References:
    docs/decisions/masters-beside-twins.md
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from ciuic.repository.codecs import codec
from ciuic.repository.codecs.byte_planes import Widening
from ciuic.repository.codecs.byte_planes_math import BFLOAT16, FLOAT16
from ciuic.training.format.layout import OWN_FILE_BYTES, decode_header
from ciuic.training.protocol.messages import ManifestFile
from ciuic.types import ChunkId

# Numbers compared before a pair is tried as a whole: many tensors have one shape, and only one of them is the
# copy.
_SAMPLES: Final = 32
_KINDS: Final = {"BF16": BFLOAT16, "F16": FLOAT16}
_Fingerprint = tuple[int, int, tuple[int, ...]]
"""Kind of half precision, count of numbers, and a sample of them in 16 bits."""


class HalfPrecisionCopy(NamedTuple):
    """File with the same numbers in 16 bits, and its position relative to the masters."""

    path: str
    kind: int
    shift_bytes: int
    """Offset of a number in the copy minus half its offset in the masters' file."""

    def of_block(self, number: int, block_size: int, stored: Mapping[int, ChunkId]) -> codec.TwinBase | None:
        """Return the block of the copy on which a block of masters may rest; None if it was not stored.

        The block with most of the numbers is taken, or the one before it.

        Args:
            number: number of the masters' block.
            block_size: size of a block.
            stored: blocks of the copy.
        """
        start = number * block_size // 2 + self.shift_bytes
        # A block of masters has numbers of half a block of the copy, which may lie across two blocks.
        for at in ((start + block_size // 4) // block_size, start // block_size):
            if at in stored:
                return codec.TwinBase(stored[at], Widening(self.kind, (start - at * block_size) // 2))
        return None


class _Numbers(NamedTuple):
    """Content of a file that holds one tensor."""

    dtype: str
    start: int
    """Offset of the data in the file."""
    data: memoryview


def find_copies(files: Sequence[ManifestFile], memory: memoryview) -> dict[str, HalfPrecisionCopy]:
    """Return the half-precision copy of each file of masters, by the masters' path."""
    narrow = [
        (file, numbers)
        for file in files
        if file.width == 2
        and (numbers := _read_numbers(file, memory)) is not None
        and numbers.dtype in _KINDS
    ]
    if not narrow:
        return {}
    # Masters have twice the length of a copy: no header of another file is decoded.
    lengths = {2 * len(numbers.data) for _, numbers in narrow}
    by_fingerprint: dict[_Fingerprint, tuple[ManifestFile, _Numbers]] = {}
    for file, numbers in narrow:
        # The first of several equal files: each has the same numbers.
        by_fingerprint.setdefault(_copy_fingerprint(numbers), (file, numbers))
    twins = {}
    for file in files:
        masters = _read_numbers(file, memory, lengths) if file.width == 4 else None
        if masters is None or masters.dtype != "F32":
            continue
        for fingerprint in _master_fingerprints(masters):
            # A sample of zeros matches every other tensor of zeros, and says nothing.
            if fingerprint in by_fingerprint and any(fingerprint[2]):
                other, numbers = by_fingerprint[fingerprint]
                shift_bytes = numbers.start - masters.start // 2
                # Both must be aligned to their numbers: blocks are taken apart as whole numbers.
                if masters.start % 4 == shift_bytes % 2 == 0:
                    twins[file.path] = HalfPrecisionCopy(other.path, fingerprint[0], shift_bytes)
    return twins


def order_masters_last(
    files: Sequence[ManifestFile], twins: Mapping[str, HalfPrecisionCopy]
) -> list[ManifestFile]:
    """Return the files with each file of masters right after its copy, on which it may rest."""
    if not twins:
        return list(files)
    masters: dict[str, list[ManifestFile]] = {}
    for file in files:
        if file.path in twins:
            masters.setdefault(twins[file.path].path, []).append(file)
    ordered = []
    for file in files:
        if file.path not in twins:
            ordered += [file, *masters.get(file.path, ())]
    return ordered


def _read_numbers(
    file: ManifestFile, memory: memoryview, lengths: Iterable[int] | None = None
) -> _Numbers | None:
    """Return the tensor of a file; None unless the file is one large tensor.

    Args:
        file: position of the file in `memory`.
        memory: the arena.
        lengths: lengths in bytes that are of interest; None for all.
    """
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


def _copy_fingerprint(numbers: _Numbers) -> _Fingerprint:
    """Return the fingerprint of numbers of 16 bits."""
    return _KINDS[numbers.dtype], len(numbers.data) // 2, _sample(numbers.data, "<H")


def _master_fingerprints(numbers: _Numbers) -> list[_Fingerprint]:
    """Return the fingerprints that copies of these numbers would have, one per kind of half precision."""
    some = _sample(numbers.data, "<I")
    count = len(numbers.data) // 4
    return [
        (BFLOAT16, count, tuple(map(_as_bfloat16, some))),
        (FLOAT16, count, tuple(map(_as_float16, some))),
    ]


def _sample(data: memoryview, format_: str) -> tuple[int, ...]:
    """Return numbers at evenly spaced positions; the positions depend on the count of numbers only."""
    width = struct.calcsize(format_)
    count = len(data) // width
    places = (count * part // _SAMPLES for part in range(_SAMPLES))
    return tuple(struct.unpack_from(format_, data, place * width)[0] for place in places)


def _as_bfloat16(bits: int) -> int:
    """Round the bits of a float32 to the nearest bfloat16, ties to even."""
    # Adding half a unit less one, plus the lowest bit kept, rounds ties to even; a carry may run into the
    # exponent, as rounding up to the next power of two requires.
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16 & 0xFFFF


def _as_float16(bits: int) -> int:
    """Round the bits of a float32 to the nearest float16, ties to even; overflow gives infinity."""
    try:
        half = struct.pack("<e", struct.unpack("<f", struct.pack("<I", bits))[0])
    except OverflowError:
        return bits >> 31 << 15 | 0x7C00
    return int(struct.unpack("<H", half)[0])
