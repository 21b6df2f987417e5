"""Store file content as of the cut, as chunks and a block map.

Data is read in runs, the undo log is polled after each, and blocks that the log has replace what was read.
Holes are found with SEEK_DATA, so that a sparse file costs what it holds. New files share their extents with
the repository where the file system can (repository/extent_sharing.py): what is read and stored then is
a clone, which no process changes. Memory is one run and one batch of chunk ids, whatever the file's size, and
the page cache holds of each file afterwards what it held before.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from typing import Final, NamedTuple

from ciuic.daemon.capture.view import BackingUnreadable, PinnedInode, SealedView
from ciuic.fuse_layer.undo_format import BlockRun, UndoLost, bitmap_runs, blocks_name
from ciuic.repository.block_maps import blocks_of
from ciuic.repository.compression import Content
from ciuic.repository.extent_sharing import StagedExtent, StagedFile
from ciuic.repository.identity import is_zero
from ciuic.repository.writing.writer import Writer
from ciuic.system.page_cache import DropBehind, Lookout, Span, cold_spans, forbid_readahead
from ciuic.types import HOLE, ChunkId, Entry, MapRef, recorded_time

# One pread of 4 MiB after the other with the kernel's readahead reached 2.6 to 3.2 GB/s, WILLNEED with
# readahead off 1.35 to 1.5, and O_DIRECT 1.0 to 1.6 (docs/decisions/capture-pipeline.md).
_RUN_BYTES: Final = 4 << 20
# Runs that are read, or at least requested from the disk, ahead of the one that is stored.
_RUNS_AHEAD: Final = 2
# Blocks whose chunk ids wait for the block map: a multiple of its fan-out, so that batches rewrite no leaf.
_BATCH_BLOCKS: Final = 16 << 10
_ANY_NUMBER: Final = 1 << 62
EMPTY_MAP: Final = MapRef(b"", 0)

_Tick = Callable[[int], None]
"""Called with the number of bytes read, after each run; may raise to stop."""


class Stored(NamedTuple):
    """Outcome of reading one file."""

    map: MapRef
    changed_unseen: bool
    """True if the file changed while it was read and no overlay saw it, so that the content may never have
    existed as a whole."""


class _Begun(NamedTuple):
    """A piece whose read has begun."""

    first: int
    stop: int
    # Length in bytes; 0: a hole.
    length: int
    # Parts that were not in the page cache.
    spans: list[Span]
    # Clone of its whole blocks in the repository; None: they are not shared.
    staged: StagedExtent | None
    # Whether a staged piece is all in the page cache, so that it is read from the file first.
    cached: bool
    # Read in the reader thread.
    reading: Future[list[bytes]] | None = None


class _Piece(NamedTuple):
    """Blocks [first, stop) as they were when they were read; without data: a hole."""

    first: int
    stop: int
    data: bytes
    staged: StagedExtent | None


class ContentReader:
    """Reader of regular files of one view, which stores them through one writer."""

    def __init__(self, view: SealedView, writer: Writer, block_size: int, tick: _Tick) -> None:
        self._view = view
        self._writer = writer
        self._block_size = block_size
        self._tick = tick
        self._run_blocks = max(1, _RUN_BYTES // block_size)
        self._drop_behind = DropBehind()
        self._reader: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """End the reader thread, and drop the rest of what was read from the page cache."""
        if self._reader is not None:
            self._reader.shutdown()
        self._drop_behind.close()

    def whole(self, inode: PinnedInode, *, may_share: bool) -> Stored:
        """Store a whole file.

        Args:
            inode: the file.
            may_share: share its extents with the repository where the file system can.

        Raises:
            BackingUnreadable: the file cannot be read.
            OSError: the repository cannot be written.
        """
        if inode.stat.size <= self._block_size:
            return self._one_block(inode)
        return self._store(inode, EMPTY_MAP, [(0, blocks_of(inode.stat.size, self._block_size))], may_share)

    def changed(self, inode: PinnedInode, previous: Entry, bitmap: bytes) -> Stored:
        """Store the blocks of `bitmap` over what the previous snapshot has of the file.

        Raises as `whole` does.
        """
        size = inode.stat.size
        wanted = list(bitmap_runs(bitmap))
        if size != previous.size_bytes:  # the last block is as long as the file says
            ends = (previous.size_bytes // self._block_size, size // self._block_size)
            wanted += [(block, block + 1) for block in ends]
        runs = _united(wanted, blocks_of(size, self._block_size))
        # Not shared: the next changes in place of a shared file would need new space on the file system.
        return self._store(inode, MapRef(previous.content, previous.map_height), runs)

    def _one_block(self, inode: PinnedInode) -> Stored:
        """Store a file of one block as `_store` does."""
        # There are many small files: 48 us of processor time each, instead of 63.
        if inode.stat.size == 0:
            return Stored(EMPTY_MAP, False)
        fd = self._view.open_content(inode)
        try:
            spans = cold_spans(fd, 0, inode.stat.size)
            piece = self._finish(fd, _Begun(0, 1, inode.stat.size, spans, None, False))
            self._view.log.poll()
            patches = self._view.log.blocks(inode.ino, 0, 1)
            self._tick(len(piece.data))
            changes: dict[int, ChunkId] = {}
            for run in patches:
                self._store_old_blocks(inode, run, changes)
            if not patches and not is_zero(piece.data):
                changes[0] = self._writer.put_chunk(piece.data)
            changed_unseen = self._changed_unseen(fd, inode)
        finally:
            os.close(fd)
        return Stored(self._writer.update_block_map(EMPTY_MAP, 1, changes), changed_unseen)

    def _store(
        self, inode: PinnedInode, base: MapRef, runs: Iterable[tuple[int, int]], may_share: bool = False
    ) -> Stored:
        if inode.stat.size == 0:
            return Stored(EMPTY_MAP, False)
        blocks = blocks_of(inode.stat.size, self._block_size)
        over_base = bool(base.content)
        # Over older content a hole is a change of each of its blocks. Over nothing it is no change, and may
        # be exabytes long.
        max_blocks = _BATCH_BLOCKS if over_base else _ANY_NUMBER
        changes: dict[int, ChunkId] = {}
        fd = self._view.open_content(inode)
        try:
            lookout = None
            to_share = StagedFile(self._writer.stage, fd, inode.stat.size) if may_share else None
            if over_base:
                # Changed blocks here and there: readahead would read what is not needed, and make it look
                # used.
                forbid_readahead(fd)
            else:
                lookout = Lookout(fd, inode.stat.size)
            with closing(self._read(fd, inode, runs, max_blocks, to_share, lookout)) as pieces:
                for piece in pieces:
                    if over_base:
                        changes.update(dict.fromkeys(range(piece.first, piece.stop), HOLE))
                    self._store_piece(inode, piece, changes)
                    if len(changes) >= _BATCH_BLOCKS:
                        base = self._writer.update_block_map(base, blocks, changes)
                        changes.clear()
            changed_unseen = self._changed_unseen(fd, inode)
        finally:
            os.close(fd)
        return Stored(self._writer.update_block_map(base, blocks, changes), changed_unseen)

    def _read(
        self,
        fd: int,
        inode: PinnedInode,
        runs: Iterable[tuple[int, int]],
        max_blocks: int,
        to_share: StagedFile | None = None,
        lookout: Lookout | None = None,
    ) -> Generator[_Piece, None, None]:
        """Yield the pieces of the runs with their current content. Close the generator before the descriptor.

        The disk reads the next pieces while the caller handles this one.

        Args:
            fd: descriptor to read from.
            inode: the file.
            runs: ranges of blocks.
            max_blocks: longest hole in one piece.
            to_share: clones extents for the repository.
            lookout: page cache state of a file that is read from end to end.
        """
        begun: deque[_Begun] = deque()
        try:
            for first, stop in runs:
                for piece in self._pieces(fd, first, stop, max_blocks):
                    begun.append(self._begin(fd, inode, *piece, to_share, lookout))
                    if len(begun) > _RUNS_AHEAD:
                        yield self._finish(fd, begun.popleft())
            while begun:
                yield self._finish(fd, begun.popleft())
            if (
                lookout is not None and lookout.began
            ):  # drops what the kernel has read ahead in vain, in holes
                self._drop_behind.end(fd, lookout.reach(inode.stat.size))
        finally:
            # Reads in the thread must not outlive the descriptor, which the caller closes next.
            wait([piece.reading for piece in begun if piece.reading is not None])

    def _store_piece(self, inode: PinnedInode, piece: _Piece, changes: dict[int, ChunkId]) -> None:
        """Store the blocks of a piece that was read just now, as of the cut, and note them in `changes`.

        Zero blocks are not stored.
        """
        self._view.log.poll()
        patches = self._view.log.blocks(inode.ino, piece.first, piece.stop)
        if piece.data:
            patched = {index for run in patches for index in range(run.first, run.stop)}
            self._put(piece, [at for at in range(piece.first, piece.stop) if at not in patched], changes)
        self._tick(len(piece.data))
        for run in patches:
            self._store_old_blocks(inode, run, changes)

    def _store_old_blocks(self, inode: PinnedInode, run: BlockRun, changes: dict[int, ChunkId]) -> None:
        """Store old blocks that the overlay has saved in its undo log.

        Holes in their sparse file stand for zeros.
        """
        try:
            fd = os.open(
                f"{blocks_name(inode.ino, run.epoch)}",
                os.O_RDONLY | os.O_NOFOLLOW,
                dir_fd=self._view.undo_fd,
            )
        except OSError as error:
            self._view.log.poll()  # raises when the reason is that the epoch was given up
            raise UndoLost(f"old blocks of inode {inode.ino} are gone: {error}") from error
        try:
            for piece in self._read(fd, inode, [(run.first, run.stop)], _ANY_NUMBER):
                if piece.data:
                    self._put(piece, range(piece.first, piece.stop), changes)
                self._tick(len(piece.data))
        finally:
            os.close(fd)

    def _put(self, piece: _Piece, indexes: Iterable[int], changes: dict[int, ChunkId]) -> None:
        """Store these blocks of a piece, without zero blocks."""
        whole = memoryview(piece.data)
        blocks = {}
        for index in indexes:
            at = (index - piece.first) * self._block_size
            block = whole[at : at + self._block_size]
            if not is_zero(block):
                place = None
                # Extents are shared in whole blocks of the file system; a partial last block is copied.
                if piece.staged is not None and len(block) == self._block_size:
                    place = piece.staged._replace(offset=piece.staged.offset + at)
                blocks[index] = Content(block, place)
        changes.update(zip(blocks, self._writer.put_chunks(list(blocks.values())), strict=True))

    def _pieces(
        self, fd: int, first: int, stop: int, max_blocks: int = _ANY_NUMBER
    ) -> Iterator[tuple[int, int, bool]]:
        """Split [first, stop) into parts with data (True), each read at once, and holes (False).

        A hole has `max_blocks` at most.
        """
        data_stop = first
        while first < stop:
            has_data = first < data_stop
            if not has_data:
                data_at = min(self._next_data(fd, first), stop)
                has_data = data_at == first
                if has_data:
                    data_stop = self._next_hole(fd, first)
            if has_data:
                piece_stop = min(stop, first + self._run_blocks, data_stop)
            else:
                piece_stop = min(data_at, first + max_blocks)
            yield first, piece_stop, has_data
            first = piece_stop

    def _next_data(self, fd: int, block: int) -> int:
        """Return the first block from `block` on that has data; a very large number when there is none."""
        try:
            return os.lseek(fd, block * self._block_size, os.SEEK_DATA) // self._block_size
        except OSError as error:
            if error.errno == errno.ENXIO:
                return 1 << 62
            if error.errno in (errno.EINVAL, errno.ENOTSUP):
                return block  # the file system knows no holes, so everything is data
            raise BackingUnreadable(error) from error

    def _next_hole(self, fd: int, block: int) -> int:
        """Return the end of the data of which `block` holds some, in blocks, rounded up."""
        try:
            end = os.lseek(fd, block * self._block_size, os.SEEK_HOLE)
        except OSError as error:
            # ENXIO: the file is shorter than this by now.
            if error.errno in (errno.EINVAL, errno.ENOTSUP, errno.ENXIO):
                return 1 << 62
            raise BackingUnreadable(error) from error
        return max(block + 1, blocks_of(end, self._block_size))

    def _begin(
        self,
        fd: int,
        inode: PinnedInode,
        first: int,
        stop: int,
        has_data: bool,
        to_share: StagedFile | None,
        lookout: Lookout | None,
    ) -> _Begun:
        """Begin to read [first, stop), limited to the size at the cut."""
        if not has_data:
            return _Begun(first, stop, 0, [], None, False)
        offset = first * self._block_size
        length = min(stop * self._block_size, inode.stat.size) - offset
        whole_length = length - length % self._block_size
        staged = to_share.take(offset, whole_length) if to_share is not None else None
        try:
            if staged is not None:
                begun = self._begin_staged(fd, _Begun(first, stop, length, [], staged, False))
            elif lookout is not None:
                begun = _Begun(first, stop, length, lookout.reach(offset + length), None, False)
            else:
                return _Begun(first, stop, length, self._drop_behind.begin(fd, offset, length), None, False)
        except OSError as error:
            raise BackingUnreadable(error) from error
        if inode.stat.size <= _RUN_BYTES:  # one run: a thread would gain nothing
            return begun
        if staged is not None and not begun.cached:
            return begun._replace(reading=self._read_behind(staged.file.fd, staged.offset, whole_length))
        return begun._replace(
            reading=self._read_behind(fd, offset, length if staged is None else whole_length)
        )

    def _begin_staged(self, fd: int, begun: _Begun) -> _Begun:
        assert begun.staged is not None
        length = begun.length - begun.length % self._block_size
        if not cold_spans(fd, begun.first * self._block_size, length):
            return begun._replace(cached=True)
        return begun._replace(spans=cold_spans(begun.staged.file.fd, begun.staged.offset, length))

    def _read_behind(self, fd: int, offset: int, length: int) -> Future[list[bytes]]:
        """Read in a thread, one range after the other, so that the kernel reads ahead."""
        if self._reader is None:
            # One thread: two would read alternate ranges, which the kernel does not recognise as sequential.
            self._reader = ThreadPoolExecutor(1, "ciuic-read")
        return self._reader.submit(_read_all, fd, offset, length)

    def _finish(self, fd: int, begun: _Begun) -> _Piece:
        """Return the piece, filled with zeros where the file ends now."""
        offset = begun.first * self._block_size
        try:
            if begun.staged is not None:
                parts = self._read_staged(fd, offset, begun, begun.staged)
                have = sum(map(len, parts))
                parts += _read_all(fd, offset + have, begun.length - have)
            elif begun.reading is not None:
                parts = begun.reading.result()
            else:
                parts = _read_all(fd, offset, begun.length)
            if begun.staged is None:
                self._drop_behind.end(fd, begun.spans)
        except OSError as error:
            raise BackingUnreadable(error) from error
        have = sum(map(len, parts))
        if have < begun.length:
            parts.append(bytes(begun.length - have))
        return _Piece(begun.first, begun.stop, parts[0] if len(parts) == 1 else b"".join(parts), begun.staged)

    def _read_staged(self, fd: int, offset: int, begun: _Begun, staged: StagedExtent) -> list[bytes]:
        """Read the whole blocks of a staged piece."""
        length = begun.length - begun.length % self._block_size
        parts = begun.reading.result() if begun.reading is not None else None
        if begun.cached:
            parts = _read_all(fd, offset, length) if parts is None else parts
            if sum(map(len, parts)) == length and self._writer.stage.is_unchanged(fd, offset, length, staged):
                return parts
            parts = None
        if parts is None:
            parts = _read_all(staged.file.fd, staged.offset, length)
        self._drop_behind.end(staged.file.fd, begun.spans)
        return parts

    def _changed_unseen(self, fd: int, inode: PinnedInode) -> bool:
        """Return whether the file has changed without a record since its attributes were read."""
        if self._view.log.inode(inode.ino) is not None:
            return False
        now = os.fstat(fd)
        if (now.st_size, recorded_time(now.st_mtime_ns)) != (inode.stat.size, inode.stat.mtime_ns):
            return True
        # Under an overlay ctime also moves when a hold link is dropped, which changes no content.
        return not self._view.exact and recorded_time(now.st_ctime_ns) != inode.stat.ctime_ns


def _read_all(fd: int, offset: int, length: int) -> list[bytes]:
    """Read a range; return less where the file ends now."""
    parts: list[bytes] = []
    have = 0
    # pread(2) may return less than was asked for. The parts are joined once, by the caller: most reads have
    # one.
    while have < length and (part := os.pread(fd, length - have, offset + have)):
        parts.append(part)
        have += len(part)
    return parts


def _united(runs: list[tuple[int, int]], blocks: int) -> Iterator[tuple[int, int]]:
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
