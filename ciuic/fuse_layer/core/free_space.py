"""Free space of the backing file system: what the undo log's end would free, and when it is given up for it.

statfs counts space and inodes that giving up the pending epochs would free as free. Only space that really becomes
free counts: an inode that lives on under another name, or that the job has open, would take its space without us
too. The figures are read from the disk, because a name of a held inode may come and go unseen; with many of them
they may be a second old, so that a program that calls statfs(2) in a loop does not have them read each time.

A write that comes to the worker and finds the disk full is repeated once the log is given up
(OverlayState.with_space). A write that the kernel carries past the worker is not: its ENOSPC goes to the job,
which has removed an old checkpoint and writes the next one. Guarantees: no file is opened past the worker
while a sealed epoch awaits capture and the disk is nearly full; where such files are open already, an epoch
whose undo log holds a quarter of the free space, or more, is given up once less than ``NEAR_FULL_BYTES`` are
free.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import structlog

from ciuic.fuse_layer.core.passthrough_writers import UnseenWriters
from ciuic.fuse_layer.state.overlay_state import OverlayState
from ciuic.fuse_layer.tracking.undo_log import UndoLog
from ciuic.fuse_layer.undo_format import HOLD_DIR

log = structlog.get_logger(__name__)

# Each costs an lstat(2): from so many on the figures are kept for a while.
_MANY_INODES = 1000
_STALE_SECONDS = 1.0
# Unit of st_blocks, whatever the block size of the file system (stat(2)).
_SECTOR_BYTES = 512
NEAR_FULL_BYTES: Final = 1 << 30
"""Free space below which the disk counts as nearly full: the output of writers at 5 GB/s in four looks. A
busy host runs the thread late, and removing a large file takes time."""
_LOOK_SECONDS: Final = 0.05
_MIN_RECLAIMED_BYTES: Final = 1 << 20
"""Space of the undo log below which a snapshot is not given up, because a job on a nearly full disk changes
small files all the time."""
_MIN_RECLAIMED_PART: Final = 4
"""Divisor of the free space: the log is given up when it holds at least such a part. A writer that fills the
rest meets this threshold on its way. Without it every snapshot of a small disk was given up, for the
reflinked copy of one long file."""
_LAST_BYTES: Final = 64 << 20
_LAST_PART: Final = 16
"""Free space, in bytes and as a part of the file system, below which the log's space is given back however
little it is."""


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


class RoomForUnseen:
    """Watch over the free space of one root's unseen writers. Thread-safe."""

    def __init__(self, state: OverlayState, space: SpaceEstimator, unseen: UnseenWriters) -> None:
        self._state = state
        self._space = space
        self._unseen = unseen
        self._wake = threading.Event()

    def is_short(self) -> bool:
        """Return whether a file that is opened now must not pass the worker by: an epoch awaits capture on a nearly full disk."""
        # Without a sealed epoch the log takes nothing, and no system call is spent on the question.
        if not self._state.undo.takes_space:
            return False
        self.wake()
        try:
            return self._free_bytes() < NEAR_FULL_BYTES
        except OSError:
            # The open of a plain file does not ask for free space, and so does not fail for it.
            return False

    def wake(self) -> None:
        """Have the thread look, because an epoch was sealed or a file is going to be opened while one awaits capture."""
        self._wake.set()

    def look(self) -> None:
        """Give up the undo log where unseen writers will lack its space. The caller is inside the gate.

        Errors are logged: a removal that the file system has carried out must not be reported to the job as failed.
        """
        try:
            if self._is_needed():
                self._give_up_if_short()
        except OSError as error:
            log.warning("room_not_looked_at", error=str(error))

    def _give_up_if_short(self) -> None:
        room, kept = os.statvfs(self._state.undo.directory_fd), self._space.room().size_bytes
        free, last = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize // _LAST_PART
        is_worth_it = kept >= max(_MIN_RECLAIMED_BYTES, free // _MIN_RECLAIMED_PART)
        if free < NEAR_FULL_BYTES and (is_worth_it or (kept and free < min(_LAST_BYTES, last))):
            self._state.undo.abandon(
                "the file system is nearly full, and the job writes files past the overlay"
            )
            self._state.undo.tidy()

    def start(self) -> None:
        """Look repeatedly in a background thread, while an epoch awaits capture and unseen writers have files open."""
        # A predecessor may have left both.
        self.wake()
        threading.Thread(target=self._run, name="room", daemon=True).start()

    def _run(self) -> None:
        while self._wake.wait():
            self._wake.clear()
            while self._is_needed():
                # No cut may be made while the undo log is tidied (UndoLog.tidy).
                with self._state.gate:
                    self.look()
                time.sleep(_LOOK_SECONDS)
                self._wake.clear()

    def _is_needed(self) -> bool:
        return self._state.undo.active and self._unseen.any_open

    def _free_bytes(self) -> int:
        room = os.statvfs(self._state.undo.directory_fd)
        return room.f_bavail * room.f_frsize
