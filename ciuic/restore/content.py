"""Content of regular files: chunks written to a new file or shared with it, or compared with an existing one.

Guarantees: every chunk is checked against its id before a byte of it is written or shared, and against the length that its
position in the file implies. Zeros become holes. Memory is one buffer, whatever the size of the file.

Extents of packs are shared with restored files where both are on one file system that supports it (XFS, btrfs). After a refusal
of the file system it is not asked again. The caller writes what cannot be shared.

A protected root shows its files through a FUSE mount, which forwards no clone ioctl to the disk. For files that are restored in
place the overlay worker is asked to clone instead (request ``share``, docs/architecture.md section 3). Why the result is exact:

* The file is created, resized, given its attributes, synced and renamed through the overlay, as any other file. The cut, the
  undo log, names, owners and the kernel's caches of names and attributes therefore stay in the hands of the overlay.
* Only the content takes the other way. The worker clones inside the gate, after it has marked what it changes, and then has the
  kernel invalidate its cache of the range. The file's size does not change, so the kernel knows it beforehand.
* The source is a descriptor that this process has open for reading, and the target is a file that it has open for writing
  through that very mount. The request therefore grants nothing that read(2) and write(2) would not.
* After a request whose outcome is unknown (the worker died), the same bytes are written.

Content is written as usual where no worker answers, the worker cannot share, or the caller may not ask it.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from ciuic.errors import Damaged, NotFound
from ciuic.repository.block_maps import blocks_of
from ciuic.repository.errors import DamagedTree
from ciuic.repository.identity import is_zero
from ciuic.repository.pack_format import ALIGN_BYTES, CODED_FLAGS
from ciuic.system import mountinfo
from ciuic.system.disk import clone_range, write_all
from ciuic.types import ChunkId, Entry

if TYPE_CHECKING:
    import ctypes

    from ciuic.protocol.worker_frames import Share
    from ciuic.repository import Repository
    from ciuic.repository.bulk_reader import ReadChunk
    from ciuic.repository.model import ChunkLocation


# _IOW(0x94, 9, int), linux/fs.h.
_FICLONE = 0x40049409
# Errors by which a file system says that it cannot share these extents; others, such as ENOSPC, are raised.
# EPERM: the target is immutable. ETXTBSY: one of the two is a swap file (ioctl_ficlonerange(2)).
_REFUSED = (
    errno.EOPNOTSUPP,
    errno.ENOTTY,
    errno.EXDEV,
    errno.EINVAL,
    errno.ENOSYS,
    errno.EPERM,
    errno.ETXTBSY,
)


class Sharing:
    """Shares extents, and remembers which file systems can; for one thread.

    Args:
        runtime_dir: directory of the overlay workers' sockets; None asks no worker.
    """

    def __init__(self, runtime_dir: Path | None = None) -> None:
        self._able: dict[int, bool] = {}
        """st_dev → whether sharing worked the last time."""
        self._runtime_dir = runtime_dir
        self._overlays: dict[int, OverlaySharing | None] = {}

    def may(self, fd: int) -> bool:
        """Return whether sharing with this file is worth a try: it worked on its file system, or was not tried yet."""
        return self._able.get(os.fstat(fd).st_dev, True)

    def is_known(self, fd: int) -> bool:
        """Return whether sharing has worked on the file system of this file."""
        return self._able.get(os.fstat(fd).st_dev, False)

    def share(self, source: int, source_offset: int, fd: int, offset: int, length: int) -> bool:
        """Share a range; return whether the file system did so. OSError, such as ENOSPC."""
        overlay = self._overlay(fd)
        if overlay is None:
            return self._try(fd, lambda: clone_range(source, source_offset, length, fd, offset))
        shared = overlay.share(source, source_offset, fd, offset, length)
        self._able[os.fstat(fd).st_dev] = shared
        return shared

    def may_clone(self, fd: int) -> bool:
        """Return whether `clone` is worth a try for this file. Overlay workers do not clone whole files."""
        return self.may(fd) and self._overlay(fd) is None

    def clone(self, source: int, fd: int) -> bool:
        """Clone the whole content of ``source``, as of one instant; return whether the file system did so. OSError."""
        return self._try(fd, lambda: fcntl.ioctl(fd, _FICLONE, source))

    def prepare(self, fd: int, size_bytes: int) -> None:
        """Set the size of a new file that several threads are going to fill through an overlay. OSError."""
        # The worker refuses ranges beyond the end, and each thread that made the file longer could cut what
        # others shared.
        if size_bytes and self._overlay(fd) is not None:
            os.ftruncate(fd, size_bytes)

    def close(self) -> None:
        """Close the connections to overlay workers."""
        for overlay in self._overlays.values():
            if overlay is not None:
                overlay.close()

    def _overlay(self, fd: int) -> OverlaySharing | None:
        if self._runtime_dir is None:
            return None
        device = os.fstat(fd).st_dev
        # Disks have a major number; only anonymous devices can be overlays.
        if os.major(device):
            return None
        # Looked up once for each file system.
        if device not in self._overlays:
            self._overlays[device] = find(device, self._runtime_dir)
        return self._overlays[device]

    def _try(self, fd: int, call: Callable[[], object]) -> bool:
        device = os.fstat(fd).st_dev
        try:
            call()
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self._able[device] = False
            return False
        self._able[device] = True
        return True


_FS_TYPE = b"fuse.ciuic"
_TIMEOUT_SECONDS = 20.0
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG)
"""Errors of the disk itself: writing the bytes instead would meet them again."""


class OverlaySharing:
    """Requests to the overlay worker of one mount; for one thread."""

    def __init__(self, device: str, socket_path: Path) -> None:
        # Imported here, as below: only a restore over an overlay asks a worker, and needs sockets (3 ms).
        from ciuic.protocol.worker_client import WorkerControlClient

        self._device = device
        self._client = WorkerControlClient(socket_path, timeout_seconds=_TIMEOUT_SECONDS)

    def share(self, source: int, source_offset: int, fd: int, offset: int, length: int) -> bool:
        """Return whether the range of ``fd`` now shares its extents with the source.

        The file grows to the end of the range; a file that several threads fill has its final size already.

        Raises:
            OSError: the disk cannot take the content, because it is full for instance.
        """
        from ciuic.protocol.worker_frames import Share

        now = os.fstat(fd)
        # The worker refuses a range beyond the end of the file, because a clone must not change the size.
        if now.st_size < offset + length:
            os.ftruncate(fd, offset + length)
        request = Share(
            device=self._device, node=now.st_ino, source_offset=source_offset, offset=offset, length=length
        )
        code = self._ask(request, source)
        if code == errno.EINVAL:
            # With the kernel's write-back cache on, the worker may not know the file's length yet: set it again.
            os.ftruncate(fd, max(now.st_size, offset + length))
            code = self._ask(request, source)
        if code in _DISK_ERRORS:
            raise OSError(code, os.strerror(code))
        return code == 0

    def _ask(self, request: Share, source: int) -> int:
        """Send the request; return 0 or the errno of the refusal."""
        from ciuic.protocol.worker_client import WorkerRefused, WorkerUnreachable

        try:
            self._client.share(request, source)
        # The outcome is unknown: the caller writes the same bytes, so it does not matter whether they were
        # shared.
        except WorkerUnreachable:
            return errno.ENOTCONN
        except WorkerRefused as error:
            return error.errno or errno.EOPNOTSUPP
        return 0

    def close(self) -> None:
        """Close the connection to the worker."""
        self._client.close()


def find(device: int, runtime_dir: Path) -> OverlaySharing | None:
    """Return the overlay whose files have this ``st_dev``, or None for any other file system."""
    # FUSE mounts have anonymous device numbers, whose major is 0.
    if os.major(device):
        return None
    numbers = (os.major(device), os.minor(device))
    try:
        mounts = mountinfo.read()
    except OSError:
        return None
    from ciuic.protocol.worker_frames import worker_socket

    for mount in mounts:
        if mount.fs_type == _FS_TYPE and mount.device == numbers:
            path = worker_socket(runtime_dir, mount.mount_point)
            # A bind mount of a root has the same device number and no socket of its own.
            if path.exists():
                return OverlaySharing("{}:{}".format(*numbers), path)
    return None


# Size of a batch: looked up with one query, announced to the kernel (WILLNEED) and written at once.
_MAX_BATCH_BYTES = 8 << 20
_MAX_BATCH_BLOCKS = 128
_PAGE_BYTES = 4096
_SYNC_FILE_RANGE_WRITE = 2
_PUNCH_HOLE = 2 | 1
"""FALLOC_FL_PUNCH_HOLE with FALLOC_FL_KEEP_SIZE, without which fallocate(2) refuses it."""
_ZERO_PAGE = bytes(_PAGE_BYTES)
# Searched for before a page of zeros: hardly any data has so many, and the search takes half the time (4 us for 256 KiB).
_SOME_ZEROS = bytes(256)
_READ_BYTES = 1 << 20
# Reading more zeros than this to compare a hole costs more than writing the file anew.
_MAX_ZEROS_READ_BYTES = 64 << 20


@cache
def _libc() -> ctypes.CDLL:
    # Imported here: a dry run needs no ctypes (2 ms).
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    # Python has no wrapper for these calls. Without the types ctypes passes an integer as 32 bits, which cuts off
    # offsets from 2 GiB on.
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return libc


class Batch(msgspec.Struct, frozen=True):
    """A range of a file: consecutive blocks with data, and the holes around them."""

    start: int
    """Offset of the first byte in the range."""
    end: int
    """Offset of the first byte after the range."""
    blocks: list[tuple[int, ChunkId]]
    """(block number, chunk) of each block with data."""


def batch_blocks(block_size: int) -> int:
    """Return the number of blocks in a batch: the unit of work of a thread, and what is written at once."""
    return max(1, min(_MAX_BATCH_BLOCKS, _MAX_BATCH_BYTES // block_size))


def batches(repository: Repository, entry: Entry) -> Iterator[Batch]:
    """Divide the whole file into batches; a file without data is one batch without blocks."""
    size, block_size = entry.size_bytes, repository.block_size
    ids = repository.block_maps.ids(entry.content, entry.map_height, blocks_of(size, block_size))
    max_blocks = batch_blocks(block_size)
    start, blocks = 0, []
    for block, chunk in ids:
        blocks.append((block, chunk))
        if len(blocks) == max_blocks:
            end = min((block + 1) * block_size, size)
            yield Batch(start, end, blocks)
            start, blocks = end, []
    if blocks or start < size:
        yield Batch(start, size, blocks)


class WritableFile(Protocol):
    """A file that is being written."""

    @property
    def fd(self) -> int:
        """Descriptor of the file; -1 when it is given up."""
        ...

    def fail(self, error: OSError | Damaged) -> None:
        """Give the file up because of an error."""
        ...


class FileBlock(msgspec.Struct, frozen=True):
    """A block that is to be written to a file."""

    file: WritableFile
    offset: int
    length: int
    block: int
    chunk: ChunkId


class _Unshared(msgspec.Struct, frozen=True):
    """A block that was read and verified, and is to be shared as extents of its pack."""

    part: FileBlock
    location: ChunkLocation
    length: int


class _InPack(msgspec.Struct, frozen=True):
    """A block of a file whose bytes a pack has as they are."""

    block: int
    chunk: ChunkId
    location: ChunkLocation
    start: int
    end: int


class BlockWorker:
    """Reads chunks of one repository, and writes or compares files; for one thread."""

    def __init__(
        self,
        repository: Repository,
        check: Callable[[], None],
        runtime_dir: Path | None = None,
        turns: AbstractContextManager[object] | None = None,
    ) -> None:
        self.repository = repository
        self.check = check
        """Function called between blocks; raises when the work is to end."""
        self._turns = turns or nullcontext()
        self._has_turn = False
        self._buffer = bytearray()
        self._sharing = Sharing(runtime_dir)
        self._unshared: list[_Unshared] = []
        """Blocks that are adjacent in the pack and in the file."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Occupy one of the places for threads that compute; the disk should be asked before, by readahead."""
        # Small files are compared within a turn: waiting for a second one could wait for ever.
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
        """Close the repository and the connections to overlay workers."""
        self.repository.close()
        self._sharing.close()

    def write(self, parts: Sequence[FileBlock]) -> None:
        """Write blocks to files that read as zeros so far, in the order of their positions in the packs.

        An error of one file is given to its `fail`, and the others go on.

        Raises:
            OSError: the repository cannot be read.
        """
        # Returned in the order of their positions in the packs, so that the disk reads forwards.
        pieces = self.repository.bulk.read([part.chunk for part in parts])
        with self.turn():
            for piece in pieces:
                part = parts[piece.position]
                # A file that has failed is closed, and its descriptor number may belong to another file by now.
                if part.file.fd < 0:
                    continue
                try:
                    self._write(part, piece)
                except (OSError, Damaged) as error:
                    part.file.fail(error)
            self._share_waiting()

    def _write(self, part: FileBlock, piece: ReadChunk) -> None:
        source, start, end = piece.source, piece.start, piece.end
        if source is None:
            source = self.repository.chunks.get(part.chunk)
            start, end = 0, len(source)
        if end - start != part.length:
            text = f"block {part.block} must have {part.length} bytes, its chunk has {end - start}"
            raise DamagedTree(part.chunk, text)
        # Shared only now, after the chunk was read and checked: sharing without reading would restore a damaged sector as the file.
        shared = self._sharable(part, piece)
        if shared:
            assert piece.location is not None
            self._wait_to_be_shared(part, piece.location, shared)
        if shared < part.length:
            write_sparse(part.file.fd, source, start + shared, end, part.offset + shared)

    def _sharable(self, part: FileBlock, piece: ReadChunk) -> int:
        """Return how many bytes at the block's beginning can be shared as extents of the pack."""
        location, source = piece.location, piece.source
        # A compressed chunk, or one that is stored as a difference, has no extents with the file's bytes.
        if location is None or not piece.is_raw or source is None:
            return 0
        # Blocks with pages of zeros are written, so that these pages become holes.
        if has_zero_page(source, piece.start, piece.end):
            return 0
        return self._sharable_at(part, location)

    def _sharable_at(self, part: FileBlock, location: ChunkLocation) -> int:
        # FICLONERANGE takes whole blocks of both files only.
        if location.offset % ALIGN_BYTES or part.offset % ALIGN_BYTES or part.length < ALIGN_BYTES:
            return 0
        if not self._sharing.may(part.file.fd):
            return 0
        # The first block on a file system is tried with one unit, before many are gathered for one call.
        if self._sharing.is_known(part.file.fd) or self._share(part, location, ALIGN_BYTES):
            return part.length - part.length % ALIGN_BYTES
        return 0

    def _wait_to_be_shared(self, part: FileBlock, location: ChunkLocation, length: int) -> None:
        """Gather the block: adjacent blocks are shared with one system call."""
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
        # The file may have failed since its blocks were gathered, and its descriptor number may belong to another file.
        if not waiting or waiting[0].part.file.fd < 0:
            return
        first = waiting[0]
        try:
            if not self._share(first.part, first.location, sum(unshared.length for unshared in waiting)):
                # Refused after it had worked before: the blocks are read again and written, one by one.
                for one in waiting:
                    data = self.repository.chunks.get(one.part.chunk)
                    write_sparse(one.part.file.fd, data, 0, one.length, one.part.offset)
        except (OSError, Damaged) as error:
            first.part.file.fail(error)

    def _share(self, part: FileBlock, location: ChunkLocation, length: int) -> bool:
        try:
            pack = self.repository.bulk.packs.descriptor(location.pack)
        except NotFound:
            # `ciuic prune` removed the pack meanwhile, after it had copied the live chunks to another one.
            return False
        return self._sharing.share(pack, location.offset, part.file.fd, part.offset, length)

    def equal(self, fd: int, entry: Entry, batch: Batch, *, patient: bool = False) -> bool:
        """Return whether the file has the batch's content.

        Unless ``patient``, also False where so many zeros are stored as data that writing the file anew costs less than
        reading them.
        """
        limit = batch.end if patient else _MAX_ZEROS_READ_BYTES
        at = batch.start
        # Before the turn: the disk works while this thread waits for one. A single block is read right away by a thread that has
        # its turn, as most small files are.
        if not self._has_turn or len(batch.blocks) > 1:
            will_need(fd, batch)
        with self.turn():
            for block, chunk in batch.blocks:
                self.check()
                start, end = self._extent(entry, block)
                if not zeros(fd, at, start, limit) or not self._has(fd, start, end, chunk):
                    return False
                at = end
            return zeros(fd, at, batch.end, limit)

    def repair(self, file: WritableFile, entry: Entry, batch: Batch) -> int:
        """Correct the batch's content in a file that no other process writes; return how many bytes were different."""
        fd, at, wrong, wrong_bytes = file.fd, batch.start, [], 0
        right = self._right_in_packs(file, entry, batch)
        if len(right) < len(batch.blocks):
            will_need(fd, batch)
        with self.turn():
            for block, chunk in batch.blocks:
                self.check()
                start, end = self._extent(entry, block)
                wrong_bytes += self._cleared(fd, at, start)
                if block not in right and not self._has(fd, start, end, chunk):
                    # `write` leaves pages of zeros out, so the old content must be gone before.
                    punch_hole(fd, start, end)
                    wrong.append((block, chunk))
                    wrong_bytes += end - start
                at = end
            wrong_bytes += self._cleared(fd, at, batch.end)
        if wrong:
            self.write(
                list(
                    file_blocks(
                        file, entry, msgspec.structs.replace(batch, blocks=wrong), self.repository.block_size
                    )
                )
            )
        return wrong_bytes

    def _right_in_packs(self, file: WritableFile, entry: Entry, batch: Batch) -> set[int]:
        """Return the blocks that share their extents with the packs, and are right there.

        The packs' bytes are checked in place of the file's: they are the same blocks of the disk, but a new clone has nothing in
        the page cache, where the packs often are.
        """
        found = self.repository.bulk.locate([chunk for _, chunk in batch.blocks])
        shared: list[_InPack] = []
        for run in self._runs_in_packs(entry, batch, found):
            # One look for neighbours; one for each where they are not all shared.
            if self._is_of_pack(file.fd, run):
                shared += run
            elif len(run) > 1:
                shared += [one for one in run if self._is_of_pack(file.fd, [one])]
        pieces = self.repository.bulk.read([one.chunk for one in shared])
        right = set()
        with self.turn():
            for piece in pieces:
                self.check()
                one = shared[piece.position]
                # Only of the copy that the file shares.
                if piece.source is not None and piece.location == one.location:
                    right.add(one.block)
        return right

    def _runs_in_packs(
        self, entry: Entry, batch: Batch, found: dict[bytes, ChunkLocation]
    ) -> Iterator[list[_InPack]]:
        """Yield the blocks that packs have as they are, those together that lie one after the other in pack and file."""
        run: list[_InPack] = []
        for block, chunk in batch.blocks:
            start, end = self._extent(entry, block)
            location = found.get(chunk)
            if location is None or not _has_content(location, end - start):
                continue
            if location.offset % ALIGN_BYTES or start % ALIGN_BYTES:
                continue
            last = run[-1] if run else None
            if last is not None and not (
                last.location.pack == location.pack
                and last.location.offset + last.end - last.start == location.offset
                and last.end == start
            ):
                yield run
                run = []
            run.append(_InPack(block, chunk, location, start, end))
        if run:
            yield run

    def _is_of_pack(self, fd: int, run: list[_InPack]) -> bool:
        """Return whether the file shares the extents of the blocks in their pack, and has the same bytes after the last whole page."""
        # Imported here: only of a clone whose content is to be corrected.
        from ciuic.repository.extent_sharing import share_extents

        try:
            pack = self.repository.bulk.packs.descriptor(run[0].location.pack)
        except NotFound:
            return False
        start, length, offset = run[0].start, run[-1].end - run[0].start, run[0].location.offset
        rest = length % ALIGN_BYTES
        whole = length - rest
        if not whole or not share_extents(fd, start, pack, offset, whole):
            return False
        return not rest or os.pread(fd, rest, start + whole) == os.pread(pack, rest, offset + whole)

    def replace(self, file: WritableFile, entry: Entry, batch: Batch) -> None:
        """Write the whole batch without comparing it first."""
        punch_hole(file.fd, batch.start, batch.end)
        self.write(list(file_blocks(file, entry, batch, self.repository.block_size)))

    def _extent(self, entry: Entry, block: int) -> tuple[int, int]:
        start = block * self.repository.block_size
        return start, min(start + self.repository.block_size, entry.size_bytes)

    def _has(self, fd: int, start: int, end: int, chunk: ChunkId) -> bool:
        """Return whether the range has the content of this chunk."""
        if len(self._buffer) < end - start:
            self._buffer = bytearray(end - start)
        view = memoryview(self._buffer)[: end - start]
        # A short read means that the file ends before the block: then it is different.
        return os.preadv(fd, [view], start) == len(view) and self.repository.identity.chunk_id(view) == chunk

    def _cleared(self, fd: int, start: int, end: int) -> int:
        """Make the range a hole unless it reads as zeros; return how many bytes were different."""
        if zeros(fd, start, end, _MAX_ZEROS_READ_BYTES):
            return 0
        punch_hole(fd, start, end)
        return end - start


