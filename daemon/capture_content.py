"""File content at the cut, into chunks and a block map.

Data is read in runs, the log is polled after each, and blocks that the log has replace what was read. Holes are looked for
with SEEK_DATA, so a sparse file costs what it holds. New files share their extents with the repository where the file system
can (repository/sharing.py): what is read and stored then is a clone, which nobody changes. Memory is one run and one batch of chunk ids, whatever the file's size,
and the page cache holds of each file afterwards what it held before.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from typing import Final, NamedTuple

from ciuic.daemon.capture_view import SealedView, Thing, Unreadable
from ciuic.fuse_layer.undo_format import BlockRun, UndoLost, bitmap_runs, blocks_name
from ciuic.page_cache import DropBehind, Lookout, Span, cold_spans, forbid_readahead
from ciuic.repository.blockmaps import blocks_of
from ciuic.repository.ids import is_zero
from ciuic.repository.packing import Content
from ciuic.repository.sharing import Place, StagedFile
from ciuic.repository.writer import Writer
from ciuic.types import HOLE, ChunkId, Entry, MapRef

_RUN_BYTES: Final = 4 << 20
_RUNS_AHEAD: Final = 2
"""Read, or at least asked for, before they are wanted."""
_BATCH_BLOCKS: Final = 16 << 10
"""A multiple of the block map's fan-out, so that batches rewrite no leaf."""
_ANY_NUMBER: Final = 1 << 62
EMPTY_MAP: Final = MapRef(b"", 0)

Tick = Callable[[int], None]
"""Called with the number of bytes read, after each run; may raise to stop."""


class Stored(NamedTuple):
    """Outcome of reading one file."""

    map: MapRef
    torn: bool
    """Somebody changed it meanwhile and no overlay saw it: the content may never have existed as a whole."""


class _Begun(NamedTuple):
    """A piece that is being read in."""

    first: int
    stop: int
    length: int
    """0: it holds no data."""
    spans: list[Span]
    """What was not in the page cache."""
    staged: Place | None
    """Where its whole blocks are staged, if they are."""
    cached: bool
    """Staged, but all of it is in the page cache: it is read in the file first."""
    reading: Future[list[bytes]] | None = None
    """In the reader's thread."""


class _Piece(NamedTuple):
    """Blocks [first, stop) as they were when they were read; no data: a hole."""

    first: int
    stop: int
    data: bytes
    staged: Place | None


