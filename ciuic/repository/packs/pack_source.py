"""Protocols of what readers of chunks read from: packs of a directory, or of something else, and their lookup.

Guarantees: every read names the records that it is for. So a source may keep records in another form than a
pack of a directory, for instance each sealed by itself; and it need not be right, because readers check all
content against its id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from ciuic.repository.model import ChunkLocation


class Finder(Protocol):
    """Lookup of chunks."""

    def find(self, chunk: bytes) -> list[ChunkLocation]:
        """Return known copies, the best first."""

    def search(self, chunk: bytes, failed: list[ChunkLocation]) -> list[ChunkLocation]:
        """Search harder, after `find` gave nothing good. May return the failed ones again."""


class ManyFinder(Protocol):
    """Lookup of many chunks at once."""

    def find_many(self, chunks: Sequence[bytes]) -> dict[bytes, ChunkLocation]:
        """Return the copy to read first for each chunk that is known."""


class ChunkLookup(Finder, ManyFinder, Protocol):
    """Lookup of one open repository, for one thread."""


class PackSource(Protocol):
    """Stored bytes of packs, for one thread.

    A pack has any number that the lookup gives. Every method raises NotFound when the pack is gone, and
    OSError when a record cannot be read: with one of `READ_ERRORS` (EBADMSG where a seal does not open),
    readers go on to another copy.
    """

    def read(self, number: int, offset: int, length: int) -> bytes:
        """Return the stored bytes of the record at this offset; fewer where the pack ends before its end."""

    def read_run(self, number: int, records: Iterable[ChunkLocation], start: int, target: memoryview) -> int:
        """Read neighbouring records: the byte at ``start`` + n of the pack to the n-th of the target.

        Between records the target may get any bytes. Returns how much of the target is read, less than all
        only where the pack ends before. Records are in order of position and may overlap.
        """

    def read_scattered(self, number: int, records: Sequence[tuple[ChunkLocation, memoryview]]) -> None:
        """Read neighbouring records, each into its target, as far as the pack goes.

        Records are in order of position and do not overlap. A target is as long as its record.
        """

    def will_need(self, number: int, offset: int, length: int) -> None:
        """Begin to read a range, which reads of its records follow. Only advice."""

    def descriptor(self, number: int) -> int:
        """Return a descriptor of the file that has the pack's records at their offsets, to share its extents.

        Raises:
            NotFound: the pack is gone, or is no such file.
        """
