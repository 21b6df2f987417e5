"""Table of the incomplete files of a lazy restore: what is missing, who waits for it, and what is fetched next.

Fetched first is what a reader waits for; then files that are being read, from where they are read; then files of one block, in the
order of the tree, because packs have them side by side; then the newest.

Guarantees: a block counts as there only after its content was checked and written; a waiting reader is told of damage, of an
unreachable store and of an interrupt; no block is fetched by two threads at the same time. All methods of `PendingFiles` may be
called from any thread; its `changed` guards the table and the order. What a job has changed of a file (changes.py) is not missing, and
is changed under the file's lock `io`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from ciuic.fuse_layer.tracking.hidden_links import HiddenLinks
from ciuic.lazy.changes import END, ByteRanges, Change, ChangeJournals, Changes, Kind
from ciuic.repository.block_maps import FANOUT, blocks_of
from ciuic.types import ChunkId

_NAME: Final = re.compile(rb"([0-9]{10})\.([0-9a-f]{32})\.([0-9]{1,2})\.([0-9]{1,19})\.(-?[0-9]{1,20})")
MAX_BATCH_FILES: Final = 48
MAX_BATCH_BYTES: Final = 8 << 20
MAX_BATCH_BLOCKS: Final = 128
_INTERRUPT_SECONDS: Final = 1.0
"""Interval in which a waiting reader looks again, should a notification be lost to it."""
_LOCK_STRIPES: Final = 64
_OPEN: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


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
        *("journaled", "loading", "mtime_ns", "name", "ranges", "rank", "segments", "settling", "shape"),
    )

    def __init__(
        self, shape: PendingName, ino: int, n_segments: int, io: threading.Lock, *, is_new: bool
    ) -> None:
        self.shape: Final = shape
        self.name: Final = shape.encode()
        self.ino: Final = ino
        self.io: Final = io
        """Held while a block is written, or the file changed by a job."""
        self.ranges = ByteRanges()
        """Byte ranges that the job has changed."""
        self.mtime_ns = shape.mtime_ns
        """Modification time that is shown, and that the complete file gets."""
        self.journaled = False
        """True if the file has a journal of changes."""
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


def _length_of(file: PendingFile, block: int, block_size: int) -> int:
    """Return the number of bytes that a block has."""
    return min(block_size, file.shape.size_bytes - block * block_size)


def _begin(file: PendingFile, block: int, segment: dict[int, ChunkId]) -> PendingPiece:
    """Mark a missing block as being fetched, and return it as work."""
    file.in_flight.add(block)
    return PendingPiece(file, block, segment[block])


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
                size_bytes += sum(_length_of(piece.file, piece.block, self.block_size) for piece in work)
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
                return [_begin(file, block, segment) for block in chosen]
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


class PendingFiles:
    """The table; ``directory`` is the descriptor of the directory of hidden links, which the caller closes."""

    def __init__(self, directory: int, block_size: int, journals: ChangeJournals) -> None:
        self.directory: Final = directory
        self._journals = journals
        self.block_size: Final = block_size
        lock = threading.RLock()
        self.changed = threading.Condition(lock)
        """Lock of the table; readers wait for it."""
        # Of the same lock: threads that fetch are not woken for each block that another one has written.
        self._work = threading.Condition(lock)
        self._ended = threading.Condition(lock)
        self._over = threading.Condition(lock)
        self._waiting = 0
        self.by_ino: dict[int, PendingFile] = {}
        self.hidden = HiddenLinks(others=self.by_ino)
        """Count of our links to incomplete files, which no process sees."""
        self.bytes_total = self.bytes_left = 0
        self.files_total = 0
        self.closed = False
        self.damaged: list[PendingFile] = []
        self._filled: deque[PendingFile] = deque()
        self._urgent: deque[Work] = deque()
        self._order = FetchOrder(block_size)
        self._io = tuple(threading.Lock() for _ in range(_LOCK_STRIPES))

    # -- files

    def add(self, shape: PendingName, ino: int, *, is_new: bool, changes: Changes | None = None) -> None:
        """Take up a file. ``is_new``: it has no content yet; ``changes``: what its journal says, if it has one."""
        n_segments = max(1, -(-blocks_of(shape.size_bytes, self.block_size) // FANOUT))
        file = PendingFile(shape, ino, n_segments, self._io[ino % _LOCK_STRIPES], is_new=is_new)
        if changes is not None:
            file.journaled, file.ranges, file.mtime_ns = True, changes.ranges, changes.mtime_ns
        with self.changed:
            self.by_ino[ino] = file
            self.bytes_total += shape.size_bytes
            self.bytes_left += shape.size_bytes
            self.files_total += 1

    def put_in_order(self) -> None:
        """Decide what is fetched first, after all files were added."""
        with self.changed:
            self._order.put(self.by_ino.values())

    def open(self, file: PendingFile) -> int:
        """Open the file below the mount; the caller closes the descriptor.

        Raises:
            OSError: it is complete, or was removed.
        """
        return os.open(file.name, _OPEN, dir_fd=self.directory)

    def drop(self, file: PendingFile) -> None:
        """Give up what is missing of a file: it was cut to nothing, or has no name any more."""
        with self.changed:
            if not file.gone:
                self.bytes_left -= self._missing_bytes(file)
                self._leave(file)

    def settled(self, file: PendingFile) -> None:
        """Take out a file whose content is durable."""
        with self.changed:
            if not file.gone:
                self._leave(file)

    def _leave(self, file: PendingFile) -> None:
        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file.name, dir_fd=self.directory)
            self.by_ino.pop(file.ino, None)

        self.hidden.let_other_go(remove)
        if file.journaled:
            self._journals.remove(file.name)
        file.gone = True
        file.segments = []
        self._order.forget(file)
        if len(self.by_ino) <= len(self.damaged):
            self._over.notify_all()
        self._tell()

    def _tell(self) -> None:
        """Wake readers."""
        if self._waiting:
            self.changed.notify_all()

    def _wait(self) -> None:
        self._waiting += 1
        try:
            self.changed.wait(_INTERRUPT_SECONDS)
        finally:
            self._waiting -= 1

    def _missing_bytes(self, file: PendingFile) -> int:
        """Return the bytes of the file that still count as left."""
        missing = 0
        for number, segment in enumerate(file.segments):
            start = number * FANOUT * self.block_size
            if segment is None:
                missing += min(FANOUT * self.block_size, file.shape.size_bytes - start)
            else:
                missing += sum(_length_of(file, block, self.block_size) for block in segment)
        return missing

    # -- changes by the job, all of them under the file's lock

    def begin_change(self, file: PendingFile) -> None:
        """Have a journal before anything is changed: without one, another size than the snapshot's is that of an emptied file.

        Raises:
            OSError: it cannot be made.
        """
        if not file.journaled:
            # Durable before the change can be, once for each file.
            self._journals.append(file.name, Change(Kind.TIME, 0, 0, file.mtime_ns), durable=True)
            file.journaled = True

    def written(self, file: PendingFile, start: int, end: int, mtime_ns: int) -> None:
        """Record a write, after its bytes are in the file and before it is answered."""
        self._journals.append(file.name, Change(Kind.WRITE, start, end, mtime_ns))
        file.mtime_ns = mtime_ns
        self._claim(file, start, end)

    @contextlib.contextmanager
    def resizing(self, file: PendingFile, size_bytes: int, before_bytes: int) -> Iterator[None]:
        """Record a new size, which the block sets. It is durable before: after a power cut it may have been set."""
        change = Change(Kind.SIZE, size_bytes, END, file.mtime_ns)
        length = self._journals.append(file.name, change, durable=True)
        try:
            yield
        except BaseException:
            self._journals.cut(file.name, length)
            raise
        self._claim(file, min(size_bytes, before_bytes), END)

    @contextlib.contextmanager
    def emptying(self, file: PendingFile) -> Iterator[None]:
        """Give the file up after the block, which cuts it to nothing."""
        # A link that a power cut brings back must not have the file filled over what was written since.
        recorded = self.resizing(file, 0, 0) if file.journaled else contextlib.nullcontext()
        with recorded:
            yield
        self.drop(file)

    def set_time(self, file: PendingFile, mtime_ns: int) -> None:
        """Record a modification time."""
        if mtime_ns != file.mtime_ns:
            self._journals.append(file.name, Change(Kind.TIME, 0, 0, mtime_ns))
            file.mtime_ns = mtime_ns

    def sync(self, file: PendingFile, sync_content: Callable[[], None]) -> None:
        """Make the content durable by the call, and then the record of what was changed before it.

        The file's lock is not held: a sync takes long.
        """
        if file.gone or not file.journaled:
            sync_content()
            return
        try:
            length = self._journals.length(file.name)
            sync_content()
            with file.io:
                if not file.gone:
                    change = Change(Kind.MARK, length, length, file.mtime_ns)
                    self._journals.append(file.name, change, durable=True)
        except FileNotFoundError:
            # Complete meanwhile, and synced by then; it may have been before the last writes.
            sync_content()

    def is_changed(self, file: PendingFile, block: int) -> bool:
        """Return whether the job has changed all of a block."""
        start = block * self.block_size
        return bool(file.ranges) and file.ranges.covers(
            start, start + _length_of(file, block, self.block_size)
        )

    def _claim(self, file: PendingFile, start: int, end: int) -> None:
        with self.changed:
            file.ranges = file.ranges.add(start, end)
            if file.gone:
                return
            end = min(end, file.shape.size_bytes)
            for block in range(start // self.block_size, blocks_of(end, self.block_size)):
                if self.is_changed(file, block):
                    self._is_there(file, block)
            self._tell()

    def _is_there(self, file: PendingFile, block: int) -> None:
        """Take a block out of what is missing or damaged."""
        was_damaged = file.damaged.pop(block, None) is not None
        segment = file.segments[block // FANOUT]
        if segment is not None and segment.pop(block, None) is not None:
            self.bytes_left -= _length_of(file, block, self.block_size)
            if not segment:
                self._segment_done(file)
        elif was_damaged and not file.left and not file.damaged:
            self.damaged.remove(file)
            self._is_filled(file)

    def length(self, piece: PendingPiece) -> int:
        """Return the number of bytes that a block must have."""
        return _length_of(piece.file, piece.block, self.block_size)

    # -- readers

    def has(self, file: PendingFile, offset: int, size: int) -> bool:
        """Return whether all of a range is there. Takes no lock: a late answer costs a wait that ends at once."""
        if file.gone or file.filled:
            return True
        blocks = self._blocks(file, offset, size)
        segments = file.segments
        for block in blocks:
            number = block // FANOUT
            segment = segments[number] if number < len(segments) else {}
            if (segment is None or block in segment or block in file.damaged) and not self.is_changed(
                file, block
            ):
                # It may have been completed since the first look.
                return file.gone or file.filled
        return True

    def _blocks(self, file: PendingFile, offset: int, size: int) -> range:
        end = min(offset + size, file.shape.size_bytes)
        return range(offset // self.block_size, blocks_of(end, self.block_size)) if size > 0 else range(0)

    def wait(self, file: PendingFile, offset: int, size: int, interrupted: Callable[[], bool]) -> None:
        """Have a range fetched before everything else, and wait for it.

        Raises:
            OSError: EIO for damage and for a store that does not answer, EINTR if ``interrupted``.
        """
        blocks = self._blocks(file, offset, size)
        with self.changed:
            failures = file.failures
            self._order.is_read(file, blocks.stop)
            while not file.gone and not file.filled:
                self._raise_for(file, blocks, failures, interrupted)
                ready, waiting = self._missing(file, blocks)
                if ready:
                    self._urgent.extend(ready)
                    self._work.notify_all()
                elif not waiting:
                    return
                self._wait()

    def wait_until_filled(self, file: PendingFile, interrupted: Callable[[], bool]) -> None:
        """Have a file fetched before others, and wait until all of it is there.

        Raises:
            OSError: as of `wait`.
        """
        with self.changed:
            failures = file.failures
            self._order.is_read(file, file.cursor)
            self._work.notify_all()
            while not file.gone and not file.filled:
                self._raise_for(file, file.damaged, failures, interrupted)
                self._wait()

    def _raise_for(
        self, file: PendingFile, blocks: Iterable[int], failures: int, interrupted: Callable[[], bool]
    ) -> None:
        number = 0
        if file.damaged and any(block in file.damaged for block in blocks):
            number = errno.EIO
        elif file.failures != failures:
            number = file.failure
        elif self.closed:
            number = errno.EIO
        elif interrupted():
            number = errno.EINTR
        if number:
            raise OSError(number, os.strerror(number))

    def _missing(self, file: PendingFile, blocks: range) -> tuple[list[Work], bool]:
        """Return what is to be done for these blocks and is not done by anybody yet, and whether others are at the rest."""
        work: list[Work] = []
        waiting = False
        pieces: list[PendingPiece] = []
        for number in range(blocks.start // FANOUT, blocks_of(blocks.stop, FANOUT)):
            segment = file.segments[number]
            if segment is None:
                if all(self.is_changed(file, block) for block in blocks if block // FANOUT == number):
                    continue
                waiting = True
                if number not in file.loading:
                    file.loading.add(number)
                    work.append(Load(file, number))
                continue
            for block in blocks:
                if block // FANOUT == number and block in segment:
                    waiting = True
                    if block not in file.in_flight:
                        pieces.append(_begin(file, block, segment))
        return ([*work, pieces] if pieces else work), waiting

    # -- fetching

    def take(self, *, urgent_only: bool) -> Work | None:
        """Wait for work and return it; None when the table is closed."""
        with self.changed:
            while not self.closed:
                work = self._urgent.popleft() if self._urgent else None
                if work is None and not urgent_only:
                    work = self._order.next()
                if work is not None:
                    return work
                self._work.wait()
            return None

    def loaded(self, file: PendingFile, number: int, missing: dict[int, ChunkId], end: int) -> None:
        """Take the missing blocks of a leaf; the leaf ends before block ``end``."""
        with self.changed:
            file.loading.discard(number)
            if not file.gone and file.segments[number] is None:
                missing = {
                    block: chunk for block, chunk in missing.items() if not self.is_changed(file, block)
                }
                start = number * FANOUT * self.block_size
                size_bytes = min(end * self.block_size, file.shape.size_bytes) - start
                self.bytes_left -= size_bytes - sum(
                    _length_of(file, block, self.block_size) for block in missing
                )
                file.segments[number] = missing
                if not missing:
                    self._segment_done(file)
            self._order.again(file)
            self._work.notify_all()
            self._tell()

    def done(self, piece: PendingPiece) -> None:
        """Note that a block was written."""
        file = piece.file
        with self.changed:
            file.in_flight.discard(piece.block)
            if file.gone:
                return
            self._is_there(file, piece.block)
            self._tell()

    def _segment_done(self, file: PendingFile) -> None:
        file.left -= 1
        if file.left:
            return
        self._order.forget(file)
        if file.damaged:
            self.damaged.append(file)
            self._over.notify_all()
        else:
            self._is_filled(file)

    def _is_filled(self, file: PendingFile) -> None:
        file.filled = True
        self._filled.append(file)
        self._ended.notify()

    def is_damaged(self, file: PendingFile, blocks: Iterable[int], reason: str) -> None:
        """Note that blocks cannot be restored, now or later."""
        with self.changed:
            for block in blocks:
                file.in_flight.discard(block)
                if self.is_changed(file, block):
                    continue
                file.damaged.setdefault(block, reason)
                if file.gone:
                    continue
                segment = file.segments[block // FANOUT]
                if segment is not None and segment.pop(block, None) is not None:
                    self.bytes_left -= _length_of(file, block, self.block_size)
                    if not segment:
                        self._segment_done(file)
            self._tell()

    def failed(self, work: Work, number: int) -> None:
        """Put work back that could not be done; readers who wait for it get the error ``number``."""
        with self.changed:
            pieces = [] if isinstance(work, Load) else work
            files = {work.file} if isinstance(work, Load) else {piece.file for piece in pieces}
            for piece in pieces:
                piece.file.in_flight.discard(piece.block)
            if isinstance(work, Load):
                work.file.loading.discard(work.segment)
            for file in files:
                file.failures += 1
                file.failure = number
                self._order.again(file)
            self._work.notify_all()
            self._tell()

    # -- the end of files

    def take_filled(self, count: int) -> list[PendingFile] | None:
        """Wait for files that are filled, and return some, marked as settling; None when the table is closed."""
        with self.changed:
            while not self._filled and not self.closed:
                self._ended.wait()
            if self.closed:
                return None
            files: list[PendingFile] = []
            size_bytes = 0
            while self._filled and len(files) < count and size_bytes < MAX_BATCH_BYTES:
                file = self._filled.popleft()
                if not file.gone and not file.settling:
                    file.settling = True
                    files.append(file)
                    size_bytes += file.shape.size_bytes
            return files

    def begin_settling(self, file: PendingFile) -> bool:
        """Mark a filled file as settling; False if it is complete. Waits for another thread that settles it."""
        with self.changed:
            while file.settling and not file.gone and not self.closed:
                self._wait()
            if file.gone:
                return False
            if self.closed:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            file.settling = True
            return True

    def not_settled(self, file: PendingFile) -> None:
        """Take back that a file is being settled; another attempt follows."""
        with self.changed:
            file.settling = False
            if not file.gone:
                self._filled.append(file)
                self._ended.notify()
            self._tell()

    @property
    def is_over(self) -> bool:
        """True if nothing is left to fetch and to settle."""
        with self.changed:
            return len(self.by_ino) <= sum(not file.gone for file in self.damaged)

    def wait_for_end(self, timeout_seconds: float) -> bool:
        """Wait until nothing is left; return whether that is so."""
        with self.changed:
            self._over.wait_for(lambda: self.is_over or self.closed, timeout_seconds)
            return self.is_over

    def files(self) -> Iterator[PendingFile]:
        """Return all incomplete files now."""
        with self.changed:
            return iter(list(self.by_ino.values()))

    def close(self) -> None:
        """End every wait."""
        with self.changed:
            self.closed = True
            for condition in (self.changed, self._work, self._ended, self._over):
                condition.notify_all()
