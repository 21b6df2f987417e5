"""The bytes of a regular file: from chunks into a new file, and compared with a file that is there.

Guarantees: every chunk is checked against its id before a byte of it is written, and against the length that its place
in the file gives it; zeros become holes; memory is one block at a time.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ciuic.repository.blockmaps import blocks_of
from ciuic.repository.errors import DamagedTree
from ciuic.repository.ids import is_zero
from ciuic.types import ChunkId, Entry

if TYPE_CHECKING:
    from collections.abc import Callable

    from ciuic.repository import Repository

BATCH_BLOCKS = 128
"""Blocks in one piece of work: 32 MiB of the default block size."""
_PAGE_BYTES = 4096
_ZERO_PAGE = bytes(_PAGE_BYTES)
_READ_BYTES = 1 << 20
_ZEROS_WORTH_READING_BYTES = 64 << 20


class Batch(NamedTuple):
    """Some consecutive blocks of a file: those with data, and holes around them."""

    start: int
    """First byte that the batch speaks for."""
    end: int
    """First byte that it does not."""
    blocks: list[tuple[int, ChunkId]]


def batches(repository: Repository, entry: Entry) -> Iterator[Batch]:
    """The whole file, cut into pieces; a file without data is one piece without blocks."""
    size, block_size = entry.size_bytes, repository.block_size
    ids = repository.block_maps.ids(entry.content, entry.map_height, blocks_of(size, block_size))
    start, blocks = 0, []
    for block, chunk in ids:
        blocks.append((block, chunk))
        if len(blocks) == BATCH_BLOCKS:
            end = min((block + 1) * block_size, size)
            yield Batch(start, end, blocks)
            start, blocks = end, []
    if blocks or start < size:
        yield Batch(start, size, blocks)


class Worker:
    """Reads one repository's chunks; for one thread."""

    def __init__(self, repository: Repository, check: Callable[[], None]) -> None:
        self.repository = repository
        self.check = check
        """Called between blocks; raises when the work is to end."""

    def block(self, entry: Entry, block: int, chunk: ChunkId) -> bytes:
        """The content of a block, as long as it must be. DamagedChunk, MissingChunk, DamagedTree."""
        data = self.repository.chunks.get(chunk)
        block_size = self.repository.block_size
        wanted = min(block_size, entry.size_bytes - block * block_size)
        if len(data) != wanted:
            raise DamagedTree(chunk, f"block {block} has {len(data)} bytes, not {wanted}")
        return data

    def write(self, fd: int, entry: Entry, batch: Batch) -> None:
        """Writes the blocks of the batch into a file that reads as zeros so far."""
        for block, chunk in batch.blocks:
            self.check()
            write_sparse(fd, self.block(entry, block, chunk), block * self.repository.block_size)

    def equal(self, fd: int, entry: Entry, batch: Batch, *, patient: bool = False) -> bool:
        """Whether the file has this content there. Unless ``patient``, False also where much data would have to be read
        through for zeros, which costs more than writing anew.
        """
        block_size, at = self.repository.block_size, batch.start
        limit = batch.end if patient else _ZEROS_WORTH_READING_BYTES
        for block, chunk in batch.blocks:
            self.check()
            start = block * block_size
            length = min(block_size, entry.size_bytes - start)
            if not zeros(fd, at, start, limit):
                return False
            data = os.pread(fd, length, start)
            if len(data) != length or self.repository.chunks.id_of(data) != chunk:
                return False
            at = start + length
        return zeros(fd, at, batch.end, limit)


def write_sparse(fd: int, data: bytes, offset: int) -> None:
    """Writes all of it, except that pages of zeros are left as the holes they are."""
    if _ZERO_PAGE not in data:
        _write_all(fd, memoryview(data), offset)
        return
    view = memoryview(data)
    start = at = 0
    while at < len(data):
        if data.startswith(_ZERO_PAGE, at):
            _write_all(fd, view[start:at], offset + start)
            start = at + _PAGE_BYTES
        at += _PAGE_BYTES
    _write_all(fd, view[start:], offset + start)


def zeros(fd: int, start: int, end: int, limit_bytes: int) -> bool:
    """Whether the file reads as zeros there: holes are passed over, and only so much data is read through."""
    read_bytes = 0
    while start < end:
        try:
            start = max(start, os.lseek(fd, start, os.SEEK_DATA))
        except OSError as error:
            if error.errno == errno.ENXIO:
                return True  # no data from here to the end of the file
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
        if start >= end:
            return True
        data = os.pread(fd, min(_READ_BYTES, end - start), start)
        read_bytes += len(data)
        if not data or not is_zero(data) or read_bytes > limit_bytes:
            return False
        start += len(data)
    return True


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    while len(view):
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
