"""Ranges of bytes: merge those that lie close together into fewer requests."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from ciuic.repository.ids import Bytes

MERGE_GAP_BYTES = 256 << 10
"""Bytes that are read in vain sooner than another request is made: 10 ms of a stream of 25 MiB/s."""
MAX_MERGED_BYTES = 16 << 20
"""Largest merged read. Longer ranges stay as they are."""


def merge_ranges(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return fewer (offset, length) that cover all of ``ranges``, ascending by offset.

    Every range lies whole in one of the results. Empty ranges are left out.

    Raises:
        ValueError: an offset or a length is negative.
    """
    merged: list[tuple[int, int]] = []
    for offset, length in sorted(ranges):
        if offset < 0 or length < 0:
            raise ValueError(f"not a range of bytes: offset {offset}, length {length}")
        if not length:
            continue
        if merged:
            start, size = merged[-1]
            end = max(start + size, offset + length)
            near = offset <= start + size + MERGE_GAP_BYTES and end - start <= MAX_MERGED_BYTES
            # What lies inside is merged at any size.
            if near or offset + length <= start + size:
                merged[-1] = (start, end - start)
                continue
        merged.append((offset, length))
    return merged


def slices_of(
    merged: Sequence[tuple[int, int]], bodies: Sequence[memoryview], ranges: Sequence[tuple[int, int]]
) -> list[Bytes]:
    """Return each range as a view of a body.

    Args:
        merged: what `merge_ranges` made of ``ranges``.
        bodies: bytes of each of these; shorter where the object ended.
        ranges: what is wanted.
    """
    starts = [start for start, _ in merged]
    found: list[Bytes] = []
    for offset, length in ranges:
        # The last one that begins at or before a range contains it: it was merged into that one, or began it.
        at = bisect_right(starts, offset) - 1
        found.append(bodies[at][offset - starts[at] :][:length] if length else b"")
    return found
