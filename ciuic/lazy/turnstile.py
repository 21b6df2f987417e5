"""Gate through which every request passes, and which can be closed while none is inside."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turnstile:
    """Counts requests under way. A request that comes while it is closed waits until it opens."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._inside = 0
        self._closed = False

    def enter(self) -> None:
        """Wait until the turnstile is open, and count the caller."""
        with self._changed:
            while self._closed:
                self._changed.wait()
            self._inside += 1

    def leave(self) -> None:
        """Take the caller's count back."""
        with self._changed:
            self._inside -= 1
            if self._closed:
                self._changed.notify_all()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Keep callers out during the block, which begins when all have left."""
        with self._changed:
            self._closed = True
            while self._inside:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()
