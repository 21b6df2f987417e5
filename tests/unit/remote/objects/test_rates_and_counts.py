"""Rate limits, on a clock that stands still unless somebody sleeps, and counts of requests."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.remote.objects.memory_objects import MemoryObjects, forget_bucket
from ciuic.remote.objects.model import NoSuchObject, RemoteUnreachable
from ciuic.remote.objects.wrappers import (
    CountingObjects,
    LimitedObjects,
    RateLimit,
    RequestCount,
    steady_object_bytes,
)

MIB = 1 << 20


class Clock:
    """Clock of one thread: sleeping moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class SharedClock:
    """Clock of several threads, which moves when all of them sleep, to the first that wakes up."""

    def __init__(self, threads: int) -> None:
        self._awake = threads
        self._now = 1000.0
        self._sleepers: list[float] = []
        self._condition = threading.Condition()

    def __call__(self) -> float:
        with self._condition:
            return self._now

    def sleep(self, seconds: float) -> None:
        with self._condition:
            until = self._now + seconds
            heapq.heappush(self._sleepers, until)
            self._awake -= 1
            self._advance()
            self._condition.wait_for(lambda: self._now >= until)

    def leave(self) -> None:
        """End a thread."""
        with self._condition:
            self._awake -= 1
            self._advance()

    def _advance(self) -> None:
        if not self._awake and self._sleepers:
            self._now = max(self._now, self._sleepers[0])
            while self._sleepers and self._sleepers[0] <= self._now:
                heapq.heappop(self._sleepers)
                self._awake += 1
            self._condition.notify_all()


@pytest.mark.parametrize("rate_mib", [10, 50, 400])
@pytest.mark.parametrize("threads", [1, 4, 16])
def test_a_rate_holds_over_ten_seconds(rate_mib: int, threads: int) -> None:
    """Several threads that send bodies of the steady size move between 95 and 105 % in every ten seconds."""
    rate = rate_mib * MIB
    clock = SharedClock(threads)
    limit = RateLimit(rate, clock=clock, sleep=clock.sleep)
    size = steady_object_bytes(rate)
    begun: list[float] = []

    def send() -> None:
        while clock() < 1060:
            limit.take(size)
            begun.append(clock())
            # The network is faster than the limit.
            clock.sleep(size / rate / 4)
        clock.leave()

    workers = [threading.Thread(target=send) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for start in range(1000, 1050):
        moved = sum(size for at in begun if start <= at < start + 10)
        assert 0.95 <= moved / (10 * rate) <= 1.05, start


@given(st.lists(st.tuples(st.integers(0, 64 * MIB), st.floats(0, 5)), min_size=1, max_size=30))
def test_no_more_than_the_rate_begins(steps: list[tuple[int, float]]) -> None:
    """Whatever is asked when, what began before a moment fits into the time, a quarter second, and one body."""
    clock = Clock()
    rate = 10 * MIB
    limit = RateLimit(rate, clock=clock, sleep=clock.sleep)
    moved = 0
    for size, pause in steps:
        limit.take(size)
        assert moved <= rate * (clock() - 1000.0 + 0.26)
        moved += size
        clock.now += pause


def test_no_limit_and_changes() -> None:
    """Without a limit nothing waits; a change holds for those who ask later; a rate must be positive."""
    clock = Clock()
    limit = RateLimit(None, clock=clock, sleep=clock.sleep)
    assert limit.take(1 << 40) == 0
    limit.change(100)
    assert limit.bytes_per_second == 100
    assert limit.take(1000) == 0
    assert limit.take(1) == pytest.approx(10)
    limit.change(None)
    assert limit.take(1 << 40) == 0
    with pytest.raises(ValueError, match="positive"):
        limit.change(0)


def test_objects_are_limited_by_what_they_move() -> None:
    """Writes wait for writes and reads for reads; small requests of the protocol wait for nothing."""
    clock = Clock()
    writes, reads = (RateLimit(100, clock=clock, sleep=clock.sleep) for _ in range(2))
    objects = LimitedObjects(MemoryObjects("limited"), writes, reads)
    waited: list[float] = []

    def timed(call: Callable[[], object]) -> None:
        start = clock()
        call()
        waited.append(clock() - start)

    timed(lambda: objects.put("a", [bytes(500), bytes(500)]))
    timed(lambda: objects.create("b", bytes(100)))
    timed(lambda: objects.get("a"))
    timed(lambda: objects.get_ranges("a", [(0, 100), (100, 100)]))
    timed(lambda: objects.tail("a", 10))
    timed(lambda: objects.put("c", [b""]))
    timed(lambda: list(objects.list("")))
    timed(lambda: objects.info("a"))
    forget_bucket("limited")
    assert waited == pytest.approx([0, 0, 0, 10, 2, 0, 0, 0], abs=0.3)


def test_requests_are_counted_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation counts its requests, bytes and seconds; errors count, missing objects do not."""
    ticks = itertools.count()
    inner = MemoryObjects("counted")
    objects = CountingObjects(inner, clock=lambda: float(next(ticks)))
    objects.put("a", [bytes(600_000), b"1234"])
    objects.create("b", b"12345")
    objects.create("b", b"12345")
    objects.get("b")
    with pytest.raises(NoSuchObject):
        objects.get("c")
    objects.get_ranges("a", [(0, 10), (20, 10), (500_000, 7)])
    objects.tail("a", 100)
    objects.info("a")
    for number in range(1001):
        inner.create(f"w/{number:04}", b"")
    assert len(list(objects.list("w/"))) == 1001
    objects.delete(f"w/{number:04}" for number in range(1001))

    def fail(_name: str) -> bytes:
        raise RemoteUnreachable("no answer")

    monkeypatch.setattr(inner, "get", fail)
    with pytest.raises(RemoteUnreachable):
        objects.get("b")
    forget_bucket("counted")
    assert objects.counts() == {
        "put": RequestCount(1, 0, 600_004, 0, 1.0),
        "create": RequestCount(2, 0, 10, 0, 2.0),
        "get": RequestCount(6, 1, 0, 5 + 30 + 7 + 100, 5.0),
        "head": RequestCount(1, 0, 0, 0, 1.0),
        "list": RequestCount(2, 0, 0, 0, 2.0),
        "delete": RequestCount(1001, 0, 0, 0, 1.0),
    }


def test_a_range_beyond_the_end_counts_what_was_read() -> None:
    """A reader that asks for more than there is has received the object, not what it asked for."""
    counting = CountingObjects(MemoryObjects("counted-ends"))
    counting.put("packs/a", [b"x" * 100])
    counting.get_ranges("packs/a", [(0, 1 << 26)])
    counting.get_ranges("packs/a", [(90, 5), (98, 50)])
    assert counting.counts()["get"].received_bytes == 100 + 10
    forget_bucket("counted-ends")