def _has_content(location: ChunkLocation, length: int) -> bool:
    """Return whether the index says that the pack has the content as it is, in this length."""
    return not location.flags & CODED_FLAGS and location.raw_bytes == location.stored_bytes == length


def file_blocks(file: WritableFile, entry: Entry, batch: Batch, block_size: int) -> Iterator[FileBlock]:
    """Return the blocks of a batch with their positions in the file."""
    for block, chunk in batch.blocks:
        offset = block * block_size
        yield FileBlock(file, offset, min(block_size, entry.size_bytes - offset), block, chunk)


def has_zero_page(source: bytes | bytearray, start: int, end: int) -> bool:
    """Return whether there is a run of zeros as long as a page, at any offset."""
    return source.find(_SOME_ZEROS, start, end) >= 0 and source.find(_ZERO_PAGE, start, end) >= 0


def write_sparse(fd: int, source: bytes | bytearray, start: int, end: int, offset: int) -> None:
    """Write source[start:end] to a file that reads as zeros; pages of zeros are not written, so they stay holes."""
    view = memoryview(source)
    if not has_zero_page(source, start, end):
        write_all(fd, view[start:end], offset)
        return
    shift = offset - start
    at = start
    while at < end:
        if source.startswith(_ZERO_PAGE, at, end):
            write_all(fd, view[start:at], start + shift)
            start = at + _PAGE_BYTES
        at += _PAGE_BYTES
    write_all(fd, view[start:end], start + shift)


