"""Critical section that defers signal handlers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class Guard:
    """Reentrant critical section: other threads wait for its end, signal handlers defer their work to it.

    It is reentrant because a handler of the program's own may save in the middle of another save.
    """

    def __init__(self, released: Callable[[], None]) -> None:
        """Create a guard that nobody holds.

        Args:
            released: Called after the outermost section has ended without an exception.
        """
        self.depth = 0
        self._released = released
        self._lock = threading.RLock()
        self._pid = os.getpid()

    def __enter__(self) -> None:
        """Enter the section."""
        # A child that was forked inside of the section has a lock that no thread of it will ever release.
        if self._pid != os.getpid():
            self._lock, self._pid, self.depth = threading.RLock(), os.getpid(), 0
        self._lock.acquire()
        self.depth += 1

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Leave the section."""
        self.depth -= 1
        self._lock.release()
        # Not while an exception is on its way out: what was deferred may raise SystemExit in its place.
        if not self.depth and error is None:
            self._released()
