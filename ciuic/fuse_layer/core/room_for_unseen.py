"""Give up the undo log's space before writers that pass the worker by meet a disk that is full because of it.

A write that comes to the worker and finds the disk full is repeated once the log is given up
(OverlayState.with_space). A write that the kernel carries past the worker is not: its ENOSPC goes to the job,
which has removed an old checkpoint and writes the next one. Guarantees: no file is opened past the worker
while a sealed epoch awaits capture and the disk is nearly full; where such files are open already, an epoch
whose undo log holds a quarter of the free space, or more, is given up once less than ``NEAR_FULL_BYTES`` are
free.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Final

import structlog

from ciuic.fuse_layer.core.reclaimable_space import SpaceEstimator
from ciuic.fuse_layer.cut.passthrough_writers import UnseenWriters
from ciuic.fuse_layer.state.overlay_state import OverlayState

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
log = structlog.get_logger(__name__)


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
