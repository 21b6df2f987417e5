"""The file of an undo log, writing side: one inode for as long as any epoch is pending.

Guarantee: a record is whole in the file when `append` returns, or OSError is raised and the change that it
would have protected must not be relied upon. Not synced: capture reads the same page cache, and a power cut
ends the session.
"""

from __future__ import annotations

import errno
import os
import threading

from ciuic.fuse_layer import undo_format
from ciuic.fuse_layer.system.path_handles import Descriptor


def unlink_quietly(directory_fd: int, name: bytes | str) -> bool:
    """Remove a file, and return whether its name is free. One that stays is garbage, removed later."""
    try:
        os.unlink(name, dir_fd=directory_fd)
    except OSError as error:
        return error.errno == errno.ENOENT
    return True


class UndoLogFile:
    """The log in one undo directory; made with its first record. Thread-safe."""

    def __init__(self, directory_fd: int) -> None:
        self._directory_fd = directory_fd
        self._log: Descriptor | None = None
        # Held where ``_log`` and the name of the log change: ``_log`` is None or has that name.
        self._lock = threading.Lock()

    def resume(self, log_bytes: int) -> None:
        """Go on behind the first ``log_bytes`` of a predecessor's log.

        Raises:
            OSError: the log cannot be opened or cut.
        """
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        log = Descriptor(os.open(undo_format.LOG_NAME, flags, dir_fd=self._directory_fd))
        # A record that was cut short protects no change: the record comes first.
        os.ftruncate(log.fd, log_bytes)
        self._log = log

    def append(self, record: undo_format.Record) -> int:
        """Write a whole record in one call, visible to readers on return; return its length.

        Raises:
            OSError: the record is not in the log, or not whole.
        """
        log = self._log or self._create()
        data = undo_format.encode(record)
        # One write(2) with O_APPEND: records of several threads lie one behind the other, and a reader finds
        # each whole.
        written = os.write(log.fd, data)
        if written != len(data):
            raise OSError(errno.ENOSPC, "a record of the undo log was cut short")
        return written

    def remove(self) -> bool:
        """Remove the log, and return whether its name is free."""
        with self._lock:
            self._log = None
            return unlink_quietly(self._directory_fd, undo_format.LOG_NAME)

    def _create(self) -> Descriptor:
        # Two operations may save the first thing of an epoch at one instant. Without the lock the second
        # removed the log of the first, with its record, and a capture that had opened it saw no record at
        # all.
        with self._lock:
            if self._log is None:
                # A log that could not be removed when its epochs ended may end in an incomplete record: it
                # goes first.
                unlink_quietly(self._directory_fd, undo_format.LOG_NAME)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
                fd = os.open(undo_format.LOG_NAME, flags, 0o600, dir_fd=self._directory_fd)
                self._log = Descriptor(fd)
            return self._log
