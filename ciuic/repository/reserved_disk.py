"""The durable operations with a floor: nothing is written that would leave others less than a reserve.

Guarantees: before each write the file system is asked how much an ordinary process could still use (f_bavail); a write
that would go below the reserve is refused whole, as ENOSPC. Deleting, truncating and what takes no space is never refused.
Leaves giving back what was written before to Writer.give_back.
"""

from __future__ import annotations

import errno
import functools
import os
import sys
import threading
from collections.abc import Iterable
from typing import Final

from ciuic.disk_space import available_bytes, total_bytes
from ciuic.repository.disk import Disk
from ciuic.repository.ids import Bytes

_MARGIN_SHARE: Final = 0.01
_MIN_MARGIN_BYTES: Final = 256 << 10
_MAX_MARGIN_BYTES: Final = 16 << 20
"""Kept on top of the reserve for what is not asked about beforehand: the index (SQLite writes it, its WAL grows to 4 MiB), the
file of the snapshot, the file system's own blocks."""


class ReserveReached(OSError):
    """The next write would leave others less than the reserve."""

    def __init__(self, path: str, available_bytes: int, reserve_bytes: int) -> None:
        super().__init__(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        self.available_bytes = available_bytes
        self.reserve_bytes = reserve_bytes


class ReservedDisk(Disk):
    """The real disk, as far as the reserve allows. Several threads may write."""

    def __init__(self, path: str, reserve_bytes: int) -> None:
        """``path``: anything on the file system."""
        self._path = path
        self.reserve_bytes = reserve_bytes
        self.refused: ReserveReached | None = None
        """The first refusal; an appender repeats it as a plain OSError."""
        self._lock = threading.Lock()
        """Data and trees are written by two threads, which together must not take what was free for one of them."""
        self._under_way_bytes = 0

    @functools.cached_property
    def _margin_bytes(self) -> int:
        return max(_MIN_MARGIN_BYTES, min(int(_MARGIN_SHARE * total_bytes(self._path)), _MAX_MARGIN_BYTES))

    @functools.cached_property
    def _keeps_reserve(self) -> bool:
        """False without a reserve, and on a file system that does not say how large it is (some network ones): ENOSPC decides."""
        return self.reserve_bytes > 0 and total_bytes(self._path) > 0

    def check(self, wanted_bytes: int = 0) -> None:
        """Refuse to go on where this many more bytes would leave less than the reserve. ReserveReached; OSError."""
        if not self._keeps_reserve:
            return
        available = available_bytes(self._path)
        if available - wanted_bytes < self.reserve_bytes:
            self.refused = self.refused or ReserveReached(self._path, available, self.reserve_bytes)
            raise ReserveReached(self._path, available, self.reserve_bytes)

    @property
    def room_bytes(self) -> int:
        """Bytes that may still be written; 0 or less where none may. OSError."""
        if not self._keeps_reserve:
            return sys.maxsize
        return available_bytes(self._path) - self.reserve_bytes - self._margin_bytes

    def write_at(self, fd: int, parts: Iterable[Bytes], offset: int) -> int:
        pending = list(parts)
        length = sum(memoryview(part).nbytes for part in pending)
        with self._lock:
            self.check(self._under_way_bytes + length + self._margin_bytes)
            self._under_way_bytes += length
        try:
            return super().write_at(fd, pending, offset)
        finally:
            with self._lock:
                self._under_way_bytes -= length

    def replace_file(self, path: str, data: bytes) -> None:
        """As on the real disk, out of the margin: when a snapshot's file is written, all that it names is on the disk, and a
        refusal would throw that away for a few kilobytes."""
        Disk().replace_file(path, data)
