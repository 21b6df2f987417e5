"""Model of an object store: simulated time, limits of request rates, prices. And pools of threads in simulated time.

All runs in one thread. A request moves the clock; a pool runs each call at once, at the time at which one of its threads is free,
and whoever asks for a result goes on at the time at which it was there. So the times are those of real threads that do nothing but wait
for the store, and each run has the same figures.

A partition of the store takes so many requests in each second and answers others with 503; the client waits, twice as long each time.
"""

from __future__ import annotations

import random
import threading
from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Generic, NamedTuple, TypeVar
from unittest.mock import patch

from ciuic.remote.objects.model import NoSuchObject, ObjectInfo, check_name
from ciuic.repository.identity import Bytes

MIB: Final = 1 << 20
PAGE: Final = 1000
PUTS_A_SECOND: Final = 3500
GETS_A_SECOND: Final = 5500
SPLIT_SECONDS: Final = 300
"""Time of load above four fifths of a limit after which the store divides a partition."""
BYTES_A_SECOND: Final = 90 * MIB
"""Rate of one connection."""
MEDIAN_SECONDS: Final = {"PUT": 0.060, "GET": 0.025, "HEAD": 0.020, "LIST": 0.080, "DELETE": 0.040}
SIGMA: Final = 0.45
"""Of the logarithm: with it 1 % of the requests take longer than 2.8 medians."""
DOLLARS: Final = {"PUT": 5e-6, "LIST": 5e-6, "GET": 4e-7, "HEAD": 4e-7, "DELETE": 0.0}
_FIRST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 15.0
_WRITES: Final = frozenset(("PUT", "DELETE"))

_Result = TypeVar("_Result")


class Clock:
    """Simulated time in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    @property
    def ns(self) -> int:
        """Time as stores tell it."""
        return int((self.now + 40 * 86_400) * 1e9)


class Partitions:
    """Parts of the key space, each with its limits. Begins with one; divides those that stay busy at the next character."""

    def __init__(self, parts: Iterable[str] = ()) -> None:
        self._parts: list[str] = ["", *parts]
        self._busy_since: dict[str, int] = {}
        self._last_busy: dict[str, int] = {}
        self._taken: defaultdict[tuple[str, bool, int], int] = defaultdict(int)
        self.refused: Counter[str] = Counter()
        """Answers 503 by top of the name."""
        self.peak: Counter[str] = Counter()
        """Most requests in one second, by partition."""

    @property
    def count(self) -> int:
        """Number of partitions."""
        return len(self._parts)

    def take(self, kind: str, name: str, seconds: float) -> bool:
        """Return whether the partition of the name takes a request at this time."""
        part = "" if len(self._parts) == 1 else max(filter(name.startswith, self._parts), key=len)
        second = int(seconds)
        write = kind in _WRITES
        limit = PUTS_A_SECOND if write else GETS_A_SECOND
        key = (part, write, second)
        if self._taken[key] >= limit:
            self.refused[top_of(name)] += 1
            return False
        self._taken[key] += 1
        self.peak[part] = max(self.peak[part], self._taken[key])
        if self._taken[key] == limit * 4 // 5:
            self._note_busy(part, second, name)
        return True

    def _note_busy(self, part: str, second: int, name: str) -> None:
        # A pause of ten seconds begins the count again.
        if second - self._last_busy.get(part, -1000) > 10:
            self._busy_since[part] = second
        self._last_busy[part] = second
        if second - self._busy_since[part] >= SPLIT_SECONDS:
            following = name[len(part) :]
            head = part + (following[: following.rindex("/", 0, 12) + 1] if "/" in following[:12] else "")
            digits = "0123456789abcdef"
            self._parts += [head + digit for digit in digits if head + digit not in self._parts]


def top_of(name: str) -> str:
    """Return what tells kinds of objects apart: the first part of a name, and the second one of packs."""
    parts = name.split("/")
    return "/".join(parts[:2]) if parts[0] == "packs" else parts[0]


class Usage(NamedTuple):
    """Requests by kind, bytes, and simulated seconds of a piece of work."""

    requests: Counter[str]
    sent_bytes: int
    received_bytes: int
    seconds: float

    @property
    def dollars(self) -> float:
        """Price of the requests."""
        return sum(DOLLARS[kind] * number for kind, number in self.requests.items())


class SimulatedStore:
    """Objects in memory behind a network that takes time. ``sizes``: bytes that objects below a prefix count as."""

    url = "simulated://bucket"

    def __init__(self, clock: Clock, *, seed: int = 1, sizes: dict[str, int] | None = None) -> None:
        self.clock = clock
        self.partitions = Partitions()
        self.requests: Counter[str] = Counter()
        self.by_top: Counter[tuple[str, str]] = Counter()
        self.sent_bytes = self.received_bytes = 0
        self.trace: list[tuple[str, str, int]] | None = None
        self._sizes = sizes or {}
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._thread = threading.get_ident()
        self._objects: dict[str, tuple[bytes, int]] = {}
        self._names: list[str] = []

    @contextmanager
    def measured(self) -> Iterator[list[Usage]]:
        """Provide a list that has the usage of the block behind it."""
        before = Counter(self.requests)
        sent, received, began = self.sent_bytes, self.received_bytes, self.clock.now
        found: list[Usage] = []
        yield found
        found.append(
            Usage(
                self.requests - before,
                self.sent_bytes - sent,
                self.received_bytes - received,
                self.clock.now - began,
            )
        )

    def count(self, prefix: str) -> int:
        """Return the number of objects below a prefix, which is no request."""
        return bisect_left(self._names, prefix + "\x7f") - bisect_left(self._names, prefix)

    def _request(self, kind: str, name: str, *, sent: int = 0, received: int = 0) -> None:
        with self._lock:
            self._count(kind, name, sent, received)
            # Threads of the real code beside the one that simulates: only counted.
            if threading.get_ident() == self._thread:
                self._wait(kind, name, sent + received)

    def _wait(self, kind: str, name: str, size_bytes: int) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while not self.partitions.take(kind, name, self.clock.now):
            self.clock.now += pause * self._random.uniform(0.5, 1.5)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        self.clock.now += MEDIAN_SECONDS[kind] * self._random.lognormvariate(0, SIGMA)
        self.clock.now += size_bytes / BYTES_A_SECOND

    def _count(self, kind: str, name: str, sent: int, received: int) -> None:
        self.requests[kind] += 1
        self.by_top[kind, top_of(name)] += 1
        self.sent_bytes += sent
        self.received_bytes += received
        if self.trace is not None:
            self.trace.append((kind, name, sent))

    def _declared(self, name: str, size_bytes: int) -> int:
        return next((size for prefix, size in self._sizes.items() if name.startswith(prefix)), size_bytes)

    def _store(self, name: str, data: bytes) -> None:
        with self._lock:
            if name not in self._objects:
                insort(self._names, name)
            self._objects[name] = (data, self.clock.ns)

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        """Store the parts as one object."""
        check_name(name)
        joined = b"".join(data)
        self._request("PUT", name, sent=self._declared(name, len(joined)))
        self._store(name, joined)

    def create(self, name: str, data: bytes) -> bool:
        """Store the object if the name is free."""
        check_name(name)
        self._request("PUT", name, sent=len(data))
        if name in self._objects:
            return False
        self._store(name, bytes(data))
        return True

    def get(self, name: str) -> bytes:
        """Return the whole object."""
        data = self._objects.get(name, (b"", 0))[0]
        self._request("GET", name, received=len(data))
        if name not in self._objects:
            raise NoSuchObject(name)
        return data

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Bytes]:
        """Return the bytes of each (offset, length)."""
        data = self.get(name)
        return [data[offset : offset + length] for offset, length in ranges]

    def tail(self, name: str, length: int) -> tuple[int, bytes]:
        """Return the size of the object and its last ``length`` bytes."""
        data = self._objects.get(name, (b"", 0))[0]
        self._request("GET", name, received=min(length, self._declared(name, len(data))))
        if name not in self._objects:
            raise NoSuchObject(name)
        return len(data), data[max(0, len(data) - length) :]

    def info(self, name: str) -> ObjectInfo | None:
        """Return size and time of an object; None if there is none."""
        self._request("HEAD", name)
        if name not in self._objects:
            return None
        data, modified_ns = self._objects[name]
        return ObjectInfo(name, len(data), modified_ns)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose names begin with ``prefix``, a request for each thousand."""
        while True:
            self._request("LIST", prefix, received=PAGE * 300)
            begin = max(bisect_left(self._names, prefix), bisect_right(self._names, after) if after else 0)
            page = [name for name in self._names[begin : begin + PAGE] if name.startswith(prefix)]
            for name in page:
                data, modified_ns = self._objects[name]
                yield ObjectInfo(name, len(data), modified_ns)
            if len(page) < PAGE:
                return
            after = page[-1]

    def delete(self, names: Iterable[str]) -> None:
        """Delete these objects, a thousand with each request."""
        chosen = list(names)
        for start in range(0, len(chosen), PAGE):
            self._request("DELETE", chosen[start])
            for name in chosen[start : start + PAGE]:
                if self._objects.pop(name, None) is not None:
                    del self._names[bisect_left(self._names, name)]

    def reconnect(self) -> None:
        """Do nothing: there are no connections."""

    def close(self) -> None:
        """Do nothing."""


