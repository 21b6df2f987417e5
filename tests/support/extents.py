"""Extents of files on the disk, and which of them are shared (FIEMAP)."""

from __future__ import annotations

import fcntl
import struct
from pathlib import Path

_FIEMAP = 0xC020660B
_SHARED = 0x2000


def shared_extents(path: Path) -> list[tuple[int, int]]:
    """Return (physical offset, length) of the file's extents that other files share."""
    return extents(path, _SHARED)


def extents(path: Path, flag: int = 0) -> list[tuple[int, int]]:
    """Return (physical offset, length) of all extents with this flag, or of all."""
    found, start = [], 0
    with path.open("rb") as file:
        while True:
            head = struct.pack("=QQIIII", start, 1 << 62, 1, 0, 64, 0)
            reply = bytearray(head + bytes(64 * 56))
            fcntl.ioctl(file.fileno(), _FIEMAP, reply)
            count = struct.unpack_from("=I", reply, 20)[0]
            for at in range(count):
                logical, physical, length, _, _, flags = struct.unpack_from("=QQQQQI", reply, 32 + at * 56)
                start = logical + length
                if flags & flag == flag:
                    found.append((physical, length))
            if count < 64:
                return found


def overlap_bytes(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> int:
    return sum(
        max(0, min(a + length_a, b + length_b) - max(a, b)) for a, length_a in one for b, length_b in other
    )
