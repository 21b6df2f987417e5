"""Object stores that wrap another one: they count its requests, limit its rate, or stand below a further prefix.

`CountingObjects` counts the requests that an operation stands for: by kind, with bytes and seconds, for status,
metrics and prices. Those that the client makes again after an error are not seen; a store may charge for them.

`LimitedObjects` limits the rate of writes and reads. `RateLimit` gives each request its place on a line of time
on which bytes lie end to end at the rate; a request begins when its place does. So whatever threads ask, the
bytes that begin within a time never exceed what the rate allows, by more than one object for each thread. A body
that is under way cannot be slowed down: who wants an even rate sends bodies of at most `steady_object_bytes`.

`PrefixedObjects` is the room that a repository with an identity of its own has in a remote.

References: the virtual scheduling form of the generic cell rate algorithm, ITU-T I.371, Annex A.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from ciuic.remote.objects.model import NoSuchObject, ObjectInfo, Objects, check_name, merge_ranges
from ciuic.remote.upload_deadline import LARGE_OBJECT_BYTES, WriteRate
from ciuic.repository.identity import Bytes

KINDS: Final = ("put", "create", "get", "head", "list", "delete")
"""Kinds of requests. Stores charge put, create and list alike, get and head alike, delete mostly not."""
_LIST_PAGE: Final = 1000
# Time of sending after which what was measured before counts half.
_RATE_SECONDS: Final = 20.0
_LATENCY_WEIGHT: Final = 0.3


@dataclass(frozen=True)
class RequestCount:
    """Requests of one kind."""

    requests: int = 0
    failed: int = 0
    """Operations that raised an error; an object that is not there is none."""
    sent_bytes: int = 0
    received_bytes: int = 0
    waited_seconds: float = 0.0
    """Sum over all threads."""


class CountingObjects:
    """Objects that count what is asked of others, and measure how fast the store takes it."""

    def __init__(self, objects: Objects, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._objects = objects
        self._clock = clock
        self._lock = threading.Lock()
        self._counts = {kind: RequestCount() for kind in KINDS}
        # Large objects under way, and the time in which there was at least one, with the bytes stored in it.
        self._large = 0
        self._large_since = 0.0
        self._busy_seconds = 0.0
        self._busy_bytes = 0.0
        self._request_seconds = 0.0

    @property
    def url(self) -> str:
        """URL of the prefix."""
        return self._objects.url

    def counts(self) -> dict[str, RequestCount]:
        """Return the counts since the beginning, by kind."""
        with self._lock:
            return dict(self._counts)

    def write_rate(self) -> WriteRate:
        """Return how fast the store takes objects, the last ones counting most."""
        with self._lock:
            self._settle_large(self._clock())
            rate = self._busy_bytes / self._busy_seconds if self._busy_bytes else 0.0
            return WriteRate(rate, self._request_seconds)

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        """Store the parts as one object."""
        size_bytes = sum(len(part) for part in data)
        with self._timed("put", size_bytes=size_bytes):
            self._objects.put(name, data)
            self._add("put", sent_bytes=size_bytes)

    def create(self, name: str, data: bytes) -> bool:
        """Store the object if the name is free."""
        with self._timed("create", size_bytes=len(data)):
            created = self._objects.create(name, data)
            self._add("create", sent_bytes=len(data))
        return created

    def get(self, name: str) -> bytes:
        """Return the whole object."""
        with self._timed("get"):
            data = self._objects.get(name)
            self._add("get", received_bytes=len(data))
        return data

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Bytes]:
        """Return the bytes of each (offset, length)."""
        merged = merge_ranges(ranges)
        with self._timed("get", requests=len(merged)):
            data = self._objects.get_ranges(name, ranges)
            self._add("get", received_bytes=_received(ranges, merged, data))
        return data

    def tail(self, name: str, length: int) -> tuple[int, bytes]:
        """Return the size of the object and its last ``length`` bytes."""
        with self._timed("get"):
            size_bytes, data = self._objects.tail(name, length)
            self._add("get", received_bytes=len(data))
        return size_bytes, data

    def info(self, name: str) -> ObjectInfo | None:
        """Return size and time of an object."""
        with self._timed("head"):
            return self._objects.info(name)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose names begin with ``prefix``; a request for each thousand."""
        infos = self._objects.list(prefix, after=after)
        while True:
            # Only the store's time counts, not that of the caller between two names.
            page = []
            with self._timed("list"):
                for info in infos:
                    page.append(info)
                    if len(page) == _LIST_PAGE:
                        break
            yield from page
            if len(page) < _LIST_PAGE:
                return

    def delete(self, names: Iterable[str]) -> None:
        """Delete these objects; each is counted."""
        names = list(names)
        with self._timed("delete", requests=len(names)):
            self._objects.delete(names)

    def reconnect(self) -> None:
        """Make new connections for reads."""
        self._objects.reconnect()

    def close(self) -> None:
        """Close the objects; the counts stay."""
        self._objects.close()

    def _settle_large(self, now: float) -> None:
        """Count the time until now in which a large object was under way."""
        if self._large:
            # At least a microsecond, so that what was stored at once has a rate.
            self._busy_seconds += max(now - self._large_since, 1e-6)
        self._large_since = now
        if self._busy_seconds > _RATE_SECONDS:
            self._busy_seconds /= 2
            self._busy_bytes /= 2

    @contextmanager
    def _timed(self, kind: str, requests: int = 1, size_bytes: int = -1) -> Iterator[None]:
        """Count and time an operation; ``size_bytes`` is the size of the object that it stores."""
        is_large = size_bytes >= LARGE_OBJECT_BYTES
        started = self._clock()
        with self._lock:
            self._settle_large(started)
            self._large += is_large
        failed = 0
        try:
            yield
        except NoSuchObject:
            raise
        except Exception:
            failed = 1
            raise
        finally:
            ended = self._clock()
            self._add(kind, requests=requests, failed=failed, waited_seconds=ended - started)
            with self._lock:
                self._settle_large(ended)
                self._large -= is_large
                # An object that was not stored is time without bytes.
                if is_large and not failed:
                    self._busy_bytes += size_bytes
                elif size_bytes >= 0 and not failed:
                    # A slow request counts at once, and is forgotten slowly: a promise depends on it.
                    seconds = ended - started
                    smoothed = self._request_seconds + _LATENCY_WEIGHT * (seconds - self._request_seconds)
                    self._request_seconds = max(seconds, smoothed)

    def _add(
        self,
        kind: str,
        *,
        requests: int = 0,
        failed: int = 0,
        sent_bytes: int = 0,
        received_bytes: int = 0,
        waited_seconds: float = 0.0,
    ) -> None:
        with self._lock:
            old = self._counts[kind]
            self._counts[kind] = replace(
                old,
                requests=old.requests + requests,
                failed=old.failed + failed,
                sent_bytes=old.sent_bytes + sent_bytes,
                received_bytes=old.received_bytes + received_bytes,
                waited_seconds=old.waited_seconds + waited_seconds,
            )


