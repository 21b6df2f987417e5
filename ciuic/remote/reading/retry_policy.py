"""Repeat requests that a store did not answer, for a limited time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from ciuic.remote.objects.model import RemoteUnreachable

DEFAULT_RETRY_SECONDS: Final = 240.0
"""Time after which a read is given up: stores that answer 503 for two minutes are waited for."""
_FIRST_PAUSE_SECONDS: Final = 0.5
_MAX_PAUSE_SECONDS: Final = 15.0

_Result = TypeVar("_Result")


class RetryPolicy:
    """Repeats reads. May be used from several threads.

    Args:
        seconds: Time for which one request is repeated.
    """

    def __init__(self, seconds: float = DEFAULT_RETRY_SECONDS) -> None:
        self._seconds = seconds
        self._ended = threading.Event()

    def end(self) -> None:
        """Give up every request that waits now or later."""
        self._ended.set()

    def call(self, request: Callable[[], _Result]) -> _Result:
        """Return the result of the request.

        Raises:
            RemoteUnreachable: the store did not answer for too long.
        """
        deadline = time.monotonic() + self._seconds
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return request()
            except RemoteUnreachable:
                if time.monotonic() + pause > deadline or self._ended.wait(pause):
                    raise
                pause = min(2 * pause, _MAX_PAUSE_SECONDS)
