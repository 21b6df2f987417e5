"""Limit the rate at which an object store is written and read.

`RateLimit` gives each request its place on a line of time on which bytes lie end to end at the rate; a
request begins when its place does. So whatever threads ask, the bytes that begin within a time never exceed
what the rate allows, by more than one object for each thread. A body that is under way cannot be slowed
down: who wants an even rate sends bodies of at most `steady_object_bytes`.

References: the virtual scheduling form of the generic cell rate algorithm, ITU-T I.371, Annex A.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from ciuic.remote.objects.model import ObjectInfo, Objects
from ciuic.remote.objects.ranges import merge_ranges
from ciuic.repository.ids import Bytes

MIN_OBJECT_BYTES: Final = 4 << 20
MAX_OBJECT_BYTES_SENT: Final = 64 << 20
# An object of this time at its end moves a measurement over ten seconds by 4 %.
_STEADY_SECONDS: Final = 0.4
# What was not used may be made up for: else every pause between two objects would lower the rate.
_CATCH_UP_SECONDS: Final = 0.25


def steady_object_bytes(bytes_per_second: float) -> int:
    """Return the largest body with which a rate holds within 5 % over ten seconds; 4 to 64 MiB.

    Below 10 MiB/s the smallest body lasts longer, and the rate is less even.
    """
    return int(min(max(bytes_per_second * _STEADY_SECONDS, MIN_OBJECT_BYTES), MAX_OBJECT_BYTES_SENT))


class RateLimit:
    """Rate in bytes a second, shared by any number of threads."""

    def __init__(
        self,
        bytes_per_second: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Set the rate; None for no limit."""
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._rate = _positive(bytes_per_second)
        # Time at which the next byte has its place.
        self._next = clock()

    @property
    def bytes_per_second(self) -> float | None:
        """The rate; None for no limit."""
        return self._rate

    def change(self, bytes_per_second: float | None) -> None:
        """Change the rate for requests that have not asked yet."""
        with self._lock:
            self._rate = _positive(bytes_per_second)
            self._next = self._clock()

    def take(self, size_bytes: int) -> float:
        """Wait until this many bytes may be moved; return the seconds that were waited."""
        with self._lock:
            if self._rate is None:
                return 0.0
            now = self._clock()
            start = max(self._next, now - _CATCH_UP_SECONDS)
            self._next = start + size_bytes / self._rate
        waited = max(0.0, start - now)
        if waited:
            self._sleep(waited)
        return waited

    def account(self, size_bytes: int) -> None:
        """Count bytes that were moved already; later requests wait for them."""
        with self._lock:
            if self._rate is not None:
                self._next = max(self._next, self._clock() - _CATCH_UP_SECONDS) + size_bytes / self._rate


class LimitedObjects:
    """Objects that move no more bytes than two rates allow: one for writes, one for reads."""

    def __init__(self, objects: Objects, writes: RateLimit, reads: RateLimit) -> None:
        self._objects = objects
        self._writes = writes
        self._reads = reads

    @property
    def url(self) -> str:
        """URL of the prefix."""
        return self._objects.url

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        """Store the parts as one object."""
        self._writes.take(sum(len(part) for part in data))
        self._objects.put(name, data)

    def create(self, name: str, data: bytes) -> bool:
        """Store the object if the name is free. At once: commits do not queue behind packs."""
        self._writes.account(len(data))
        return self._objects.create(name, data)

    def get(self, name: str) -> bytes:
        """Return the whole object, whose size is counted afterwards."""
        self._reads.take(0)
        data = self._objects.get(name)
        self._reads.account(len(data))
        return data

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Bytes]:
        """Return the bytes of each (offset, length)."""
        self._reads.take(sum(length for _, length in merge_ranges(ranges)))
        return self._objects.get_ranges(name, ranges)

    def tail(self, name: str, length: int) -> tuple[int, bytes]:
        """Return the size of the object and its last ``length`` bytes."""
        self._reads.take(length)
        return self._objects.tail(name, length)

    def info(self, name: str) -> ObjectInfo | None:
        """Return size and time of an object."""
        return self._objects.info(name)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose names begin with ``prefix``."""
        return self._objects.list(prefix, after=after)

    def delete(self, names: Iterable[str]) -> None:
        """Delete these objects."""
        self._objects.delete(names)

    def reconnect(self) -> None:
        """Make new connections for reads."""
        self._objects.reconnect()

    def close(self) -> None:
        """Close the objects."""
        self._objects.close()


def _positive(bytes_per_second: float | None) -> float | None:
    if bytes_per_second is not None and bytes_per_second <= 0:
        raise ValueError(f"a rate must be positive, got {bytes_per_second}")
    return bytes_per_second
