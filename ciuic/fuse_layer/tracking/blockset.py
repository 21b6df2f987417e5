"""Sets of block numbers as growing bitmaps: exact, and 32 KiB for 64 GiB of file at 256 KiB a block.

Pure arithmetic. The serialised form is the bitmap itself: block ``b`` is bit ``b & 7`` (low bit first) of
byte ``b >> 3``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_BLOCKS = 1 << 26
"""Limit of block numbers: 8 MiB of bitmap, 16 TiB of file at 256 KiB a block. truncate(2) gives any user a
file of exabytes in a moment; a change beyond the limit is marked as one of the whole file."""
_SAME_BYTES = re.compile(rb"\x00+|\xff+|.", re.DOTALL)


class BlockSet:
    """A set of non-negative block numbers."""

    __slots__ = ("_bits",)

    def __init__(self, bitmap: bytes = b"") -> None:
        self._bits = bytearray(bitmap)

    def __contains__(self, block: int) -> bool:
        index = block >> 3
        return index < len(self._bits) and bool(self._bits[index] >> (block & 7) & 1)

    def __len__(self) -> int:
        return int.from_bytes(self._bits, "little").bit_count()

    def __iter__(self) -> Iterator[int]:
        for index, byte in enumerate(self._bits):
            if byte:
                for bit in range(8):
                    if byte >> bit & 1:
                        yield index << 3 | bit

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockSet) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        raise TypeError("BlockSet is mutable and has no hash")

    def to_bytes(self) -> bytes:
        """Return the bitmap without trailing zeros."""
        return bytes(self._bits).rstrip(b"\0")

    def add_range(self, first: int, count: int) -> None:
        """Add ``count`` blocks from ``first``."""
        if count <= 0:
            return
        end = first + count
        bits = self._bits
        if len(bits) << 3 < end:
            bits.extend(bytes(((end + 7) >> 3) - len(bits)))
        low, high = first >> 3, (end - 1) >> 3
        low_mask, high_mask = 0xFF << (first & 7) & 0xFF, 0xFF >> (7 - (end - 1 & 7))
        if low == high:
            bits[low] |= low_mask & high_mask
            return
        bits[low] |= low_mask
        bits[high] |= high_mask
        bits[low + 1 : high] = b"\xff" * (high - low - 1)

    def update(self, other: BlockSet) -> None:
        """Add every block of ``other``."""
        # As two integers: one operation in C for the whole bitmap.
        size = max(len(self._bits), len(other._bits))
        union = int.from_bytes(self._bits, "little") | int.from_bytes(other._bits, "little")
        self._bits[:] = union.to_bytes(size, "little")

    def missing_runs(self, first: int, count: int) -> list[tuple[int, int]]:
        """Return the maximal runs (first, count) of [first, first + count) that are not in the set, in order."""
        runs: list[tuple[int, int]] = []
        start: int | None = None
        end = first + count
        known = max(first, min(end, len(self._bits) << 3))
        # Runs of equal bytes at once, block by block only in mixed ones: a file of exabytes has one run.
        for found in _SAME_BYTES.finditer(self._bits, first >> 3, (known + 7) >> 3) if known > first else ():
            low, high = max(found.start() << 3, first), min(found.end() << 3, known)
            is_uniform = self._bits[found.start()] in (0, 0xFF)
            for block in (low,) if is_uniform else range(low, high):
                if block not in self:
                    start = block if start is None else start
                elif start is not None:
                    runs.append((start, block - start))
                    start = None
        if start is None and known < end:
            start = known
        if start is not None:
            runs.append((start, end - start))
        return runs


def blocks_of(offset: int, length: int, block_size: int) -> tuple[int, int]:
    """Return the first block and the number of blocks that a byte range touches; (first, 0) for an empty range."""
    first = offset // block_size
    if length <= 0:
        return first, 0
    return first, (offset + length - 1) // block_size - first + 1
