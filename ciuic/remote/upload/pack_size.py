"""Size of the next pack, from the rate at which the last ones were stored.

A pack should take about eight seconds: what is under way when the process is killed is sent again, and a
request for each pack costs money and a round trip. The size begins at 512 KiB and is at most a sixteenth of what
the process has stored, so that one which is killed again and again wastes little. Measured: 512 MiB over 12 MiB/s with 40
kills, by turns, sent 12 % twice where the size doubled from pack to pack, and 0.1 % so. Such small packs fit the socket's
buffer, which the kernel sends after the kill: a host that is lost wastes what is under way.
"""

from __future__ import annotations

import threading
from typing import Final

from ciuic.remote.objects.rate import steady_object_bytes

FIRST_BYTES: Final = 512 << 10
"""Size of the first pack of a process."""
MAX_BYTES: Final = 16 << 20
"""Largest pack: those that are filled, sent and copied by the client leave the uploader below 200 MiB."""
# Time that a pack should take.
_SECONDS: Final = 8.0
# Part of what was stored that one pack may have.
_STORED_PART: Final = 16
# Weight of the newest pack in the smoothed rate.
_WEIGHT: Final = 0.3


class PackSize:
    """Size of the next pack in bytes; for several threads."""

    def __init__(self, bytes_per_second: float | None = None) -> None:
        """Begin; ``bytes_per_second`` is the limit of the rate, which small packs keep more evenly."""
        self._max_bytes = MAX_BYTES
        if bytes_per_second is not None:
            self._max_bytes = min(MAX_BYTES, steady_object_bytes(bytes_per_second))
        self._lock = threading.Lock()
        self._size_bytes = FIRST_BYTES
        self._stored_bytes = 0
        self._rate = 0.0

    @property
    def size_bytes(self) -> int:
        """Size at which the next pack is closed."""
        return self._size_bytes

    @property
    def bytes_per_second(self) -> float:
        """Smoothed rate of one connection; 0 before the first pack."""
        return self._rate

    def stored(self, size_bytes: int, seconds: float) -> None:
        """Note that a pack of this size was stored in this time."""
        rate = size_bytes / max(seconds, 1e-3)
        with self._lock:
            self._rate = rate if not self._rate else self._rate + _WEIGHT * (rate - self._rate)
            wanted = int(self._rate * _SECONDS)
            self._stored_bytes += size_bytes
            earned = self._stored_bytes // _STORED_PART
            self._size_bytes = max(FIRST_BYTES, min(wanted, earned, self._max_bytes))
