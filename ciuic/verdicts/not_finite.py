"""Count of the numbers that are not finite, from the bytes of floating tensors: some hundred MB in a second, without NumPy.

Not counted is what programs mean by it: an infinity that is all of a tensor (how the best score of a training begins), and those of a tensor
that has none but negative ones (a mask of attention). A storage of torch counts whole, also what no tensor shows of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from ciuic.verdicts.model import Numbers, ReadRange

MAX_FILE_BYTES: Final = 256 << 20
"""Limit of what is read of one file, as of what is read to compare checksums: half a second of a processor."""
_STEP_BYTES: Final = 64 << 10
"""Bytes per read: several fit into the caches of a processor."""


class _Kind(NamedTuple):
    size: int
    least: int
    """Smallest number, without its sign, that is not finite; NaN are greater, or begin here where there is no infinity."""
    has_infinity: bool = True


KINDS: Final = {
    "F64": _Kind(8, 0x7FF << 52),
    "F32": _Kind(4, 0xFF << 23),
    "BF16": _Kind(2, 0xFF << 7),
    "F16": _Kind(2, 0x1F << 10),
    "F8_E5M2": _Kind(1, 0x1F << 2),
    "F8_E4M3": _Kind(1, 0x7F, has_infinity=False),
}
"""Kinds of numbers that are counted, by their names in safetensors."""


class NumberBudget:
    """Bytes of numbers that may still be read, of all files together."""

    def __init__(self, left_bytes: int, file_bytes: int = MAX_FILE_BYTES) -> None:
        self.left_bytes = left_bytes
        self.file_bytes = file_bytes


def count_not_finite(read: ReadRange, ranges: Iterable[Numbers], budget: NumberBudget) -> int | None:
    """Return how many numbers in these ranges of a file are not finite, as far as the budget goes; None if it ends before the first.

    Raises:
        Damaged: the repository cannot give them.
        OSError: the disk failed.
    """
    left_bytes = min(budget.file_bytes, budget.left_bytes)
    total, is_whole = 0, True
    for one in ranges:
        stop = min(one.stop, one.start + left_bytes)
        is_whole = is_whole and stop == one.stop
        total += _count(read, one._replace(stop=stop), is_only=one.stop - one.start == KINDS[one.kind].size)
        left_bytes -= stop - one.start
        budget.left_bytes -= stop - one.start
    return total if total or is_whole else None


def _count(read: ReadRange, numbers: Numbers, *, is_only: bool) -> int:
    size, least, has_infinity = KINDS[numbers.kind]
    bits = 8 * size
    sign = 1 << bits - 1
    order: Literal["big", "little"] = "big" if numbers.is_big_endian else "little"
    found = nan = negative = 0
    length = magnitude = reach = reach_nan = signs = 0
    for start in range(numbers.start, numbers.stop, _STEP_BYTES):
        data = read(start, min(_STEP_BYTES, numbers.stop - start))
        data = data[: len(data) // size * size]
        if len(data) != length:
            length = len(data)
            # A one at the lowest bit of each number.
            every = int.from_bytes((b"\1" + bytes(size - 1)) * (length // size), "little")
            magnitude, signs = every * (sign - 1), every * sign
            reach, reach_nan = every * (sign - least), every * (sign - least - has_infinity)
        values = int.from_bytes(data, order)
        magnitudes = values & magnitude
        # The sum reaches the sign of its own number, and no further, from `least` on.
        odd = magnitudes + reach & signs
        if odd:
            found += odd.bit_count()
            negative += (odd & values).bit_count()
            nan += (magnitudes + reach_nan & signs).bit_count()
    if not nan and (is_only or negative == found):
        return 0
    return found