def will_need(fd: int, batch: Batch) -> None:
    """Start readahead of the batch.

    Several threads read one file in several places, which the kernel's own readahead takes for random access.
    """
    # Advice only: without it the batch is read when it is needed.
    with suppress(OSError):
        os.posix_fadvise(fd, batch.start, batch.end - batch.start, os.POSIX_FADV_WILLNEED)


def punch_hole(fd: int, start: int, end: int) -> None:
    """Make a range read as zeros and release its space. OSError."""
    if end > start and _libc().fallocate(fd, _PUNCH_HOLE, start, end - start):
        import ctypes

        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def start_writing_out(fd: int, offset: int, length: int) -> None:
    """Start writing a range to the disk, so that a later sync finds little left to do."""
    # The result is ignored: fsync reports the same write errors.
    _libc().sync_file_range(fd, offset, length, _SYNC_FILE_RANGE_WRITE)


def zeros(fd: int, start: int, end: int, limit_bytes: int) -> bool:
    """Return whether a range reads as zeros; False after ``limit_bytes`` of data. Holes are skipped unread."""
    read_bytes = 0
    while start < end:
        try:
            start = max(start, os.lseek(fd, start, os.SEEK_DATA))
        except OSError as error:
            # ENXIO: no data from here to the end of the file. The other codes: the file system knows no holes.
            if error.errno == errno.ENXIO:
                return True
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
        if start >= end:
            return True
        # Data that may still be zeros: an unwritten extent, or zeros that were written.
        data = os.pread(fd, min(_READ_BYTES, end - start), start)
        read_bytes += len(data)
        if not data or not is_zero(data) or read_bytes > limit_bytes:
            return False
        start += len(data)
    return True
