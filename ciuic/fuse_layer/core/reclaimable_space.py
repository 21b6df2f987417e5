"""Space and inodes that giving up the pending epochs would free on the backing file system; statfs counts them as free.

Guarantees: only space that really becomes free counts: an inode that lives on under another name, or that the
job has open, would take its space without us too. The figures are read from the disk, because a name of a
held inode may come and go unseen; with many of them they may be a second old, so that a program that calls
statfs(2) in a loop does not have them read each time.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from typing import NamedTuple

from ciuic.fuse_layer.tracking.undo_log import UndoLog
from ciuic.fuse_layer.undo_format import HOLD_DIR

# Each costs an lstat(2): from so many on the figures are kept for a while.
_MANY_INODES = 1000
_STALE_SECONDS = 1.0
# Unit of st_blocks, whatever the block size of the file system (stat(2)).
_SECTOR_BYTES = 512


class ReclaimableSpace(NamedTuple):
    """Space and inodes that would become free."""

    size_bytes: int = 0
    inodes: int = 0


class SpaceEstimator:
    """Estimator for one root. Thread-safe: two threads may both read the disk, and both are right."""

    def __init__(self, undo: UndoLog, open_inodes: Callable[[], set[int]]) -> None:
        self._undo = undo
        self._open_inodes = open_inodes
        self._known = (0.0, ReclaimableSpace())

    def room(self) -> ReclaimableSpace:
        """Return the figures, up to a second old where much is held; zeros when nothing is pending.

        Never raises.
        """
        if not self._undo.active:
            return ReclaimableSpace()
        until, room = self._known
        if time.monotonic() < until:
            return room
        room = self._look()
        if room.inodes > _MANY_INODES:
            self._known = (time.monotonic() + _STALE_SECONDS, room)
        return room

    def _look(self) -> ReclaimableSpace:
        """Read the figures from the disk. Inodes that cannot be read do not count."""
        directory = self._undo.directory_fd
        try:
            own = os.listdir(directory)
        except OSError:
            return ReclaimableSpace()
        open_inodes = self._open_inodes()
        size_bytes = inodes = 0
        for name in [*own, *(f"{HOLD_DIR}/{ino}" for ino in list(self._undo.hidden.held))]:
            try:
                facts = os.lstat(name, dir_fd=directory)
            except OSError:
                # Removed meanwhile.
                continue
            # Another link, or an open handle of the job, keeps the inode: its space would not become free.
            if facts.st_nlink == 1 and not stat.S_ISDIR(facts.st_mode) and facts.st_ino not in open_inodes:
                size_bytes += facts.st_blocks * _SECTOR_BYTES
                inodes += 1
        return ReclaimableSpace(size_bytes, inodes)
