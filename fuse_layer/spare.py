"""What giving the pending epochs up would free on the backing file system: space and inodes that statfs calls free.

Guarantees: only what really becomes free counts: an inode that lives on under another name, or that the job has open,
takes its space without us too. Asked of the disk, because a name of a held inode may come and go unseen; with many of
them the answer may be a second old, so that a program that asks all the time does not make us look all the time.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from typing import NamedTuple

from ciuic.fuse_layer.undo import UndoLog
from ciuic.fuse_layer.undo_format import HOLD_DIR

_MANY = 1000
_STALE_SECONDS = 1.0
_SECTOR_BYTES = 512


class Room(NamedTuple):
    """What would become free."""

    size_bytes: int = 0
    inodes: int = 0


class Spare:
    """The answer for one root. Thread-safe: two threads may both look, and both are right."""

    def __init__(self, undo: UndoLog, open_inodes: Callable[[], set[int]]) -> None:
        self._undo = undo
        self._open_inodes = open_inodes
        self._known = (0.0, Room())

    def room(self) -> Room:
        """Now, or a second ago where much is held. Nothing when nothing is pending. Never raises."""
        if not self._undo.active:
            return Room()
        until, room = self._known
        if time.monotonic() < until:
            return room
        room = self._look()
        if room.inodes > _MANY:
            self._known = (time.monotonic() + _STALE_SECONDS, room)
        return room

    def _look(self) -> Room:
        """What cannot be looked at does not count."""
        directory = self._undo.directory_fd
        try:
            own = os.listdir(directory)
        except OSError:
            return Room()
        open_inodes = self._open_inodes()
        size_bytes = inodes = 0
        for name in [*own, *(f"{HOLD_DIR}/{ino}" for ino in list(self._undo.hidden.held))]:
            try:
                facts = os.lstat(name, dir_fd=directory)
            except OSError:
                continue  # let go of meanwhile
            if facts.st_nlink == 1 and not stat.S_ISDIR(facts.st_mode) and facts.st_ino not in open_inodes:
                size_bytes += facts.st_blocks * _SECTOR_BYTES
                inodes += 1
        return Room(size_bytes, inodes)
