"""Gauge of the time that the job's requests have waited, published for processes that work beside it (system/io_throttle.py).

What counts is the time in which at least one request was waiting, as /proc/pressure counts it; that costs a
request nothing. Under the kernel driver the session's watch looks every few milliseconds: a request that is
found at work without the turn twice in a row waits (``saw``). Under pyfuse3 the clock is read before and
after each operation anyway, and the loop looks several times a second at operations in threads: one that
lasts longer than ``WAITING_SECONDS`` waits (``lasted``). A watch that woke up every few milliseconds took the
interpreter's lock from that loop, 3 to 5 % of creations and renames.

The file lies beside the control socket: a u64 of microseconds, little-endian, memory that two processes
share. It means nothing when the worker has ended. Guarantees: no failure here is an error of the overlay's;
without the file the figure is kept in the process all the same.
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
"""Duration from which on a request counts as having waited: it has met a disk, or another request that
has."""


class LatencyGauge:
    """Gauge of one session.

    It belongs to one thread, the watch or the event loop; any may read ``microseconds``.
    """

    def __init__(self) -> None:
        self.microseconds = 0
        self._path = ""
        self._shared: mmap.mmap | None = None
        self._waiting: frozenset[int] = frozenset()
        self._counted_until = -math.inf

    def publish(self, path: str) -> None:
        """Write the figure to this file, too, from now on."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                # Filled, not only made long: on a disk that is full afterwards, the first write to a hole
                # would be SIGBUS.
                os.pwrite(fd, _FIGURE.pack(0), 0)
                self._shared = mmap.mmap(fd, _FIGURE.size)
            finally:
                os.close(fd)
        except (OSError, ValueError) as error:
            log.warning("waits_not_published", error=str(error))
            return
        self._path = path

    def unpublish(self) -> None:
        """Remove the file."""
        if self._path:
            try:
                os.unlink(self._path)
            except FileNotFoundError:
                # A successor of this worker has ended, and removed it.
                pass
            except OSError as error:
                log.warning("waits_not_removed", error=str(error))

    def saw(self, waiting: frozenset[int], elapsed_seconds: float) -> bool:
        """Note the numbers of requests that wait now; return whether any of them waited at the last look as well."""
        # A request that was at work at both looks has waited for all of the time between them.
        still = not waiting.isdisjoint(self._waiting)
        self._waiting = waiting
        if still:
            self._add(elapsed_seconds)
        return still

    def lasted(self, began: float, now: float) -> None:
        """Note that a request has been at work from ``began`` until now.

        Time counted for another one is not counted again.
        """
        if now - began > WAITING_SECONDS and now > self._counted_until:
            self._add(now - max(began, self._counted_until))
            self._counted_until = now

    def _add(self, seconds: float) -> None:
        self.microseconds += int(seconds * 1_000_000)
        if self._shared is not None:
            _FIGURE.pack_into(self._shared, 0, self.microseconds)
