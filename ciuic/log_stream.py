"""A log whose reader may die: what cannot be written is lost, and the program goes on.

The standard error of a daemon that a person has started is often a pipe (``ciuic daemon 2>&1 | tee log``). When its reader is
killed every line would raise BrokenPipeError, in the daemon's event loop and in the workers that serve a job's files.
"""

from __future__ import annotations

from typing import TextIO


class LogStream:
    """The part of a text file that loggers use. Neither writing nor flushing raises OSError."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Write, or lose, a line."""
        try:
            self._file.write(text)
        except (OSError, ValueError):  # the reader has ended, the disk is full, or the file was closed
            return 0
        return len(text)

    def flush(self) -> None:
        """Hand on what is buffered, or lose it."""
        try:
            self._file.flush()
        except (OSError, ValueError):
            return

    def isatty(self) -> bool:
        """Return whether the file is a terminal, which a person reads."""
        return self._file.isatty()