class ContentReader:
    """Reads regular files of one view into one writer."""

    def __init__(self, view: SealedView, writer: Writer, block_size: int, tick: Tick) -> None:
        self._view = view
        self._writer = writer
        self._block_size = block_size
        self._tick = tick
        self._run_blocks = max(1, _RUN_BYTES // block_size)
        self._drop_behind = DropBehind()
        self._reader: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """The last of what was read leaves the page cache."""
        if self._reader is not None:
            self._reader.shutdown()
        self._drop_behind.close()

    def whole(self, thing: Thing, *, may_share: bool) -> Stored:
        """The whole file. `may_share`: its extents, with the repository. Unreadable; OSError from the repository."""
        if thing.stat.size <= self._block_size:
            return self._one_block(thing)
        return self._store(thing, EMPTY_MAP, [(0, blocks_of(thing.stat.size, self._block_size))], may_share)

    def changed(self, thing: Thing, previous: Entry, bitmap: bytes) -> Stored:
        """The blocks of `bitmap`, over what the previous snapshot has of the file. Unreadable; OSError.

        They share nothing: a file that is changed in place would have to find new room for its next changes.
        """
        size = thing.stat.size
        wanted = list(bitmap_runs(bitmap))
        if size != previous.size_bytes:  # the last block is as long as the file says
            ends = (previous.size_bytes // self._block_size, size // self._block_size)
            wanted += [(block, block + 1) for block in ends]
        runs = _united(wanted, blocks_of(size, self._block_size))
        return self._store(thing, MapRef(previous.content, previous.map_height), runs)

    def _one_block(self, thing: Thing) -> Stored:
        """A small file, whole: as `_store`, in two thirds of its processor time. There are many of them."""
        if thing.stat.size == 0:
            return Stored(EMPTY_MAP, False)
        fd = self._view.open_content(thing)
        try:
            spans = cold_spans(fd, 0, thing.stat.size)
            piece = self._finish(fd, _Begun(0, 1, thing.stat.size, spans, None, False))
            self._view.log.poll()
            patches = self._view.log.blocks(thing.ino, 0, 1)
            self._tick(len(piece.data))
            changes: dict[int, ChunkId] = {}
            for run in patches:
                self._store_old_blocks(thing, run, changes)
            if not patches and not is_zero(piece.data):
                changes[0] = self._writer.put_chunk(piece.data)
            torn = self._changed_unseen(fd, thing)
        finally:
            os.close(fd)
        return Stored(self._writer.update_block_map(EMPTY_MAP, 1, changes), torn)

    def _store(
        self, thing: Thing, base: MapRef, runs: Iterable[tuple[int, int]], may_share: bool = False
    ) -> Stored:
        if thing.stat.size == 0:
            return Stored(EMPTY_MAP, False)
        blocks = blocks_of(thing.stat.size, self._block_size)
        over_base = bool(base.content)
        # A hole over something is as many changes as it has blocks; over nothing it is none, and may be exabytes.
        most_blocks = _BATCH_BLOCKS if over_base else _ANY_NUMBER
        changes: dict[int, ChunkId] = {}
        fd = self._view.open_content(thing)
        try:
            lookout = None
            to_share = StagedFile(self._writer.stage, fd, thing.stat.size) if may_share else None
            if over_base:
                forbid_readahead(fd)
            else:
                lookout = Lookout(fd, thing.stat.size)
            with closing(self._read(fd, thing, runs, most_blocks, to_share, lookout)) as pieces:
                for piece in pieces:
                    if over_base:
                        changes.update(dict.fromkeys(range(piece.first, piece.stop), HOLE))
                    self._store_piece(thing, piece, changes)
                    if len(changes) >= _BATCH_BLOCKS:
                        base = self._writer.update_block_map(base, blocks, changes)
                        changes.clear()
            torn = self._changed_unseen(fd, thing)
        finally:
            os.close(fd)
        return Stored(self._writer.update_block_map(base, blocks, changes), torn)

    def _read(
        self,
        fd: int,
        thing: Thing,
        runs: Iterable[tuple[int, int]],
        most_blocks: int,
        to_share: StagedFile | None = None,
        lookout: Lookout | None = None,
    ) -> Generator[_Piece, None, None]:
        """The pieces of the runs with what is in them now. ``lookout``: of a file that is read from end to end.

        The disk reads the next pieces while the caller has this one. Close it before the descriptor.
        """
        begun: deque[_Begun] = deque()
        try:
            for first, stop in runs:
                for piece in self._pieces(fd, first, stop, most_blocks):
                    begun.append(self._begin(fd, thing, *piece, to_share, lookout))
                    if len(begun) > _RUNS_AHEAD:
                        yield self._finish(fd, begun.popleft())
            while begun:
                yield self._finish(fd, begun.popleft())
            if lookout is not None and lookout.began:  # what the kernel has read ahead in vain: in holes
                self._drop_behind.end(fd, lookout.reach(thing.stat.size))
        finally:
            wait([piece.reading for piece in begun if piece.reading is not None])

    def _store_piece(self, thing: Thing, piece: _Piece, changes: dict[int, ChunkId]) -> None:
        """Its blocks at the cut that are not all zero, into `changes`. It was read just now."""
        self._view.log.poll()
        patches = self._view.log.blocks(thing.ino, piece.first, piece.stop)
        if piece.data:
            patched = {index for run in patches for index in range(run.first, run.stop)}
            self._put(piece, [at for at in range(piece.first, piece.stop) if at not in patched], changes)
        self._tick(len(piece.data))
        for run in patches:
            self._store_old_blocks(thing, run, changes)

    def _store_old_blocks(self, thing: Thing, run: BlockRun, changes: dict[int, ChunkId]) -> None:
        """Blocks that the overlay has put aside. What their sparse file lacks was zero."""
        try:
            fd = os.open(
                f"{blocks_name(thing.ino, run.epoch)}",
                os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW,
                dir_fd=self._view.undo_fd,
            )
        except OSError as error:
            self._view.log.poll()  # raises when the reason is that the epoch was given up
            raise UndoLost(f"old blocks of inode {thing.ino} are gone: {error}") from error
        try:
            for piece in self._read(fd, thing, [(run.first, run.stop)], _ANY_NUMBER):
                if piece.data:
                    self._put(piece, range(piece.first, piece.stop), changes)
                self._tick(len(piece.data))
        finally:
            os.close(fd)

    def _put(self, piece: _Piece, indexes: Iterable[int], changes: dict[int, ChunkId]) -> None:
        """Stores these blocks of the piece."""
        whole = memoryview(piece.data)
        blocks = {}
        for index in indexes:
            at = (index - piece.first) * self._block_size
            block = whole[at : at + self._block_size]
            if not is_zero(block):
                place = None
                if piece.staged is not None and len(block) == self._block_size:
                    place = piece.staged._replace(offset=piece.staged.offset + at)
                blocks[index] = Content(block, place)
        changes.update(zip(blocks, self._writer.put_chunks(list(blocks.values())), strict=True))

    def _pieces(
        self, fd: int, first: int, stop: int, most_blocks: int = _ANY_NUMBER
    ) -> Iterator[tuple[int, int, bool]]:
        """[first, stop) in order, in parts that either are read at once (True) or hold no data now (False), these of
        `most_blocks` at most."""
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
                piece_stop = min(data_at, first + most_blocks)
            yield first, piece_stop, has_data
            first = piece_stop

    def _next_data(self, fd: int, block: int) -> int:
        """The first block from `block` on that has data; very large when there is none."""
        try:
            return os.lseek(fd, block * self._block_size, os.SEEK_DATA) // self._block_size
        except OSError as error:
            if error.errno == errno.ENXIO:
                return 1 << 62
            if error.errno in (errno.EINVAL, errno.ENOTSUP):
                return block  # a file system that knows no holes: all is data
            raise Unreadable(error) from error

    def _next_hole(self, fd: int, block: int) -> int:
        """The end of the data that `block` has some of, in blocks, rounded up."""
        try:
            end = os.lseek(fd, block * self._block_size, os.SEEK_HOLE)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOTSUP, errno.ENXIO):  # ENXIO: it ends before this by now
                return 1 << 62
            raise Unreadable(error) from error
        return max(block + 1, blocks_of(end, self._block_size))

    def _begin(
        self,
        fd: int,
        thing: Thing,
        first: int,
        stop: int,
        has_data: bool,
        to_share: StagedFile | None,
        lookout: Lookout | None,
    ) -> _Begun:
        """Asks the disk for [first, stop), cut off at the size at the cut."""
        if not has_data:
            return _Begun(first, stop, 0, [], None, False)
        offset = first * self._block_size
        length = min(stop * self._block_size, thing.stat.size) - offset
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
            raise Unreadable(error) from error
        if thing.stat.size <= _RUN_BYTES:  # to hand it over would gain nothing
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
        """Reads in a thread, one range after the other, so that the kernel sees that it should read ahead."""
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, "ciuic-read")
        return self._reader.submit(_read_all, fd, offset, length)

    def _finish(self, fd: int, begun: _Begun) -> _Piece:
        """The piece; filled with zeros where the file ends now."""
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
            raise Unreadable(error) from error
        have = sum(map(len, parts))
        if have < begun.length:
            parts.append(bytes(begun.length - have))
        return _Piece(begun.first, begun.stop, parts[0] if len(parts) == 1 else b"".join(parts), begun.staged)

    def _read_staged(self, fd: int, offset: int, begun: _Begun, staged: Place) -> list[bytes]:
        """The whole blocks of a piece that is staged."""
        length = begun.length - begun.length % self._block_size
        parts = begun.reading.result() if begun.reading is not None else None
        if begun.cached:
            parts = _read_all(fd, offset, length) if parts is None else parts
            if sum(map(len, parts)) == length and self._writer.stage.still(fd, offset, length, staged):
                return parts
            parts = None
        if parts is None:
            parts = _read_all(staged.file.fd, staged.offset, length)
        self._drop_behind.end(staged.file.fd, begun.spans)
        return parts

    def _changed_unseen(self, fd: int, thing: Thing) -> bool:
        """Whether the file is no longer as it was when its attributes were read, and no record accounts for that."""
        if self._view.log.inode(thing.ino) is not None:
            return False
        now = os.fstat(fd)
        if (now.st_size, now.st_mtime_ns) != (thing.stat.size, thing.stat.mtime_ns):
            return True
        # Under an overlay ctime also moves when a hold link is dropped, which changes no content.
        return not self._view.exact and now.st_ctime_ns != thing.stat.ctime_ns


def _read_all(fd: int, offset: int, length: int) -> list[bytes]:
    """What is there of the range: less where the file ends now."""
    parts: list[bytes] = []
    have = 0
    while have < length and (part := os.pread(fd, length - have, offset + have)):
        parts.append(part)
        have += len(part)
    return parts


def _united(runs: list[tuple[int, int]], blocks: int) -> Iterator[tuple[int, int]]:
    """The same blocks below `blocks` as maximal runs (first, stop) in order."""
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
