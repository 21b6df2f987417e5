"""Log stream that survives the death of its reader: lines that cannot be written are lost, and the program goes on.

The standard error of a daemon started in a shell is often a pipe (``ciuic daemon 2>&1 | tee log``). When its reader is killed, every
line would raise BrokenPipeError, in the daemon's event loop and in the workers that serve a job's files.
"""

from __future__ import annotations

from typing import TextIO


class LogStream:
    """The part of a text file that loggers use. Neither writing nor flushing raises OSError."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Write a line, or lose it; return the number of characters written."""
        try:
            self._file.write(text)
        except (OSError, ValueError):
            # The reader has ended, the disk is full, or the file was closed (ValueError).
            return 0
        return len(text)

    def flush(self) -> None:
        """Write out the buffer, or lose it."""
        try:
            self._file.flush()
        except (OSError, ValueError):
            return

    def isatty(self) -> bool:
        """Return whether the file is a terminal."""
        return self._file.isatty()
