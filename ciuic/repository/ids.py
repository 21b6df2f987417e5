"""Chunk ids and snapshot ids.

The seed makes ids differ between repositories, so that somebody who does not know it cannot prepare content
that collides. XXH3 is not a cryptographic hash: docs/format.md says what that does and does not protect
against.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container

from ciuic.types import SnapshotId

Bytes = bytes | bytearray | memoryview

# One buffer of zeros for all comparisons, which take pieces of this size.
_ZEROS = memoryview(bytes(1 << 20))


def is_zero(data: Bytes) -> bool:
    """Return whether every byte is zero, as in a block that is recorded as HOLE. True for empty data."""
    view = memoryview(data).cast("B")
    # One byte first: most blocks that are not zero end here.
    if len(view) and view[0]:
        return False
    words = len(view) // 8 * 8
    return _equals_zeros(view[:words].cast("Q"), _ZEROS.cast("Q")) and _equals_zeros(view[words:], _ZEROS)


def _equals_zeros(view: memoryview, zeros: memoryview) -> bool:
    """Return whether the view is zero, compared item by item: 10 GB/s by eight bytes, 1.3 by one."""
    step = len(zeros)
    return all(view[at : at + step] == zeros[: min(step, len(view) - at)] for at in range(0, len(view), step))


# os.urandom and not `secrets`, which does the same and imports hmac and OpenSSL: several milliseconds of a
# command.
def new_snapshot_id(
    taken: Container[str] = (), *, random_hex: Callable[[int], str] = lambda size: os.urandom(size).hex()
) -> SnapshotId:
    """Return an id that is not in ``taken``: 6 hexadecimal digits, 2 more after every four collisions."""
    size_bytes = 3
    while True:
        for _ in range(4):
            candidate = f"cs-{random_hex(size_bytes)}"
            if candidate not in taken:
                return SnapshotId.parse(candidate)
        # 32 digits are the longest id.
        size_bytes = min(size_bytes + 1, 16)
