"""Threads that make filled files durable and complete.

Guarantee: a hidden link is removed after the file's content and times were synced, in this order. Afterwards the file is one as any
other; nothing of this process changes it any more.
"""

from __future__ import annotations

import os
import threading
from typing import Final

import structlog

from ciuic.lazy.pending import PendingFiles
from ciuic.lazy.pending_file import PendingFile
from ciuic.restore.content import start_writing_out

log = structlog.get_logger(__name__)

_MAX_FILES: Final = 48
_THREADS: Final = 2
_PAUSE_SECONDS: Final = 2.0


class Settler:
    """The threads, and the same work in the thread of a caller that cannot wait for them."""

    def __init__(self, pending: PendingFiles) -> None:
        self._pending = pending
        # Syncs at the same time share a write of the file system's journal, and wait for the disk together.
        self._threads = [
            threading.Thread(target=self._run, name="settle", daemon=True) for _ in range(_THREADS)
        ]
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin to settle what is filled."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads, after `PendingFiles.close`."""
        self._ended.set()
        for thread in self._threads:
            # One that was not started has nothing to end.
            if thread.is_alive():
                thread.join()

    def settle(self, file: PendingFile) -> None:
        """Make a filled file complete now.

        Raises:
            OSError: it cannot be made durable.
        """
        if not self._pending.begin_settling(file):
            return
        try:
            self._finish(file, self._begin(file))
        except BaseException:
            self._pending.not_settled(file)
            raise

    def _run(self) -> None:
        while (files := self._pending.take_filled(_MAX_FILES)) is not None:
            opened: list[tuple[PendingFile, int]] = []
            # All are on their way to the disk before the first sync waits (restore/workers.py).
            for file in files:
                try:
                    opened.append((file, self._begin(file)))
                except OSError as error:
                    self._failed(file, error)
            for file, fd in opened:
                try:
                    self._finish(file, fd)
                except OSError as error:
                    self._failed(file, error)

    def _failed(self, file: PendingFile, error: OSError) -> None:
        log.warning("lazy_file_not_settled", file=file.shape.number, reason=str(error))
        if not file.gone:
            self._ended.wait(_PAUSE_SECONDS)
        self._pending.not_settled(file)

    def _begin(self, file: PendingFile) -> int:
        fd = self._pending.open(file)
        try:
            # Writing its content has moved the time. No other process changes it while the file is incomplete.
            os.utime(fd, ns=(os.fstat(fd).st_atime_ns, file.shape.mtime_ns))
            start_writing_out(fd, 0, file.shape.size_bytes)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _finish(self, file: PendingFile, fd: int) -> None:
        try:
            # Before the link goes: it alone says that the content may be missing.
            os.fsync(fd)
        finally:
            os.close(fd)
        self._pending.settled(file)
