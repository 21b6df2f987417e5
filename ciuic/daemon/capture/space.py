"""Free space for a capture: checked before anything is written, kept while it writes, and handled when it runs out.

Guarantees: a root is refused beforehand only where the minimum that it can take (each content once,
compressed as well as samples of it) is more than the free space; in doubt the capture is tried, and
`ReservedDisk` ends it. Before each write that asks the file system how much an ordinary process could still use
(f_bavail); a write that would go below the reserve is refused whole, as ENOSPC. Deleting and truncating are
never refused, nor is anything else that takes no space. A failure for want of space removes what was written
(`Writer.give_back`), and its message says how much is missing and what helps.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, suppress
from typing import Any, Final

import structlog
import zstandard

from ciuic import STATE_DIR_NAME
from ciuic.daemon.capture.job import CaptureJob
from ciuic.errors import CiuicError
from ciuic.excludes import ExcludeMatcher
from ciuic.printable import path_text
from ciuic.repository import Repository, Writer
from ciuic.repository.extent_sharing import can_share
from ciuic.repository.identity import Bytes
from ciuic.system.disk import READ_DIRECTORY, READ_FILE, Disk
from ciuic.system.disk_space import available_bytes, total_bytes
from ciuic.system.mountinfo import MountBorders
from ciuic.units import human_size

# Margin on top of the reserve, for what is not checked beforehand: the index (SQLite writes it, and its WAL
# grows to 4 MiB), the file of the snapshot, the file system's own blocks.
_MARGIN_SHARE: Final = 0.01
_MIN_MARGIN_BYTES: Final = 256 << 10
_MAX_MARGIN_BYTES: Final = 16 << 20


class ReserveReached(OSError):
    """A write was refused because it would leave others less than the reserve."""

    def __init__(self, path: str, available_bytes: int, reserve_bytes: int, wanted_bytes: int) -> None:
        super().__init__(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        self.available_bytes = available_bytes
        self.reserve_bytes = reserve_bytes
        self.wanted_bytes = wanted_bytes
        """Size of the refused write."""


class ReservedDisk(Disk):
    """The real disk as far as the reserve allows; several threads may write."""

    def __init__(self, path: str, reserve_bytes: int) -> None:
        """Make a disk with a reserve; ``path`` is anything on the file system."""
        self._path = path
        self.reserve_bytes = reserve_bytes
        self.refused: ReserveReached | None = None
        """First refusal; an appender repeats it as a plain OSError."""
        # Lock for `_under_way_bytes`: data and trees are written by two threads, which together must not use
        # what was free for one of them.
        self._lock = threading.Lock()
        self._under_way_bytes = 0

    @functools.cached_property
    def margin_bytes(self) -> int:
        """Space beside the reserve that stays free for what is written without a check."""
        if not self._keeps_reserve:
            return 0
        return max(_MIN_MARGIN_BYTES, min(int(_MARGIN_SHARE * total_bytes(self._path)), _MAX_MARGIN_BYTES))

    @functools.cached_property
    def _keeps_reserve(self) -> bool:
        """False without a reserve, and on a file system that does not report its size.

        Some network file systems do not: there ENOSPC decides.
        """
        return self.reserve_bytes > 0 and total_bytes(self._path) > 0

    def check(self, wanted_bytes: int = 0, margin_bytes: int = 0) -> None:
        """Raise ReserveReached if this many more bytes would leave less than the reserve and the margin.

        Raises:
            OSError: the file system cannot be asked.
        """
        if not self._keeps_reserve:
            return
        # Asked anew for every write: what other processes have taken meanwhile counts.
        available = available_bytes(self._path)
        if available - wanted_bytes - margin_bytes < self.reserve_bytes:
            refusal = ReserveReached(self._path, available, self.reserve_bytes, wanted_bytes)
            self.refused = self.refused or refusal
            raise refusal

    @property
    def room_bytes(self) -> int:
        """Number of bytes that may still be written; 0 or less if none may.

        Raises:
            OSError: the file system cannot be asked.
        """
        if not self._keeps_reserve:
            return sys.maxsize
        return available_bytes(self._path) - self.reserve_bytes - self.margin_bytes

    def write_at(self, fd: int, parts: Iterable[Bytes], offset: int) -> int:
        """Write the parts unless they would reach into the reserve.

        Raises:
            ReserveReached: the write would reach into the reserve.
            OSError: the file system cannot be asked.
        """
        # A list, because an iterator could not be counted first and written afterwards.
        pending = list(parts)
        length = sum(memoryview(part).nbytes for part in pending)
        with self._lock:
            self.check(self._under_way_bytes + length, self.margin_bytes)
            self._under_way_bytes += length
        try:
            return super().write_at(fd, pending, offset)
        finally:
            # Whether it was written or failed, f_bavail says the truth about these bytes from here on.
            with self._lock:
                self._under_way_bytes -= length

    def replace_file(self, path: str | bytes | os.PathLike[str], data: bytes, **options: Any) -> None:
        """Replace the file out of the margin, without a check.

        When a snapshot's file is written, everything it names is on the disk, and a refusal would waste that
        for a few kilobytes.
        """
        Disk().replace_file(path, data, **options)


_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
# One page.
_SAMPLE_BYTES: Final = 4096
# Samples in a doubling of the counted bytes. A sample stands for a 64th of what was counted so far, so that
# no part of a tree is judged by a distant one. About 2,000 reads in a tree of any size.
_SAMPLES_PER_DOUBLING: Final = 64
# Size from which on files of the same size may be copies of each other (checkpoints are), and are
# distinguished by a sample.
_COMPARED_FROM_BYTES: Final = 256 << 10
# Files that are compared; further ones of a known size count as copies, because a minimum is estimated.
_MAX_COMPARED: Final = 2048
# Share of the estimate that must not fit for a refusal: samples may be wrong by some percent, and a wrong
# refusal costs a snapshot.
_SURE_SHARE: Final = 0.8
# Levels of directories that are counted: each costs two descriptors, and deeper ones may be omitted from a
# minimum.
_MAX_LEVELS: Final = 256
_log = structlog.get_logger(__name__)


class NoRoom(CiuicError):
    """The snapshot does not fit into the free space without the reserve."""

    def __init__(self, message: str, *, hint: str, needed_bytes: int, is_final: bool) -> None:
        super().__init__(message, hint=hint)
        self.is_final = is_final
        """True if there is no older snapshot whose removal could make room."""
        self.needed_bytes = needed_bytes
        """Free space that another attempt needs before it writes; 0: it finds out without writing."""


class CaptureRoom:
    """Free space of one capture."""

    def __init__(self, job: CaptureJob) -> None:
        self._job = job
        self.disk = ReservedDisk(job.repository, job.reserve_bytes)
        self._has_snapshots = False

    def check_first(self, repository: Repository) -> None:
        """Raise NoRoom where the minimum that an earlier attempt has shown to be needed does not fit.

        May raise OSError.
        """
        self._has_snapshots = bool(repository.snapshots.names())
        if self.disk.room_bytes < self._job.needed_bytes:
            raise self.refusal(self._job.needed_bytes, needed_next=self._job.needed_bytes)

    def check(self) -> None:
        """Raise OSError (ENOSPC) where others have used so much meanwhile that the reserve is reached."""
        self.disk.check()

    def check_root(
        self, path: bytes, backing_fd: int, excludes: ExcludeMatcher, step: Callable[[], None]
    ) -> None:
        """Refuse a root that is captured for the first time and cannot fit.

        Args:
            path: path of the root, for the message.
            backing_fd: its directory.
            excludes: excludes of the root.
            step: called often; may raise to stop.

        Raises:
            NoRoom: the root cannot fit.
            OSError: the root cannot be read.
        """
        room_bytes = self.disk.room_bytes
        facts = os.fstatvfs(backing_fd)
        if (facts.f_blocks - facts.f_bfree) * facts.f_frsize <= room_bytes:
            return  # the whole content of its file system would fit
        repository = os.stat(self._job.repository)
        if os.fstat(backing_fd).st_dev == repository.st_dev and can_share(self._job.repository):
            return  # shared extents take no space
        measure = _Measure()
        with closing(_files(backing_fd, excludes, (repository.st_dev, repository.st_ino))) as files:
            for name, fd in files:
                step()
                measure.add(name, fd)
                if measure.sure_bytes > room_bytes:
                    raise self.refusal(
                        measure.sure_bytes,
                        f"{path_text(path)} takes at least {human_size(measure.sure_bytes)}",
                    )

    def failed(self, error: OSError, writer: Writer) -> OSError | NoRoom:
        """Return the exception to raise for an error of the repository.

        Remove what was written first, for want of space.
        """
        if error.errno not in _FULL:
            return error
        written_bytes = writer.new_bytes
        self.give_back(writer)
        refused = self.disk.refused
        if refused is None:
            reached = f" ({os.strerror(error.errno)})"
            return self.refusal(written_bytes, reached=reached, needed_next=written_bytes)
        # What was written fitted: the shortage begins with the write that was refused.
        return self.refusal(written_bytes + refused.wanted_bytes, needed_next=written_bytes)

    def give_back(self, writer: Writer) -> None:
        """Remove what the capture has written, as far as the disk permits."""
        try:
            _log.info("capture_gave_back", freed_bytes=writer.give_back())
        except OSError as error:
            _log.warning("capture_not_given_back", error=str(error))

    def refusal(self, needed_bytes: int, why: str = "", *, reached: str = "", needed_next: int = 0) -> NoRoom:
        """Return the failure with its message.

        Args:
            needed_bytes: minimum that the snapshot takes.
            why: reason for that number; empty where an attempt had written as much and was not done.
            reached: error of the disk, where it was not the reserve.
            needed_next: free space that another attempt needs before it writes.
        """
        job, available = self._job, available_bytes(self._job.repository)
        words = [
            why or f"it needs more than {human_size(needed_bytes + self.disk.margin_bytes)}",
            f"{human_size(available)} is free on the file system of {job.repository}",
        ]
        if job.reserve_bytes:
            words.append(f"{human_size(job.reserve_bytes)} must stay free for others ({job.reserve_reason})")
        missing_bytes = needed_bytes - min(self.disk.room_bytes, available)
        # Others may have freed what was missing.
        free = f"at least {human_size(missing_bytes)}" if missing_bytes > 0 else "more"
        prune = "`ciuic prune` with a shorter [retention], or " if self._has_snapshots else ""
        return NoRoom(
            f"no room for the snapshot{reached}: {', '.join(words)}; nothing of it was kept",
            hint=f"{prune}free {free} there, exclude what need not be kept, or put "
            "[repository] path on another disk; [repository] reserve says how much stays free",
            needed_bytes=needed_next,
            is_final=not self._has_snapshots,
        )


class _Measure:
    """Estimate of the minimum that files take in a repository that has nothing of them."""

    def __init__(self) -> None:
        self._bytes = 0.0
        self._counted_bytes = 0
        self._since_sample_bytes = 0
        self._ratio = 1.0
        # Samples of compared files, by size of the file.
        self._samples: dict[int, set[bytes]] = {}
        self._compared = 0
        # The level of the repository (docs/decisions/compression.md).
        self._compressor = zstandard.ZstdCompressor(level=1)

    @property
    def sure_bytes(self) -> int:
        """Minimum, with a margin for the error of the samples."""
        return int(self._bytes * _SURE_SHARE)

    def add(self, name: bytes, directory_fd: int) -> None:
        """Count a regular file. An unreadable file counts as nothing."""
        with suppress(OSError):
            status = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
            # Holes take no space in the repository either.
            size_bytes = min(status.st_size, status.st_blocks * 512)
            # Files with several names count as nothing: each content is stored once, and this is a minimum.
            if not stat.S_ISREG(status.st_mode) or not size_bytes or status.st_nlink > 1:
                return
            sample = b""
            if size_bytes >= _COMPARED_FROM_BYTES:
                known = self._samples.get(status.st_size)
                if known is not None and self._compared >= _MAX_COMPARED:
                    return
                self._compared += 1
                sample = _middle_of(name, directory_fd)
                if known is not None and sample in known:
                    return
                self._samples.setdefault(status.st_size, set()).add(sample)
            self._count(size_bytes, lambda: sample or _middle_of(name, directory_fd))

    def _count(self, size_bytes: int, sample_of: Callable[[], bytes]) -> None:
        self._counted_bytes += size_bytes
        self._since_sample_bytes += size_bytes
        if self._since_sample_bytes * _SAMPLES_PER_DOUBLING >= self._counted_bytes:
            sample = sample_of()
            if sample:
                self._ratio = min(1.0, len(self._compressor.compress(sample)) / len(sample))
            self._since_sample_bytes = 0
        self._bytes += size_bytes * self._ratio


def _middle_of(name: bytes, directory_fd: int) -> bytes:
    """Return some bytes from the middle of a file. May raise OSError."""
    # O_NONBLOCK: a fifo that took the name of a file must not block the open.
    fd = os.open(name, READ_FILE, dir_fd=directory_fd)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return b""
        return os.pread(fd, _SAMPLE_BYTES, max(0, status.st_size // 2 - _SAMPLE_BYTES))
    finally:
        os.close(fd)


def _files(
    backing_fd: int, excludes: ExcludeMatcher, skip: tuple[int, int]
) -> Generator[tuple[bytes, int], None, None]:
    """Yield the names of non-directories that would be captured, each with a descriptor of its directory."""
    # Directories are entered by descriptor, one level at a time, because their owner may replace them by
    # links meanwhile.
    levels = [_Level(b"", backing_fd)]
    try:
        while levels:
            level = levels[-1]
            entry = next(level.entries, None)
            if entry is None:
                levels.pop().close()
                continue
            name = os.fsencode(entry.name)
            path = os.path.join(level.path, name)
            is_dir = entry.is_dir(follow_symlinks=False)
            if path == STATE_DIR_NAME or excludes.match(path, is_dir):
                continue
            # Before stat(2), which a user's FUSE file system may never answer.
            if level.borders.at(name):
                continue
            if not is_dir:
                yield name, level.fd
            elif len(levels) < _MAX_LEVELS:
                with suppress(OSError):
                    status = os.stat(name, dir_fd=level.fd, follow_symlinks=False)
                    if (status.st_dev, status.st_ino) != skip:
                        levels.append(_Level(path, level.fd, name))
    finally:
        for level in levels:
            level.close()


class _Level:
    """A directory that is being listed."""

    def __init__(self, path: bytes, parent_fd: int, name: bytes = b".") -> None:
        """Open a directory. May raise OSError."""
        self.path = path
        self.fd = os.open(name, READ_DIRECTORY, dir_fd=parent_fd)
        self.borders = MountBorders(self.fd)
        try:
            self.entries = os.scandir(self.fd)
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        self.entries.close()
        os.close(self.fd)
