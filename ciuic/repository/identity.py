"""Ids of chunks and snapshots, and the identity of a repository, which decides the ids of chunks.

An identity says how content becomes the id of its chunk, and where trees have their borders. Repositories with
one identity give equal content equal ids, and can share chunks. Key and seed are secrets: the seed makes ids
differ between repositories, so that somebody who does not know it cannot prepare content that collides. XXH3 is
not a cryptographic hash: docs/format.md says what it and BLAKE3 protect against.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container
from typing import Final, Literal

from ciuic.errors import CiuicError, pip_install
from ciuic.types import CHUNK_ID_BYTES, ChunkId, SnapshotId

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


HashName = Literal["xxh3-128", "blake3-128"]
XXH3: Final = "xxh3-128"
BLAKE3: Final = "blake3-128"
KEY_BYTES: Final = 32


class MissingHash(CiuicError):
    """The package with the hash function of a repository is not installed."""


class Identity:
    """Hash, key and seed of a repository; immutable. May be used from several threads at once."""

    __slots__ = ("chunk_id", "hash", "key", "seed")

    def __init__(self, hash: HashName, key: bytes | None, seed: int) -> None:
        """Make an identity.

        Args:
            hash: Hash that names chunks.
            key: Key of BLAKE3, 32 bytes; None with XXH3.
            seed: 64-bit seed of tree borders; with XXH3 also of chunk ids.

        Raises:
            ValueError: the key does not fit the hash, or the seed is not a number of 64 bits.
            MissingHash: the package `blake3` is needed and not installed.
        """
        if not 0 <= seed < 1 << 64:
            raise ValueError("the seed must be a number of 64 bits")
        if hash != (XXH3 if key is None else BLAKE3) or (key is not None and len(key) != KEY_BYTES):
            raise ValueError(f"blake3-128 takes a key of {KEY_BYTES} bytes and xxh3-128 none, got {hash}")
        self.hash: Final = hash
        self.key: Final = key
        self.seed: Final = seed
        self.chunk_id: Final = _xxh3(seed) if key is None else _blake3(key)
        """Function that returns the id of this content. Releases the interpreter lock while it hashes a block."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self._facts() == other._facts()

    def __hash__(self) -> int:
        return hash(self._facts())

    def __repr__(self) -> str:
        # Without key and seed, which are secrets.
        return f"Identity({self.hash!r})"

    def _facts(self) -> tuple[HashName, bytes | None, int]:
        return self.hash, self.key, self.seed


# Functions made once for each identity, not a method that chooses: ids of small chunks are asked for by the
# thousand, and one call more took a fifth of their time.
def _xxh3(seed: int) -> Callable[[Bytes], ChunkId]:
    # Only here: `ciuic list` imports this module and hashes nothing.
    import xxhash

    def chunk_id(data: Bytes) -> ChunkId:
        return xxhash.xxh3_128_digest(data, seed=seed)  # type: ignore[return-value]

    return chunk_id


def _blake3(key: bytes) -> Callable[[Bytes], ChunkId]:
    try:
        # Only here: a repository without a remote needs no such package.
        from blake3 import blake3
    except ImportError:
        raise MissingHash(
            "chunks of this repository are named by BLAKE3, and the package blake3 is not installed",
            hint=pip_install(),
        ) from None

    def chunk_id(data: Bytes) -> ChunkId:
        try:
            # One thread: callers hash in several threads of their own, beside a job that needs the processors.
            return blake3(data, key=key).digest(CHUNK_ID_BYTES)  # type: ignore[return-value]
        except BufferError:
            # BLAKE3 takes no memory of other items than bytes.
            return blake3(memoryview(data).cast("B"), key=key).digest(CHUNK_ID_BYTES)  # type: ignore[return-value]

    return chunk_id
