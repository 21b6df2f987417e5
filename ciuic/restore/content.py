"""The bytes of a regular file: from chunks into a new file, and compared with a file that is there.

Guarantees: every chunk is checked against its id before a byte of it is written, and against the length that its place
in the file gives it; zeros become holes; memory is one buffer, whatever the size of the file.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ciuic.errors import Damaged, NotFound
from ciuic.repository.blockmaps import blocks_of
from ciuic.repository.errors import DamagedTree
from ciuic.repository.ids import is_zero
from ciuic.restore.sharing import ALIGN_BYTES, Sharing
from ciuic.types import ChunkId, Entry

if TYPE_CHECKING:
    from ciuic.repository import Repository
    from ciuic.repository.bulk import Piece
    from ciuic.repository.model import ChunkLocation

_BATCH_BYTES = 8 << 20
_BATCH_BLOCKS = 128
_PAGE_BYTES = 4096
_SYNC_FILE_RANGE_WRITE = 2
_PUNCH_HOLE = 2 | 1
"""FALLOC_FL_PUNCH_HOLE, with FALLOC_FL_KEEP_SIZE, as it must be."""
_ZERO_PAGE = bytes(_PAGE_BYTES)
_SOME_ZEROS = bytes(256)
"""Hardly any data has so many, and to look for these takes half the time: 4 us for 256 KiB."""
_READ_BYTES = 1 << 20
_ZEROS_WORTH_READING_BYTES = 64 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


class Batch(NamedTuple):
    """Some consecutive blocks of a file: those with data, and holes around them."""

    start: int
    """First byte that the batch speaks for."""
    end: int
    """First byte that it does not."""
    blocks: list[tuple[int, ChunkId]]


def batch_blocks(block_size: int) -> int:
    """Blocks in one piece of work: what is written at once, and what a thread has in hand."""
    return max(1, min(_BATCH_BLOCKS, _BATCH_BYTES // block_size))


def batches(repository: Repository, entry: Entry) -> Iterator[Batch]:
    """The whole file, cut into pieces; a file without data is one piece without blocks."""
    size, block_size = entry.size_bytes, repository.block_size
    ids = repository.block_maps.ids(entry.content, entry.map_height, blocks_of(size, block_size))
    most = batch_blocks(block_size)
    start, blocks = 0, []
    for block, chunk in ids:
        blocks.append((block, chunk))
        if len(blocks) == most:
            end = min((block + 1) * block_size, size)
            yield Batch(start, end, blocks)
            start, blocks = end, []
    if blocks or start < size:
        yield Batch(start, size, blocks)


class File(Protocol):
    """One that is being written."""

    @property
    def fd(self) -> int:
        """-1 when it is given up."""
        ...

    def fail(self, error: OSError | Damaged) -> None: ...


class Part(NamedTuple):
    """A block on its way into a file."""

    file: File
    offset: int
    length: int
    block: int
    chunk: ChunkId


class _Unshared(NamedTuple):
    """A block that was read and found right, and comes as extents of its pack."""

    part: Part
    location: ChunkLocation
    length: int


class Worker:
    """Reads one repository's chunks; for one thread."""

    def __init__(
        self,
        repository: Repository,
        check: Callable[[], None],
        runtime_dir: Path | None = None,
        turns: AbstractContextManager[object] | None = None,
    ) -> None:
        self.repository = repository
        self.check = check
        """Called between blocks; raises when the work is to end."""
        self._turns = turns or nullcontext()
        self._has_turn = False
        self._buffer = bytearray()
        self._sharing = Sharing(runtime_dir)
        self._unshared: list[_Unshared] = []
        """Neighbours, in the pack and in the file."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """In the block this is one of the few that work: what it needs of the disk is to be asked for before."""
        if self._has_turn:
            yield
            return
        with self._turns:
            self._has_turn = True
            try:
                yield
            finally:
                self._has_turn = False

    def close(self) -> None:
        """Lets go of the repository and of whom it asked."""
        self.repository.close()
        self._sharing.close()

    def write(self, parts: Sequence[Part]) -> None:
        """Writes blocks into files that read as zeros so far, in the order in which they are stored.

        What is wrong with one file is told to it, and the others go on. OSError of the repository's own disk.
        """
        pieces = self.repository.bulk.read([part.chunk for part in parts])
        with self.turn():
            for piece in pieces:
                part = parts[piece.position]
                # A file that has failed is closed, and its descriptor may be another file's by now.
                if part.file.fd < 0:
                    continue
                try:
                    self._write(part, piece)
                except (OSError, Damaged) as error:
                    part.file.fail(error)
            self._share_waiting()

    def _write(self, part: Part, piece: Piece) -> None:
        source, start, end = piece.source, piece.start, piece.end
        if source is None:
            source = self.repository.chunks.get(part.chunk)
            start, end = 0, len(source)
        if end - start != part.length:
            raise DamagedTree(part.chunk, f"block {part.block} has {end - start} bytes, not {part.length}")
        shared = self._sharable(part, piece)
        if shared:
            assert piece.location is not None
            self._wait_to_be_shared(part, piece.location, shared)
        if shared < part.length:
            write_sparse(part.file.fd, source, start + shared, end, part.offset + shared)

    def _sharable(self, part: Part, piece: Piece) -> int:
        """How many of its bytes, from its first on, can come as extents of the pack."""
        location, source = piece.location, piece.source
        if location is None or not piece.is_raw or source is None:
            return 0
        if location.offset % ALIGN_BYTES or part.offset % ALIGN_BYTES or part.length < ALIGN_BYTES:
            return 0
        if not self._sharing.may(part.file.fd) or has_zero_page(source, piece.start, piece.end):
            return 0
        if self._sharing.is_known(part.file.fd) or self._share(part, location, ALIGN_BYTES):
            return part.length - part.length % ALIGN_BYTES
        return 0

    def _wait_to_be_shared(self, part: Part, location: ChunkLocation, length: int) -> None:
        """Neighbours are shared with one call."""
        last = self._unshared[-1] if self._unshared else None
        if last is not None and not (
            last.part.file is part.file
            and last.location.pack == location.pack
            and last.location.offset + last.length == location.offset
            and last.part.offset + last.length == part.offset
        ):
            self._share_waiting()
        self._unshared.append(_Unshared(part, location, length))

    def _share_waiting(self) -> None:
        waiting, self._unshared = self._unshared, []
        if not waiting or waiting[0].part.file.fd < 0:
            return
        first = waiting[0]
        try:
            if not self._share(first.part, first.location, sum(unshared.length for unshared in waiting)):
                for part, _, length in waiting:
                    data = self.repository.chunks.get(part.chunk)
                    write_sparse(part.file.fd, data, 0, length, part.offset)
        except (OSError, Damaged) as error:
            first.part.file.fail(error)

    def _share(self, part: Part, location: ChunkLocation, length: int) -> bool:
        try:
            pack = self.repository.bulk.pack_descriptor(location.pack)
        except NotFound:  # removed meanwhile: what is live in it is elsewhere by now
            return False
        return self._sharing.share(pack, location.offset, part.file.fd, part.offset, length)

    def equal(self, fd: int, entry: Entry, batch: Batch, *, patient: bool = False) -> bool:
        """Whether the file has this content there. Unless ``patient``, False also where much data would have to be read
        through for zeros, which costs more than writing anew.
        """
        limit = batch.end if patient else _ZEROS_WORTH_READING_BYTES
        at = batch.start
        will_need(fd, batch)
        with self.turn():
            for block, chunk in batch.blocks:
                self.check()
                start, end = self._extent(entry, block)
                if not zeros(fd, at, start, limit) or not self._has(fd, start, end, chunk):
                    return False
                at = end
            return zeros(fd, at, batch.end, limit)

    def repair(self, file: File, entry: Entry, batch: Batch) -> int:
        """Makes the content there what it must be, in a file that is ours alone; how many bytes were something else."""
        fd, at, wrong, wrong_bytes = file.fd, batch.start, [], 0
        will_need(fd, batch)
        with self.turn():
            for block, chunk in batch.blocks:
                self.check()
                start, end = self._extent(entry, block)
                wrong_bytes += self._cleared(fd, at, start)
                if not self._has(fd, start, end, chunk):
                    punch_hole(fd, start, end)
                    wrong.append((block, chunk))
                    wrong_bytes += end - start
                at = end
            wrong_bytes += self._cleared(fd, at, batch.end)
        if wrong:
            self.write(list(parts(file, entry, batch._replace(blocks=wrong), self.repository.block_size)))
        return wrong_bytes

    def replace(self, file: File, entry: Entry, batch: Batch) -> None:
        """Writes all of it, without a look at what is there."""
        punch_hole(file.fd, batch.start, batch.end)
        self.write(list(parts(file, entry, batch, self.repository.block_size)))

    def _extent(self, entry: Entry, block: int) -> tuple[int, int]:
        start = block * self.repository.block_size
        return start, min(start + self.repository.block_size, entry.size_bytes)

    def _has(self, fd: int, start: int, end: int, chunk: ChunkId) -> bool:
        """Whether the file has the content of this chunk there."""
        if len(self._buffer) < end - start:
            self._buffer = bytearray(end - start)
        view = memoryview(self._buffer)[: end - start]
        return os.preadv(fd, [view], start) == len(view) and self.repository.chunks.id_of(view) == chunk

    def _cleared(self, fd: int, start: int, end: int) -> int:
        if zeros(fd, start, end, _ZEROS_WORTH_READING_BYTES):
            return 0
        punch_hole(fd, start, end)
        return end - start


def parts(file: File, entry: Entry, batch: Batch, block_size: int) -> Iterator[Part]:
    """What the blocks of a batch are in a file."""
    for block, chunk in batch.blocks:
        offset = block * block_size
        yield Part(file, offset, min(block_size, entry.size_bytes - offset), block, chunk)


def has_zero_page(source: bytes | bytearray, start: int, end: int) -> bool:
    """Whether there are as many zeros together as a page has, wherever they begin."""
    return source.find(_SOME_ZEROS, start, end) >= 0 and source.find(_ZERO_PAGE, start, end) >= 0


def write_sparse(fd: int, source: bytes | bytearray, start: int, end: int, offset: int) -> None:
    """Writes source[start:end], except that pages of zeros are left as the holes they are."""
    view = memoryview(source)
    if not has_zero_page(source, start, end):
        _write_all(fd, view[start:end], offset)
        return
    shift = offset - start
    at = start
    while at < end:
        if source.startswith(_ZERO_PAGE, at, end):
            _write_all(fd, view[start:at], start + shift)
            start = at + _PAGE_BYTES
        at += _PAGE_BYTES
    _write_all(fd, view[start:end], start + shift)


def will_need(fd: int, batch: Batch) -> None:
    """The kernel begins to read it: several threads read a file in several places, which looks like no order to it."""
    with suppress(OSError):  # only advice
        os.posix_fadvise(fd, batch.start, batch.end - batch.start, os.POSIX_FADV_WILLNEED)


def punch_hole(fd: int, start: int, end: int) -> None:
    """The file reads as zeros there, and has no space for it. OSError."""
    if end > start and _libc.fallocate(fd, _PUNCH_HOLE, start, end - start):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def start_writing_out(fd: int, offset: int, length: int) -> None:
    """The disk begins with what was written there, so that a later sync finds little left to do."""
    _libc.sync_file_range(fd, offset, length, _SYNC_FILE_RANGE_WRITE)  # an error comes back from the sync


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
