"""Threads of a lazy restore: some fetch what is missing, others make filled files durable and complete.

Guarantees: a chunk is checked against its id before a byte of it is written; nothing is written over what a job has changed, or to a
file that was cut to nothing meanwhile; an error of the store or the disk is not final: it is told to those who wait, and the rest is tried again. A hidden link is
removed after the file's content and times were synced, in this order. Afterwards the file is one as any other; nothing of this process
changes it any more.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import structlog

from ciuic.errors import CiuicError, Damaged
from ciuic.lazy.incomplete_files import Load, PendingFile, PendingFiles, PendingPiece, Work
from ciuic.repository import Repository
from ciuic.repository.block_maps import FANOUT, blocks_of
from ciuic.repository.errors import DamagedTree
from ciuic.restore.content import punch_hole, start_writing_out, write_sparse
from ciuic.types import ChunkId

log = structlog.get_logger(__name__)

URGENT_THREADS: Final = 4
"""Threads that only do what a reader waits for: a read never queues behind batches of the rest."""
_MAX_FETCH_THREADS: Final = 8
_FETCH_PAUSE_SECONDS: Final = 2.0
"""Pause of a thread after an error of the store or the disk."""
_CLOSE_SECONDS: Final = 2.0
_MAX_SETTLED_FILES: Final = 48
_SETTLE_THREADS: Final = 2
_SETTLE_PAUSE_SECONDS: Final = 2.0


@dataclass
class _Opened:
    """A file that a batch writes to, and the range of what it has written."""

    fd: int
    start: int
    end: int


class Filler:
    """The threads, each with its own open repository."""

    def __init__(self, repository: Repository, pending: PendingFiles) -> None:
        self._repository = repository
        self._pending = pending
        processors = len(os.sched_getaffinity(0))
        # As in a plain restore: two more than compute at once, because some wait for the network.
        count = min(_MAX_FETCH_THREADS, processors + 2)
        self._turns = threading.BoundedSemaphore(processors)
        self._threads = [
            threading.Thread(target=self._run, args=(number < URGENT_THREADS,), name="fill", daemon=True)
            for number in range(count + URGENT_THREADS)
        ]
        self._ended = threading.Event()
        self.trouble = ""
        """Cause for which fetching waits now, in words; empty while it goes on."""

    def start(self) -> None:
        """Begin to fetch."""
        for thread in self._threads:
            thread.start()

    def close(self, timeout_seconds: float = _CLOSE_SECONDS) -> None:
        """End the threads, after `PendingFiles.close`; one that waits for the store is left behind."""
        self._ended.set()
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))

    def _run(self, urgent_only: bool) -> None:
        repository: Repository | None = None
        try:
            while (work := self._pending.take(urgent_only=urgent_only)) is not None:
                try:
                    if repository is None:
                        # Opened by the thread itself: connections to the index belong to one thread.
                        repository = self._repository.reopen()
                    self._do(repository, work)
                    self.trouble = ""
                except (OSError, CiuicError) as error:
                    self._failed(work, error)
                except Exception as error:
                    log.exception("lazy_fetch_failed")
                    self._failed(work, error)
        finally:
            if repository is not None:
                repository.close()

    def _failed(self, work: Work, error: Exception) -> None:
        self.trouble = error.message if isinstance(error, CiuicError) else str(error)
        log.warning("lazy_fetch_waits", reason=self.trouble)
        number = (error.errno or errno.EIO) if isinstance(error, OSError) else errno.EIO
        self._pending.failed(work, number)
        self._ended.wait(_FETCH_PAUSE_SECONDS)

    def _do(self, repository: Repository, work: Work) -> None:
        if isinstance(work, Load):
            self._load(repository, work)
        else:
            self._fetch(repository, work)

    # -- block maps

    def _load(self, repository: Repository, work: Load) -> None:
        file, shape = work.file, work.file.shape
        n_blocks = blocks_of(shape.size_bytes, repository.block_size)
        start = work.segment * FANOUT
        end = min(start + FANOUT, n_blocks)
        try:
            ids = dict(repository.block_maps.ids(shape.content, shape.map_height, n_blocks, start, end))
        except Damaged as error:
            # It is unknown which chunks the blocks have. As damaged blocks each of them would count as lost data.
            with self._pending.changed:
                self._pending.loaded(file, work.segment, dict.fromkeys(range(start, end), ChunkId(b"")), end)
                self._damaged(file, range(start, end), error)
            return
        self._pending.loaded(file, work.segment, self._still_missing(repository, file, ids), end)

    def _still_missing(
        self, repository: Repository, file: PendingFile, ids: dict[int, ChunkId]
    ) -> dict[int, ChunkId]:
        """Return the blocks without those that an earlier run has fetched."""
        with suppress(OSError):
            fd = self._pending.open(file)
            try:
                size = repository.block_size
                for block in _blocks_with_data(fd, size, ids):
                    start, end = block * size, min((block + 1) * size, file.shape.size_bytes)
                    with file.io:
                        gaps = file.ranges.gaps(start, end)
                        whole = gaps == [(start, end)]
                        if (
                            whole
                            and repository.identity.chunk_id(os.pread(fd, end - start, start)) == ids[block]
                        ):
                            del ids[block]
                            continue
                        # Pages of zeros are not written, so what is there must be gone before.
                        for gap in gaps:
                            punch_hole(fd, *gap)
            finally:
                os.close(fd)
        return ids

    # -- blocks

    def _fetch(self, repository: Repository, pieces: list[PendingPiece]) -> None:
        opened: dict[int, _Opened] = {}
        try:
            # On return the store has been asked for all of it.
            read = repository.bulk.read([piece.chunk for piece in pieces])
            for chunk in read:
                piece = pieces[chunk.position]
                try:
                    source, start, end = chunk.source, chunk.start, chunk.end
                    if source is None:
                        source = repository.chunks.get(piece.chunk)
                        start, end = 0, len(source)
                    self._check_length(piece, end - start)
                except Damaged as error:
                    self._damaged(piece.file, (piece.block,), error)
                    continue
                self._write(opened, piece, source, start, end)
        finally:
            for file in opened.values():
                # The last sync finds little left to do then.
                start_writing_out(file.fd, file.start, file.end - file.start)
                os.close(file.fd)

    def _check_length(self, piece: PendingPiece, length: int) -> None:
        expected = self._pending.length(piece)
        if length != expected:
            text = f"block {piece.block} must have {expected} bytes, its chunk has {length}"
            raise DamagedTree(piece.chunk, text)

    def _write(
        self, opened: dict[int, _Opened], piece: PendingPiece, source: bytes | bytearray, start: int, end: int
    ) -> None:
        file = piece.file
        # Under the file's lock: one that is cut to nothing at this moment must not grow again.
        with self._turns, file.io:
            if file.gone:
                return
            at = piece.block * self._pending.block_size
            target = opened.get(file.ino)
            if target is None:
                target = opened[file.ino] = _Opened(self._pending.open(file), at, at)
            for first, last in file.ranges.gaps(at, at + end - start):
                write_sparse(target.fd, source, start + first - at, start + last - at, first)
            target.start, target.end = min(target.start, at), max(target.end, at + end - start)
        self._pending.done(piece)

    def _damaged(self, file: PendingFile, blocks: range | tuple[int, ...], error: Damaged) -> None:
        log.error("lazy_content_damaged", file=file.shape.number, block=blocks[0], reason=error.message)
        self._pending.is_damaged(file, blocks, error.message)


def _blocks_with_data(fd: int, size: int, blocks: dict[int, ChunkId]) -> list[int]:
    """Return the blocks of which the file has some data on disk."""
    found: list[int] = []
    upto = -1
    for block in list(blocks):
        start = block * size
        if start + size <= upto:
            # All of it lies before the next data.
            continue
        try:
            data = os.lseek(fd, start, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                break
            raise
        if data < start + size:
            found.append(block)
        else:
            upto = data
    return found


class Settler:
    """The threads, and the same work in the thread of a caller that cannot wait for them."""

    def __init__(self, pending: PendingFiles) -> None:
        self._pending = pending
        # Syncs at the same time share a write of the file system's journal, and wait for the disk together.
        self._threads = [
            threading.Thread(target=self._run, name="settle", daemon=True) for _ in range(_SETTLE_THREADS)
        ]
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin to settle what is filled."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads, after `PendingFiles.close`."""
        self._ended.set()
        for thread in self._threads:
            # One that was not started has nothing to end.
            if thread.is_alive():
                thread.join()

    def settle(self, file: PendingFile) -> None:
        """Make a filled file complete now.

        Raises:
            OSError: it cannot be made durable.
        """
        if not self._pending.begin_settling(file):
            return
        try:
            self._finish(file, self._begin(file))
        except BaseException:
            self._pending.not_settled(file)
            raise

    def _run(self) -> None:
        while (files := self._pending.take_filled(_MAX_SETTLED_FILES)) is not None:
            opened: list[tuple[PendingFile, int]] = []
            # All are on their way to the disk before the first sync waits (restore/workers.py).
            for file in files:
                try:
                    opened.append((file, self._begin(file)))
                except OSError as error:
                    self._failed(file, error)
            for file, fd in opened:
                try:
                    self._finish(file, fd)
                except OSError as error:
                    self._failed(file, error)

    def _failed(self, file: PendingFile, error: OSError) -> None:
        log.warning("lazy_file_not_settled", file=file.shape.number, reason=str(error))
        if not file.gone:
            self._ended.wait(_SETTLE_PAUSE_SECONDS)
        self._pending.not_settled(file)

    def _begin(self, file: PendingFile) -> int:
        fd = self._pending.open(file)
        try:
            # Writing its content has moved the time. Under the lock: the job may set another one.
            with file.io:
                os.utime(fd, ns=(os.fstat(fd).st_atime_ns, file.mtime_ns))
            start_writing_out(fd, 0, file.shape.size_bytes)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _finish(self, file: PendingFile, fd: int) -> None:
        try:
            # Before the link goes: it alone says that the content may be missing.
            os.fsync(fd)
        finally:
            os.close(fd)
        self._pending.settled(file)
