"""Repeat requests that a store did not answer, for a limited time.

`RetryingObjects` does it for everything that is read, put or deleted, so that no reader has to. Not for `create`: a lost reply leaves
open whether the name was taken, which only the caller can find out. Sequences that create are repeated whole, with `RetryPolicy.call`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from ciuic.remote.objects.model import (
    ListingProgress,
    ObjectInfo,
    Objects,
    RemoteUnreachable,
    UntrustedStore,
)
from ciuic.repository import log
from ciuic.repository.identity import Bytes

DEFAULT_RETRY_SECONDS: Final = 240.0
"""Time after which a read is given up: stores that answer 503 for two minutes are waited for."""
_FIRST_PAUSE_SECONDS: Final = 0.5
_MAX_PAUSE_SECONDS: Final = 15.0
# Who waits at a terminal learns after this time for what.
_SILENT_SECONDS: Final = 10.0

_Result = TypeVar("_Result")


class RetryPolicy:
    """Repeats requests, and says so for each reason once. May be used from several threads.

    Args:
        seconds: Time for which one request is repeated.
        clock: Monotonic clock.
    """

    def __init__(
        self, seconds: float = DEFAULT_RETRY_SECONDS, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        # What comes before is the request, of which each has a name of its own.
        self._said: set[str] = set()
        self._ended = threading.Event()

    def end(self) -> None:
        """Give up every request that waits now or later."""
        self._ended.set()

    def require(self) -> None:
        """Raise RemoteUnreachable after `end`."""
        if self._ended.is_set():
            raise RemoteUnreachable("the remote was closed meanwhile")

    def call(self, request: Callable[[], _Result]) -> _Result:
        """Return the result of the request.

        Raises:
            RemoteUnreachable: the store did not answer for too long.
        """
        began = self._clock()
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return request()
            except UntrustedStore:
                raise
            except RemoteUnreachable as error:
                waited = self._clock() - began
                reason = error.message.partition(": ")[2] or error.message
                if waited + pause > _SILENT_SECONDS and reason not in self._said:
                    self._said.add(reason)
                    log.warning("remote_request_repeated", error=error.message, for_seconds=self._seconds)
                if waited + pause > self._seconds or self._ended.wait(pause):
                    raise
                pause = min(2 * pause, _MAX_PAUSE_SECONDS)


class RetryingObjects:
    """Objects whose requests are repeated while the store does not answer; `create` is asked once.

    Args:
        objects: The store.
        retry: How long a request is repeated.
    """

    def __init__(self, objects: Objects, retry: RetryPolicy) -> None:
        self._objects = objects
        self._retry = retry

    @property
    def url(self) -> str:
        """URL of the prefix."""
        return self._objects.url

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        """Store the parts as one object."""
        self._retry.call(lambda: self._objects.put(name, data))

    def create(self, name: str, data: bytes) -> bool:
        """Store the object if the name is free; not repeated."""
        return self._objects.create(name, data)

    def get(self, name: str) -> bytes:
        """Return the whole object."""
        return self._retry.call(lambda: self._objects.get(name))

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Bytes]:
        """Return the bytes of each (offset, length)."""
        return self._retry.call(lambda: self._objects.get_ranges(name, ranges))

    def tail(self, name: str, length: int) -> tuple[int, bytes]:
        """Return the size of the object and its last ``length`` bytes."""
        return self._retry.call(lambda: self._objects.tail(name, length))

    def info(self, name: str) -> ObjectInfo | None:
        """Return size and time of an object."""
        return self._retry.call(lambda: self._objects.info(name))

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose names begin with ``prefix``; a listing that was cut off continues after its last name."""
        last = after
        progress = ListingProgress(prefix)
        infos = self._objects.list(prefix, after=last)

        def following() -> ObjectInfo | None:
            nonlocal infos
            try:
                return next(infos, None)
            except RemoteUnreachable:
                infos = self._objects.list(prefix, after=last)
                raise

        while (info := self._retry.call(following)) is not None:
            last = info.name
            # A store that ignores where it is to go on would begin again after each such error.
            progress.check(last)
            # Of a million names in another thread, after an interruption.
            self._retry.require()
            yield info

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; one that is not there is none."""
        listed = tuple(names)
        self._retry.call(lambda: self._objects.delete(listed))

    def reconnect(self) -> None:
        """Have the next request use another connection."""
        self._objects.reconnect()

    def close(self) -> None:
        """Close the store."""
        self._objects.close()
