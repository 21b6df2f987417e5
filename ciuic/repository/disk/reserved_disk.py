"""Durable operations that keep a reserve of free space: no write leaves others less than that.

Guarantees: before each write the file system is asked how much an ordinary process could still use
(f_bavail); a write that would go below the reserve is refused whole, as ENOSPC. Deleting and truncating are
never refused, nor is anything else that takes no space. `Writer.give_back` frees what was written before.
"""

from __future__ import annotations

import errno
import functools
import os
import sys
import threading
from collections.abc import Iterable
from typing import Final

from ciuic.repository.disk.operations import Disk
from ciuic.repository.ids import Bytes
from ciuic.system.disk_space import available_bytes, total_bytes

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

    def replace_file(self, path: str, data: bytes) -> None:
        """Replace the file out of the margin, without a check.

        When a snapshot's file is written, everything it names is on the disk, and a refusal would waste that
        for a few kilobytes.
        """
        Disk().replace_file(path, data)
