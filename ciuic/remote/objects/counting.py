"""Count the requests of an object store: by kind, with bytes and seconds, for status, metrics and prices.

Counted are the requests that an operation stands for. Those that the client makes again after an error are
not seen here; a store may charge for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from ciuic.remote.objects.model import NoSuchObject, ObjectInfo, Objects
from ciuic.remote.objects.ranges import merge_ranges
from ciuic.repository.ids import Bytes

KINDS: Final = ("put", "create", "get", "head", "list", "delete")
"""Kinds of requests. Stores charge put, create and list alike, get and head alike, delete mostly not."""
_LIST_PAGE: Final = 1000


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
    """Objects that count what is asked of others."""

    def __init__(self, objects: Objects, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._objects = objects
        self._clock = clock
        self._lock = threading.Lock()
        self._counts = {kind: RequestCount() for kind in KINDS}

    @property
    def url(self) -> str:
        """URL of the prefix."""
        return self._objects.url

    def counts(self) -> dict[str, RequestCount]:
        """Return the counts since the beginning, by kind."""
        with self._lock:
            return dict(self._counts)

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        """Store the parts as one object."""
        with self._timed("put"):
            self._objects.put(name, data)
            self._add("put", sent_bytes=sum(len(part) for part in data))

    def create(self, name: str, data: bytes) -> bool:
        """Store the object if the name is free."""
        with self._timed("create"):
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

    @contextmanager
    def _timed(self, kind: str, requests: int = 1) -> Iterator[None]:
        started = self._clock()
        failed = 0
        try:
            yield
        except NoSuchObject:
            raise
        except Exception:
            failed = 1
            raise
        finally:
            self._add(kind, requests=requests, failed=failed, waited_seconds=self._clock() - started)

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
