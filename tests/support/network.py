"""Link of a fixed rate between two ends of a test."""

from __future__ import annotations

import threading
import time


class Network:
    """Link of a fixed rate, shared by all connections that call it for each piece."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._next = time.monotonic()

    def __call__(self, size_bytes: int) -> None:
        """Wait until the link has carried so many more bytes."""
        with self._lock:
            self._next = max(self._next, time.monotonic() - 0.1) + size_bytes / self._rate
            wait = self._next - time.monotonic()
        if wait > 0:
            time.sleep(wait)
