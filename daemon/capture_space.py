"""Room for a capture: whether the repository's file system has it, before anything is written and when it runs out.

Guarantees: a root is refused beforehand only where the least that it can take (each content once, compressed as well as
samples of it) is more than there is room for; what cannot be told is tried, and ReservedDisk ends it. A failure
for want of room gives back what was written and says how much is missing and what helps.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from typing import Final

import structlog
import zstandard

from ciuic import STATE_DIR_NAME
from ciuic.daemon.capture_job import CaptureJob, printable
from ciuic.disk_space import available_bytes
from ciuic.errors import CiuicError
from ciuic.excludes import ExcludeMatcher
from ciuic.repository import Repository, Writer
from ciuic.repository.reserved_disk import ReservedDisk
from ciuic.repository.sharing import can_share
from ciuic.units import human_size

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_SAMPLE_BYTES: Final = 4096
_SAMPLES_PER_DOUBLING: Final = 64
"""A sample stands for what was counted since the one before it: a 64th of all that was counted, so that no part of a tree is judged
by another. Some 2,000 reads in a tree of any size."""
_COMPARED_FROM_BYTES: Final = 256 << 10
"""Files of one size from here on may be copies of each other (checkpoints are), and are told apart by a sample."""
_MAX_COMPARED: Final = 2048
"""Further files of a size that was met before count as copies: the least is asked for."""
_SURE_SHARE: Final = 0.8
"""Of the estimate, that has to be missing: samples may be wrong by some percent, and a refusal of what would fit costs a snapshot."""
_MAX_LEVELS: Final = 256
"""Of directories. Each costs two descriptors, and what lies deeper need not be counted: the least is asked for."""
_log = structlog.get_logger(__name__)


class NoRoom(CiuicError):
    """The snapshot does not fit without taking from others what the reserve leaves to them."""

    def __init__(self, message: str, *, hint: str, needed_bytes: int, is_final: bool) -> None:
        super().__init__(message, hint=hint)
        self.is_final = is_final
        """There is no older snapshot whose removal could make room."""
        self.needed_bytes = needed_bytes
        """What another attempt has to find free before it writes; 0 where it will find out without writing."""


class Room:
    """The room of one capture."""

    def __init__(self, job: CaptureJob) -> None:
        self._job = job
        self.disk = ReservedDisk(job.repository, job.reserve_bytes)
        self._has_snapshots = False

    def check_first(self, repository: Repository) -> None:
        """Refuse where the least that is known to be needed does not fit. NoRoom; OSError."""
        self._has_snapshots = bool(repository.snapshots.names())
        if self.disk.room_bytes < self._job.needed_bytes:
            words = f"an earlier attempt had written {human_size(self._job.needed_bytes)} and was not done"
            raise self.refusal(self._job.needed_bytes, words, needed_next=self._job.needed_bytes)

    def check(self) -> None:
        """Refuse to go on where others have taken so much meanwhile that the reserve is reached. OSError (ENOSPC)."""
        self.disk.check()

    def check_root(
        self, path: bytes, backing_fd: int, excludes: ExcludeMatcher, step: Callable[[], None]
    ) -> None:
        """Refuse a root that is captured for the first time and cannot fit. NoRoom; OSError.

        Args:
            path: The root, for the message.
            backing_fd: Its directory.
            excludes: What of it is left out.
            step: Called often; may raise to stop.
        """
        room_bytes = self.disk.room_bytes
        facts = os.fstatvfs(backing_fd)
        if (facts.f_blocks - facts.f_bfree) * facts.f_frsize <= room_bytes:
            return  # all that its file system holds would fit
        repository = os.stat(self._job.repository)
        if os.fstat(backing_fd).st_dev == repository.st_dev and can_share(self._job.repository):
            return  # what is shared takes no space
        measure = _Measure()
        with closing(_files(backing_fd, excludes, (repository.st_dev, repository.st_ino))) as files:
            for name, fd in files:
                step()
                measure.add(name, fd)
                if measure.sure_bytes > room_bytes:
                    raise self.refusal(
                        measure.sure_bytes,
                        f"{printable(path)} takes at least {human_size(measure.sure_bytes)}",
                    )

    def failed(self, error: OSError, writer: Writer) -> OSError | NoRoom:
        """What to raise for an error of the repository; for want of room, what was written is given back first."""
        if error.errno not in _FULL:
            return error
        written_bytes = writer.new_bytes
        self.give_back(writer)
        reached = "" if self.disk.refused is not None else f" ({os.strerror(error.errno)})"
        return self.refusal(written_bytes, reached=reached, needed_next=written_bytes)

    def give_back(self, writer: Writer) -> None:
        """Remove what the capture has written, as far as the disk lets us."""
        try:
            _log.info("capture_gave_back", freed_bytes=writer.give_back())
        except OSError as error:
            _log.warning("capture_not_given_back", error=str(error))

    def refusal(self, needed_bytes: int, why: str = "", *, reached: str = "", needed_next: int = 0) -> NoRoom:
        """Return the failure in words.

        Args:
            needed_bytes: The least that the snapshot takes.
            why: How that is known.
            reached: What the disk said, where it was not the reserve.
            needed_next: What another attempt has to find free before it writes.
        """
        job, available = self._job, available_bytes(self._job.repository)
        words = [f"{human_size(available)} is free on the file system of {job.repository}"]
        if job.reserve_bytes:
            words.append(f"{human_size(job.reserve_bytes)} must stay free for others ({job.reserve_reason})")
        if why:
            words.append(why)
        missing_bytes = max(needed_bytes, 1) - min(self.disk.room_bytes, available)
        prune = "`ciuic prune` with a shorter [retention], or " if self._has_snapshots else ""
        return NoRoom(
            f"no room for the snapshot{reached}: {', '.join(words)}; nothing of it was kept",
            hint=f"{prune}free at least {human_size(max(missing_bytes, 0))} there, exclude what need not be kept, or put "
            "[repository] path on another disk; [repository] reserve says how much stays free",
            needed_bytes=needed_next,
            is_final=not self._has_snapshots,
        )


class _Measure:
    """The least that files take in a repository that has nothing of them."""

    def __init__(self) -> None:
        self._bytes = 0.0
        self._counted_bytes = 0
        self._since_sample_bytes = 0
        self._ratio = 1.0
        self._samples: dict[int, set[bytes]] = {}
        """First bytes that were compared, by size of their file."""
        self._compared = 0
        self._compressor = zstandard.ZstdCompressor(level=1)

    @property
    def sure_bytes(self) -> int:
        """So much is needed at least."""
        return int(self._bytes * _SURE_SHARE)

    def add(self, name: bytes, directory_fd: int) -> None:
        """Count a file, if it is one. What cannot be read counts as nothing."""
        with suppress(OSError):
            status = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
            size_bytes = min(status.st_size, status.st_blocks * 512)
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
    """Some bytes of a file. OSError."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    fd = os.open(name, flags, dir_fd=directory_fd)
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
    """Names of what is no directory and would be captured, each with a descriptor of its directory.

    Directories are entered by descriptor, one level at a time: their owner may exchange them for links meanwhile.
    """
    device = os.fstat(backing_fd).st_dev
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
            if not is_dir:
                yield name, level.fd
            elif len(levels) < _MAX_LEVELS:
                with suppress(OSError):
                    status = os.stat(name, dir_fd=level.fd, follow_symlinks=False)
                    if status.st_dev == device and (status.st_dev, status.st_ino) != skip:
                        levels.append(_Level(path, level.fd, name))
    finally:
        for level in levels:
            level.close()


class _Level:
    """A directory that is being listed."""

    def __init__(self, path: bytes, parent_fd: int, name: bytes = b".") -> None:
        """OSError."""
        self.path = path
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self.fd = os.open(name, flags, dir_fd=parent_fd)
        try:
            self.entries = os.scandir(self.fd)
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Close its descriptors."""
        self.entries.close()
        os.close(self.fd)
