"""Runs of blocks of a file: merge them, and read their bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator


def read_all(fd: int, offset: int, length: int) -> list[bytes]:
    """Read a range; return less where the file ends now."""
    parts: list[bytes] = []
    have = 0
    # pread(2) may return less than was asked for. The parts are joined once, by the caller: most reads have
    # one.
    while have < length and (part := os.pread(fd, length - have, offset + have)):
        parts.append(part)
        have += len(part)
    return parts


def united(runs: list[tuple[int, int]], blocks: int) -> Iterator[tuple[int, int]]:
    """Yield the same blocks, below `blocks`, as maximal runs (first, stop) in order."""
    start = end = 0
    for first, stop in sorted(runs):
        stop = min(stop, blocks)
        if first >= stop:
            continue
        if first > end:
            if end > start:
                yield start, end
            start, end = first, stop
        elif start == end:
            start, end = first, stop
        else:
            end = max(end, stop)
    if end > start:
        yield start, end
