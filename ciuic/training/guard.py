"""What must not be interrupted by what a signal leads to."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class Guard:
    """While it is entered, signals only leave word, and other threads wait; ``left`` is called when it is not any more.

    A handler of the program's own may enter it in the middle.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.left: Callable[[], None] = lambda: None
        self._lock = threading.RLock()
        self._pid = os.getpid()

    def __enter__(self) -> None:
        if self._pid != os.getpid():  # in a fork nobody else is there to give it back
            self._lock, self._pid, self.depth = threading.RLock(), os.getpid(), 0
        self._lock.acquire()
        self.depth += 1

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.depth -= 1
        self._lock.release()
        if not self.depth and error is None:
            self.left()
