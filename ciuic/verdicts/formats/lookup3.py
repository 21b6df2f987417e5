"""Checksum of HDF5's newer structures: lookup3 of Bob Jenkins.

References:
    https://burtleburtle.net/bob/c/lookup3.c (hashlittle)
"""

from __future__ import annotations

from typing import Final

_MASK: Final = 0xFFFFFFFF


def lookup3(data: bytes) -> int:
    """Return the 32-bit hash of some bytes with the initial value 0."""
    a = b = c = (0xDEADBEEF + len(data)) & _MASK
    at = 0
    while len(data) - at > 12:
        x, y, z = _words(data[at : at + 12])
        a, b, c = _mix((a + x) & _MASK, (b + y) & _MASK, (c + z) & _MASK)
        at += 12
    if at == len(data):
        return c
    x, y, z = _words(data[at:].ljust(12, b"\0"))
    return _final((a + x) & _MASK, (b + y) & _MASK, (c + z) & _MASK)


def _words(part: bytes) -> tuple[int, int, int]:
    return tuple(int.from_bytes(part[at : at + 4], "little") for at in (0, 4, 8))  # type: ignore[return-value]


def _turned(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (32 - bits))) & _MASK


def _mix(a: int, b: int, c: int) -> tuple[int, int, int]:
    for bits in (4, 6, 8, 16, 19, 4):
        # The three variables take turns: (a, c), (b, a), (c, b).
        a = ((a - c) & _MASK) ^ _turned(c, bits)
        c = (c + b) & _MASK
        a, b, c = b, c, a
    return a, b, c


def _final(a: int, b: int, c: int) -> int:
    for bits in (14, 11, 25, 16, 4, 14, 24):
        c = ((c ^ b) - _turned(b, bits)) & _MASK
        a, b, c = b, c, a
    # After seven turns of three variables the hash stands in `b`.
    return b