def _received(
    ranges: Sequence[tuple[int, int]], merged: Sequence[tuple[int, int]], data: Sequence[Bytes]
) -> int:
    """Return the bytes that were read, with the gaps between ranges that are read as one."""
    end = max((offset + length for offset, length in merged), default=0)
    # A range that was cut tells where the object ends: readers of small objects ask for as much as may be.
    if any(len(part) < length for (_, length), part in zip(ranges, data, strict=True)):
        end = max(offset + len(part) for (offset, _), part in zip(ranges, data, strict=True))
    return sum(max(0, min(offset + length, end) - offset) for offset, length in merged)


_MIN_STEADY_OBJECT_BYTES: Final = 4 << 20
_MAX_STEADY_OBJECT_BYTES: Final = 64 << 20
# An object of this time at its end moves a measurement over ten seconds by 4 %.
_STEADY_SECONDS: Final = 0.4
# What was not used may be made up for: else every pause between two objects would lower the rate.
_CATCH_UP_SECONDS: Final = 0.25


def steady_object_bytes(bytes_per_second: float) -> int:
    """Return the largest body with which a rate holds within 5 % over ten seconds; 4 to 64 MiB.

    Below 10 MiB/s the smallest body lasts longer, and the rate is less even.
    """
    return int(
        min(max(bytes_per_second * _STEADY_SECONDS, _MIN_STEADY_OBJECT_BYTES), _MAX_STEADY_OBJECT_BYTES)
    )


class RateLimit:
    """Rate in bytes a second, shared by any number of threads."""

    def __init__(
        self,
        bytes_per_second: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        """Set the rate; None for no limit."""
        self._clock = clock
        self._lock = threading.Lock()
        self._lifted = threading.Event()
        """Set when the limit ends for those that wait."""
        self._sleep = sleep or self._lifted.wait
        self._rate = _positive(bytes_per_second)
        # Time at which the next byte has its place.
        self._next = clock()

    @property
    def bytes_per_second(self) -> float | None:
        """Rate in bytes a second; None for no limit."""
        return self._rate

    def change(self, bytes_per_second: float | None) -> None:
        """Change the rate for requests that have not asked yet; None also ends the waits of those that have."""
        with self._lock:
            self._rate = _positive(bytes_per_second)
            self._next = self._clock()
        if bytes_per_second is None:
            self._lifted.set()
        else:
            self._lifted.clear()

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


class PrefixedObjects:
    """Objects whose names begin with a prefix, which is left out of them. `close` closes the others too."""

    def __init__(self, objects: Objects, prefix: str) -> None:
        """Take a prefix without the slash at its end."""
        check_name(prefix)
        self._objects = objects
        self._prefix = f"{prefix}/"

    @property
    def url(self) -> str:
        """URL of the prefix."""
        return f"{self._objects.url}/{self._prefix[:-1]}"

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        """Store the parts as one object."""
        self._objects.put(self._prefix + name, data)

    def create(self, name: str, data: bytes) -> bool:
        """Store the object if the name is free."""
        return self._objects.create(self._prefix + name, data)

    def get(self, name: str) -> bytes:
        """Return the whole object."""
        return self._objects.get(self._prefix + name)

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Bytes]:
        """Return the bytes of each (offset, length)."""
        return self._objects.get_ranges(self._prefix + name, ranges)

    def tail(self, name: str, length: int) -> tuple[int, bytes]:
        """Return the size of the object and its last ``length`` bytes."""
        return self._objects.tail(self._prefix + name, length)

    def info(self, name: str) -> ObjectInfo | None:
        """Return size and time of an object."""
        found = self._objects.info(self._prefix + name)
        return found and found._replace(name=name)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose names begin with ``prefix``."""
        start = len(self._prefix)
        for info in self._objects.list(self._prefix + prefix, after=after and self._prefix + after):
            yield info._replace(name=info.name[start:])

    def delete(self, names: Iterable[str]) -> None:
        """Delete these objects."""
        self._objects.delete(self._prefix + name for name in names)

    def reconnect(self) -> None:
        """Make new connections for reads."""
        self._objects.reconnect()

    def close(self) -> None:
        """Close the objects."""
        self._objects.close()
