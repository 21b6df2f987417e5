"""For how long requests of the job have waited here: one figure, published for whoever works beside the job (ciuic.pace).

What counts is the time in which at least one request was waiting, as /proc/pressure counts it: looked at every few
milliseconds by the session's watch, so it costs a request nothing. A request waits that was found at work, without the
turn, twice running: it has met a disk, or somebody who has.

The file lies beside the control socket, a u64 of microseconds, little-endian; it is memory that two processes share, and means
nothing when the worker has gone. Guarantees: never an error of the overlay's; without the file the figure is kept all the same.
"""

from __future__ import annotations

import mmap
import os
import struct

import structlog

log = structlog.get_logger(__name__)
_FIGURE = struct.Struct("<Q")


class Waits:
    """Belongs to one thread, the watch; ``microseconds`` may be read by any."""

    def __init__(self) -> None:
        self.microseconds = 0
        self._path = ""
        self._shared: mmap.mmap | None = None
        self._waiting: frozenset[int] = frozenset()

    def publish(self, path: str) -> None:
        """From now on in this file, too."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                # Filled, not only made long: on a disk that is full afterwards, the first write to a hole would be SIGBUS.
                os.pwrite(fd, _FIGURE.pack(0), 0)
                self._shared = mmap.mmap(fd, _FIGURE.size)
            finally:
                os.close(fd)
        except (OSError, ValueError) as error:
            log.warning("waits_not_published", error=str(error))
            return
        self._path = path

    def unpublish(self) -> None:
        if self._path:
            try:
                os.unlink(self._path)
            except FileNotFoundError:
                pass  # a successor's end took it along
            except OSError as error:
                log.warning("waits_not_removed", error=str(error))

    def saw(self, waiting: frozenset[int], elapsed_seconds: float) -> bool:
        """The requests (by number) that wait now, so long after the last look; whether any has waited since then."""
        still = not waiting.isdisjoint(self._waiting)
        self._waiting = waiting
        if still:
            self.microseconds += int(elapsed_seconds * 1_000_000)
            if self._shared is not None:
                _FIGURE.pack_into(self._shared, 0, self.microseconds)
        return still
