"""Ranges that are read ahead: the right bytes, within the memory, whatever is announced and asked for."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import pytest

from ciuic.remote.objects.memory_objects import MemoryObjects, forget_bucket
from ciuic.remote.objects.model import NoSuchObject, RemoteUnreachable
from ciuic.remote.reading.remote_packs import WINDOW_BYTES, RangePrefetch
from ciuic.repository.identity import Bytes

SIZE = 8 << 20
MEMORY = 4 << 20
LONG = 512 << 10


class Watched(MemoryObjects):
    """Objects that count requests, and how many are under way at once."""

    def __init__(self) -> None:
        super().__init__("prefetch")
        self.lock = threading.Lock()
        self.requests: list[tuple[str, int, int]] = []
        self.under_way = self.most = 0
        self.failing: set[str] = set()
        self.gate: threading.Event | None = None

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Bytes]:
        with self.lock:
            self.requests += ((name, *one) for one in ranges)
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        try:
            if self.gate is not None:
                assert self.gate.wait(30)
            if name in self.failing:
                raise RemoteUnreachable("no answer")
            return super().get_ranges(name, ranges)
        finally:
            with self.lock:
                self.under_way -= 1


@pytest.fixture
def objects() -> Watched:
    forget_bucket("prefetch")
    found = Watched()
    for name in ("a", "b"):
        found.put(name, [random.Random(name).randbytes(SIZE)])
    return found


def prefetch(objects: Watched) -> RangePrefetch:
    return RangePrefetch(objects, threads=3, memory_bytes=MEMORY)


@pytest.mark.parametrize("seed", range(6))
def test_random_reads_are_right(objects: Watched, seed: int) -> None:
    """Several threads that announce and read at random get the object's bytes, and memory stays within its limit."""
    contents = {name: objects.get(name) for name in ("a", "b")}
    ranges = prefetch(objects)
    wrong: list[object] = []

    def work(number: int) -> None:
        rng = random.Random(seed * 100 + number)
        for _ in range(60):
            name, start = rng.choice("ab"), rng.randrange(SIZE + 1000)
            length = rng.choice((1, 4096, 300_000, LONG))
            if rng.random() < 0.6:
                ranges.announce(name, start, length)
            if (
                rng.random() < 0.7
                and bytes(ranges.read(name, start, length)) != contents[name][start : start + length]
            ):
                wrong.append((name, start, length))
            held = ranges.held_bytes
            # One range besides for each thread that reads.
            if held > MEMORY + 7 * WINDOW_BYTES:
                wrong.append(held)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    ranges.close()
    assert wrong == []
    assert objects.most <= 3 + 4


def test_what_was_announced_is_read_once(objects: Watched) -> None:
    """Announced ranges are asked for once each, several at the same time, before they are needed."""
    ranges = prefetch(objects)
    objects.gate = threading.Event()
    starts = range(0, 3 * LONG, LONG)
    for start in starts:
        ranges.announce("a", start, LONG)
        ranges.announce("a", start, LONG)
    objects.gate.set()
    for start in starts:
        assert len(ranges.read("a", start, LONG)) == LONG
    ranges.close()
    assert sorted(objects.requests) == [("a", start, LONG) for start in starts]


def test_what_is_never_read_stops_nothing(objects: Watched) -> None:
    """Announcements beyond the memory that nobody asks for leave later ones as fast as requests of their own."""
    ranges = prefetch(objects)
    for start in range(0, SIZE, LONG):
        ranges.announce("a", start, LONG)
    for start in range(0, SIZE, LONG):
        ranges.announce("b", start, LONG)
        assert bytes(ranges.read("b", start, LONG)) == objects.get("b")[start : start + LONG]
    assert ranges.held_bytes <= MEMORY + 3 * LONG
    ranges.close()


def test_small_files_share_a_request(objects: Watched) -> None:
    """Records that lie beside one another are read together."""
    ranges = prefetch(objects)
    for start in range(0, 512 << 10, 4096):
        assert bytes(ranges.read("a", start, 4096)) == objects.get("a")[start : start + 4096]
    ranges.close()
    assert objects.requests == [("a", 0, WINDOW_BYTES)]


def test_an_error_is_for_those_who_ask(objects: Watched) -> None:
    """A range that cannot be read raises for its readers, and is asked for again the next time."""
    ranges = prefetch(objects)
    objects.failing.add("a")
    ranges.announce("a", 0, LONG)
    with pytest.raises(RemoteUnreachable):
        ranges.read("a", 0, LONG)
    assert len(ranges.read("b", 0, LONG)) == LONG
    objects.failing.clear()
    assert len(ranges.read("a", 0, LONG)) == LONG
    with pytest.raises(NoSuchObject):
        ranges.read("c", 0, LONG)
    ranges.close()


def test_the_end_of_an_object_is_short(objects: Watched) -> None:
    """A range beyond the end gives what is there."""
    ranges = prefetch(objects)
    assert len(ranges.read("a", SIZE - 10, 100)) == 10
    assert len(ranges.read("a", SIZE - 10, 10)) == 10
    assert len(ranges.read("a", SIZE + 10, 10)) == 0
    ranges.close()


def test_what_follows_closely_is_one_request(objects: Watched) -> None:
    """Ranges that are announced while others are read become one request where they lie close together."""
    objects.gate = threading.Event()
    ranges = prefetch(objects)
    for start in range(0, 3 * LONG, LONG):
        ranges.announce("b", start, LONG)
    # The three threads are busy, or the memory is: what follows waits, and grows.
    for start in range(0, 4 * LONG, LONG // 2):
        ranges.announce("a", start, LONG // 2)
    ranges.announce("a", SIZE - LONG, LONG)
    objects.gate.set()
    wanted = objects.get("a")
    for start in (*range(0, 4 * LONG, LONG // 2), SIZE - LONG):
        assert bytes(ranges.read("a", start, LONG // 2)) == wanted[start : start + LONG // 2]
    ranges.close()
    assert sorted(request for request in objects.requests if request[0] == "a") == [
        ("a", 0, 4 * LONG),
        ("a", SIZE - LONG, LONG),
    ]
