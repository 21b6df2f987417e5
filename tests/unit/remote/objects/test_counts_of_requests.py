"""Counts of requests."""

from __future__ import annotations

import itertools

import pytest

from ciuic.remote.objects.memory_objects import MemoryObjects, forget_bucket
from ciuic.remote.objects.model import NoSuchObject, RemoteUnreachable
from ciuic.remote.objects.wrappers import CountingObjects, RequestCount


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
