"""An incomplete file of a lazy restore, the name of its hidden link, and pieces of work at it."""

from __future__ import annotations

import errno
import re
import threading
from typing import Final, NamedTuple

from ciuic.types import ChunkId

_NAME: Final = re.compile(rb"([0-9]{10})\.([0-9a-f]{32})\.([0-9]{1,2})\.([0-9]{1,19})\.(-?[0-9]{1,20})")


class PendingName(NamedTuple):
    """Name of a hidden link: everything that is needed to complete the file."""

    number: int
    """Position in the order of the snapshot's tree."""
    content: bytes
    map_height: int
    size_bytes: int
    mtime_ns: int

    def encode(self) -> bytes:
        """Return the name as bytes."""
        return b"%010d.%b.%d.%d.%d" % (
            *(self.number, self.content.hex().encode(), self.map_height),
            *(self.size_bytes, self.mtime_ns),
        )

    @classmethod
    def decode(cls, name: bytes) -> PendingName | None:
        """Decode a name; None for one that is none of ours."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        number, content, height, size, mtime = found.groups()
        return cls(int(number), bytes.fromhex(content.decode()), int(height), int(size), int(mtime))


class PendingFile:
    """An incomplete file. Its fields are guarded by the table's lock."""

    __slots__ = (
        *("cursor", "damaged", "failure", "failures", "filled", "gone", "in_flight", "ino", "io", "left"),
        *("loading", "name", "rank", "segments", "settling", "shape"),
    )

    def __init__(
        self, shape: PendingName, ino: int, n_segments: int, io: threading.Lock, *, is_new: bool
    ) -> None:
        self.shape: Final = shape
        self.name: Final = shape.encode()
        self.ino: Final = ino
        self.io: Final = io
        """Held while a block is written, or the file cut to nothing."""
        self.segments: list[dict[int, ChunkId] | None] = [None] * n_segments
        """Missing blocks of each leaf of the block map; None for a leaf that was not read yet."""
        if is_new and not shape.map_height:
            # The only block, whose id is known.
            self.segments[0] = {0: ChunkId(shape.content)}
        self.left = n_segments
        """Number of segments that have, or may have, missing blocks."""
        self.in_flight: set[int] = set()
        self.loading: set[int] = set()
        self.damaged: dict[int, str] = {}
        """Reason by block that cannot be restored."""
        self.failure = errno.EIO
        self.failures = 0
        """Counter of attempts to fetch something of it that failed."""
        self.rank = 0
        """Position in the order of fetching."""
        self.cursor = 0
        """Block after the last one that was read."""
        self.filled = False
        """All content was written, but is not durable."""
        self.settling = False
        self.gone = False
        """It is incomplete no more."""


class PendingPiece(NamedTuple):
    """A missing block that is to be fetched."""

    file: PendingFile
    block: int
    chunk: ChunkId


class Load(NamedTuple):
    """Leaf of a file's block map that is to be read."""

    file: PendingFile
    segment: int


Work = list[PendingPiece] | Load


def length_of(file: PendingFile, block: int, block_size: int) -> int:
    """Return the number of bytes that a block has."""
    return min(block_size, file.shape.size_bytes - block * block_size)


def begin(file: PendingFile, block: int, segment: dict[int, ChunkId]) -> PendingPiece:
    """Mark a missing block as being fetched, and return it as work."""
    file.in_flight.add(block)
    return PendingPiece(file, block, segment[block])
