"""Order in which a lazy restore fetches what no reader waits for.

Files that are being read come first, from where they are read; then files of one block, in the order of the tree, because packs have
them side by side; then the newest. Its caller guards it by a lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ciuic.lazy.pending_file import Load, PendingFile, PendingPiece, Work, begin, length_of
from ciuic.repository.trees.block_maps import FANOUT
from ciuic.types import ChunkId

MAX_BATCH_FILES: Final = 48
MAX_BATCH_BYTES: Final = 8 << 20
MAX_BATCH_BLOCKS: Final = 128


class FetchOrder:
    """The order of one restore."""

    def __init__(self, block_size: int) -> None:
        self.block_size: Final = block_size
        self._hot: dict[int, PendingFile] = {}
        """Files that are being read; the last one was read last."""
        self._order: list[PendingFile] = []
        self._next = 0

    def put(self, files: Iterable[PendingFile]) -> None:
        """Take up all files."""
        known = list(files)
        # Files of one block are configuration and scripts, and a job reads them first.
        small = [file for file in known if file.shape.size_bytes <= self.block_size]
        large = [file for file in known if file.shape.size_bytes > self.block_size]
        small.sort(key=lambda file: file.shape.number)
        large.sort(key=lambda file: (-file.shape.mtime_ns, file.shape.number))
        self._order, self._next = small + large, 0
        for rank, file in enumerate(self._order):
            file.rank = rank

    def is_read(self, file: PendingFile, cursor: int) -> None:
        """Put a file first that is being read, up to the block ``cursor``."""
        if not file.gone:
            self._hot.pop(file.ino, None)
            self._hot[file.ino] = file
            file.cursor = cursor

    def forget(self, file: PendingFile) -> None:
        """Take out a file of which nothing is left to fetch."""
        self._hot.pop(file.ino, None)

    def again(self, file: PendingFile) -> None:
        """Look at a file again: some of it can be fetched now."""
        self._next = min(self._next, file.rank)

    def next(self) -> Work | None:
        """Return what is to be fetched now where no reader waits; None if nothing is left to begin."""
        for file in reversed(list(self._hot.values())):
            work = self._batch_of(file, file.cursor)
            if work is None and not file.in_flight and not file.loading:
                # Nothing of it is left; it is taken up again if a fetch fails.
                self._hot.pop(file.ino, None)
            if work is not None:
                return work
        return self._in_order()

    def _in_order(self) -> Work | None:
        batch: list[PendingPiece] = []
        size_bytes = files = 0
        # What failed is put back, so the order is gone through until nothing is left.
        while self._next < len(self._order):
            file = self._order[self._next]
            if file.gone or file.filled:
                self._next += 1
                continue
            work = self._batch_of(file, 0, MAX_BATCH_BYTES - size_bytes, MAX_BATCH_BLOCKS - len(batch))
            if work is None:
                self._next += 1
            elif isinstance(work, Load):
                if not batch:
                    return work
                file.loading.discard(work.segment)
                return batch
            else:
                batch += work
                files += 1
                size_bytes += sum(length_of(piece.file, piece.block, self.block_size) for piece in work)
                if (
                    size_bytes >= MAX_BATCH_BYTES
                    or len(batch) >= MAX_BATCH_BLOCKS
                    or files >= MAX_BATCH_FILES
                ):
                    break
        return batch or None

    def _batch_of(
        self,
        file: PendingFile,
        cursor: int,
        max_bytes: int = MAX_BATCH_BYTES,
        max_blocks: int = MAX_BATCH_BLOCKS,
    ) -> Work | None:
        """Return the file's next missing blocks from the cursor on, then those before it."""
        if file.gone or file.filled:
            return None
        first = min(cursor // FANOUT, len(file.segments) - 1)
        count = min(max_blocks, max(1, max_bytes // self.block_size))
        for number in [*range(first, len(file.segments)), *range(first)]:
            segment = file.segments[number]
            if segment is None:
                if number not in file.loading:
                    file.loading.add(number)
                    return Load(file, number)
                continue
            chosen = _from_cursor(segment, file.in_flight, cursor, count)
            if chosen:
                return [begin(file, block, segment) for block in chosen]
        return None


def _from_cursor(segment: dict[int, ChunkId], in_flight: set[int], cursor: int, count: int) -> list[int]:
    """Return up to ``count`` blocks that no thread fetches, those from the cursor on first."""
    after: list[int] = []
    before: list[int] = []
    # In the order of the map, which is ascending.
    for block in segment:
        if block in in_flight:
            continue
        (after if block >= cursor else before).append(block)
        if len(after) >= count:
            break
    return after or before[:count]