class _SimulatedFuture(Generic[_Result]):
    def __init__(self, clock: Clock, call: Callable[[], _Result], done: Callable[[float], None]) -> None:
        self._clock = clock
        self._error: BaseException | None = None
        try:
            self._result: Any = call()
        except Exception as error:
            self._error = error
        self._done = clock.now
        done(clock.now)

    def result(self) -> _Result:
        self._clock.now = max(self._clock.now, self._done)
        if self._error is not None:
            raise self._error
        result: _Result = self._result
        return result

    def cancel(self) -> bool:
        return False


def simulated_pool(clock: Clock) -> type:
    """Return a stand-in for ThreadPoolExecutor in simulated time."""

    class Pool:
        def __init__(self, max_workers: int, thread_name_prefix: str = "") -> None:
            self._free = [clock.now] * max_workers

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *error: object) -> None:
            self.shutdown()

        def shutdown(self, *, wait: bool = True, cancel_futures: bool = False) -> None:
            clock.now = max(clock.now, *self._free)

        def submit(self, call: Callable[..., Any], *arguments: Any) -> _SimulatedFuture[Any]:
            here = clock.now
            worker = self._free.index(min(self._free))
            clock.now = max(here, self._free[worker])

            def done(seconds: float) -> None:
                self._free[worker] = seconds

            future = _SimulatedFuture(clock, lambda: call(*arguments), done)
            clock.now = here
            return future

        def map(self, call: Callable[[Any], Any], arguments: Iterable[Any]) -> Iterator[Any]:
            futures = [self.submit(call, argument) for argument in arguments]
            return (future.result() for future in futures)

    return Pool


_POOLS: Final = (
    "ciuic.remote.log_reader",
    "ciuic.remote.writer_log",
    "ciuic.remote.remote_index",
    "ciuic.remote.host_status",
    "ciuic.remote.upkeep.collection_round",
)


@contextmanager
def simulated_threads(clock: Clock) -> Iterator[None]:
    """Have the real code run its pools of threads in simulated time."""
    patches = [patch(f"{module}.ThreadPoolExecutor", simulated_pool(clock)) for module in _POOLS]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()
