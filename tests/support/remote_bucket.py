"""Object store in memory whose requests a test can order, lose, delay and cut off, one at a time."""

from __future__ import annotations

import random
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from ciuic.remote.objects.model import NoSuchObject, ObjectInfo, RemoteUnreachable
from ciuic.repository.ids import Bytes

DAY_NS = 86_400 * 10**9
_T = TypeVar("_T")


class Killed(BaseException):
    """SIGKILL at a request. Not an Exception: no handler may catch it."""


class Bucket:
    """Objects in memory. ``clock`` returns the store's time, which may jump."""

    url = "memory://bucket"

    def __init__(self, clock: Callable[[], int] = lambda: 0) -> None:
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.clock = clock
        self.requests = 0
        self.deleted: set[str] = set()

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        self.requests += 1
        self.objects[name] = (b"".join(data), self.clock())

    def create(self, name: str, data: bytes) -> bool:
        self.requests += 1
        if name in self.objects:
            return False
        self.objects[name] = (bytes(data), self.clock())
        return True

    def get(self, name: str) -> bytes:
        self.requests += 1
        if name not in self.objects:
            raise NoSuchObject(name)
        return self.objects[name][0]

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        data = self.get(name)
        return [data[offset : offset + length] for offset, length in ranges]

    def tail(self, name: str, length: int) -> tuple[int, bytes]:
        data = self.get(name)
        return len(data), data[-length:]

    def info(self, name: str) -> ObjectInfo | None:
        self.requests += 1
        if name not in self.objects:
            return None
        data, modified_ns = self.objects[name]
        return ObjectInfo(name, len(data), modified_ns)

    def page(self, prefix: str, after: str, count: int) -> list[ObjectInfo]:
        """Return one page of a listing."""
        self.requests += 1
        names = sorted(name for name in self.objects if name.startswith(prefix))
        names = names[bisect_right(names, after) :][:count]
        return [ObjectInfo(name, len(self.objects[name][0]), self.objects[name][1]) for name in names]

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        return iter(self.page(prefix, after, 1 << 30))

    def delete(self, names: Iterable[str]) -> None:
        self.requests += 1
        for name in names:
            if self.objects.pop(name, None) is not None:
                self.deleted.add(name)

    def reconnect(self) -> None:
        pass

    def close(self) -> None:
        pass


class Party:
    """Thread that stops before each of its requests until the test lets it go on.

    ``step`` carries out one request of it; exactly one thread runs at any time, so a run depends on the order of
    steps alone.
    """

    def __init__(self, bucket: Bucket, name: str) -> None:
        self.name = name
        self.objects = PartyObjects(bucket, self)
        self.request: str = ""
        """Request that waits; empty if there is none."""
        self.error: BaseException | None = None
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._fate = "go"
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], Any]) -> None:
        """Begin the work and run it up to its first request."""
        assert self._thread is None
        self.error = None
        self._thread = threading.Thread(target=self._run, args=(work,), name=self.name, daemon=True)
        self._thread.start()
        self._wait()

    @property
    def running(self) -> bool:
        return self._thread is not None

    def step(self, fate: str = "go") -> None:
        """Carry out the request that waits, as ``fate`` says, and run up to the next."""
        self._fate = fate
        self._go.release()
        self._wait()

    def kill(self) -> None:
        """End the party before its request."""
        if self.running:
            self.step("kill before")

    def _wait(self) -> None:
        self._stopped.acquire()
        if self._thread is not None and not self.request:
            self._thread.join()
            self._thread = None

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:
            self.error = error
        finally:
            self.request = ""
            self._stopped.release()

    def gate(self, request: str) -> str:
        """Wait for the test; return what happens to the request."""
        self.request = request
        self._stopped.release()
        self._go.acquire()
        if self._fate == "kill before":
            raise Killed(request)
        return self._fate


class PartyObjects:
    """Bucket as one party sees it."""

    url = "memory://bucket"

    def __init__(self, bucket: Bucket, party: Party) -> None:
        self.bucket = bucket
        self.page_size = 1 << 30
        self.late: list[Callable[[], object]] = []
        """Requests whose sender has given up, and which may still arrive."""
        self._party = party

    def _request(self, text: str, call: Callable[[], _T]) -> _T:
        fate = self._party.gate(text)
        if fate == "late":
            # A reply to what only reads has nobody left to read it.
            if text.startswith(("put", "create", "delete")):
                self.late.append(call)
            raise RemoteUnreachable(f"{text}: no reply")
        if fate == "lose request":
            raise RemoteUnreachable(f"{text}: not sent")
        result = call()
        if fate == "lose reply":
            raise RemoteUnreachable(f"{text}: no reply")
        if fate == "kill after":
            raise Killed(text)
        return result

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        copied = b"".join(data)
        self._request(f"put {name}", lambda: self.bucket.put(name, [copied]))

    def create(self, name: str, data: bytes) -> bool:
        return self._request(f"create {name}", lambda: self.bucket.create(name, data))

    def get(self, name: str) -> bytes:
        return self._request(f"get {name}", lambda: self.bucket.get(name))

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return self._request(f"get {name}", lambda: self.bucket.get_ranges(name, ranges))

    def tail(self, name: str, length: int) -> tuple[int, bytes]:
        return self._request(f"tail {name}", lambda: self.bucket.tail(name, length))

    def info(self, name: str) -> ObjectInfo | None:
        return self._request(f"info {name}", lambda: self.bucket.info(name))

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        # Page by page, as stores do: what is created between two pages may show up in the second alone.
        while True:
            page = self._request(f"list {prefix}", partial(self.bucket.page, prefix, after, self.page_size))
            yield from page
            if len(page) < self.page_size:
                return
            after = page[-1].name

    def delete(self, names: Iterable[str]) -> None:
        copied = list(names)
        if copied:
            self._request(f"delete {len(copied)}", lambda: self.bucket.delete(copied))

    def reconnect(self) -> None:
        pass

    def close(self) -> None:
        pass


def jumping_clock(rng: random.Random) -> Callable[[], int]:
    """Return a store's clock that is up to a day early or late at every look."""
    return lambda: 40 * DAY_NS + rng.randrange(-DAY_NS, DAY_NS)
