"""Account of the space that an undo log takes, and its limits."""

from __future__ import annotations

import os
from typing import Final

_ROOM_CHECK_BYTES: Final = 16 << 20
"""Copied bytes between two checks of the free space: 2 µs of statvfs for 10 ms of copying."""


class UndoSpace:
    """Space of one undo directory. Threads may count at the same time: the figures are estimates."""

    def __init__(self, directory_fd: int, limit_bytes: int) -> None:
        self._directory_fd = directory_fd
        self.limit_bytes = limit_bytes
        self.kept_bytes = 0
        """Space that undo takes on the backing file system, removed files that are kept alive included."""
        self._copied_bytes = 0
        """Part of ``kept_bytes`` that is new on the disk: written by root, and so charged to no user's
        quota."""
        self._checked_at_bytes = 0

    def count(self, size_bytes: int) -> None:
        """Count records and removed files that are kept alive."""
        self.kept_bytes += size_bytes

    def count_copy(self, size_bytes: int) -> None:
        """Count copied content."""
        self.kept_bytes += size_bytes
        self._copied_bytes += size_bytes

    def reset(self) -> None:
        """Start at 0, because everything was removed."""
        self.kept_bytes = self._copied_bytes = self._checked_at_bytes = 0

    def excess(self) -> str | None:
        """Return why the undo log takes too much space, in words; None where it does not."""
        if self.kept_bytes > self.limit_bytes:
            return f"undo log: over its limit of {self.limit_bytes} bytes"
        if self._copied_bytes - self._checked_at_bytes < _ROOM_CHECK_BYTES:
            return None
        # Other users of the file system need its space too, and the owner of a root could fill it past any
        # quota. Files that are kept alive do not count: they were there before.
        self._checked_at_bytes = self._copied_bytes
        if self._copied_bytes > self._free_bytes():
            return f"undo log: its {self._copied_bytes} bytes are more than the file system has left"
        return None

    def has_room_for(self, size_bytes: int) -> bool:
        """Return whether so much more can be saved within the limit and a quarter of the free space."""
        # A copy beyond that would give up the very snapshot that it is made for: the file is captured as
        # found instead, and marked.
        fits = self._copied_bytes + size_bytes <= self._free_bytes() // 4
        return fits and self.kept_bytes + size_bytes <= self.limit_bytes

    def _free_bytes(self) -> int:
        room = os.statvfs(self._directory_fd)
        return room.f_bavail * room.f_frsize
