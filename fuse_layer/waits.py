"""For how long requests of the job have waited here: one figure, published for whoever works beside the job (ciuic.pace).

What counts is the time in which at least one request was waiting, as /proc/pressure counts it, and it costs a request
nothing. Under the kernel driver the session's watch looks every few milliseconds: a request waits that was found at work,
without the turn, twice running (``saw``). Under pyfuse3 the clock is read before and after each operation as it is, and the
loop looks several times a second after those in threads: one waits that has lasted for so long (``lasted``; a watch that wakes
up every few milliseconds took the interpreter's lock from the loop, 3 to 5 % of creations and renames). Either has met a disk,
or somebody who has.

The file lies beside the control socket, a u64 of microseconds, little-endian; it is memory that two processes share, and means
nothing when the worker has gone. Guarantees: never an error of the overlay's; without the file the figure is kept all the same.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from typing import Final

import structlog

log = structlog.get_logger(__name__)
_FIGURE = struct.Struct("<Q")
WAITING_SECONDS: Final = 0.005
"""A request that lasts longer than this has waited."""


class Waits:
    """Belongs to one thread, the watch or the event loop; ``microseconds`` may be read by any."""

    def __init__(self) -> None:
        self.microseconds = 0
        self._path = ""
        self._shared: mmap.mmap | None = None
        self._waiting: frozenset[int] = frozenset()
        self._counted_until = -math.inf

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
            self._add(elapsed_seconds)
        return still

    def lasted(self, began: float, now: float) -> None:
        """A request that has ended, or goes on, has been at work from ``began`` until now; of time that has been counted
        for another one nothing is counted again."""
        if now - began > WAITING_SECONDS and now > self._counted_until:
            self._add(now - max(began, self._counted_until))
            self._counted_until = now

    def _add(self, seconds: float) -> None:
        self.microseconds += int(seconds * 1_000_000)
        if self._shared is not None:
            _FIGURE.pack_into(self._shared, 0, self.microseconds)
