"""Contract of `Objects`: every store keeps it alike, whatever it is made of."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.object_servers import SeaweedFS
from support.ssh_server import SshServer

from ciuic.remote.objects.memory_objects import forget_bucket
from ciuic.remote.objects.model import NoSuchObject, ObjectInfo, Objects, RemoteUnreachable
from ciuic.remote.objects.opening import open_objects
from ciuic.remote.objects.wrappers import CountingObjects, LimitedObjects, PrefixedObjects, RateLimit
from ciuic.remote.reading.retry_policy import RetryingObjects, RetryPolicy
from ciuic.repository.identity import Bytes

Connect = Callable[[], Objects]
"""Opens the same place with a client of its own."""


class SilentAtFirst:
    """Objects that do not answer any request but `create` the first time, and break each listing off after two names."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._silent = threading.local()

    url = property(lambda self: self._objects.url)

    def _answers(self) -> None:
        self._silent.now = not getattr(self._silent, "now", False)
        if self._silent.now:
            raise RemoteUnreachable("no answer")

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        self._answers()
        self._objects.put(name, data)

    def create(self, name: str, data: bytes) -> bool:
        return self._objects.create(name, data)

    def get(self, name: str) -> bytes:
        self._answers()
        return self._objects.get(name)

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Bytes]:
        self._answers()
        return self._objects.get_ranges(name, ranges)

    def tail(self, name: str, length: int) -> tuple[int, bytes]:
        self._answers()
        return self._objects.tail(name, length)

    def info(self, name: str) -> ObjectInfo | None:
        self._answers()
        return self._objects.info(name)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        for number, info in enumerate(self._objects.list(prefix, after=after)):
            if number == 2:
                raise RemoteUnreachable("no answer")
            yield info

    def delete(self, names: Iterable[str]) -> None:
        self._answers()
        self._objects.delete(names)

    def reconnect(self) -> None:
        self._objects.reconnect()

    def close(self) -> None:
        self._objects.close()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ciuic.remote.reading.retry_policy._FIRST_PAUSE_SECONDS", 0.0)


@pytest.fixture(
    scope="module",
    params=["memory", "file", "ssh", "seaweedfs", "wrapped", "retried"],
)
def kind(request: pytest.FixtureRequest) -> tuple[str, SeaweedFS | SshServer | None]:
    # Not a function's fixture: the server would be taken for a process that the first test left behind.
    fixture = {"seaweedfs": "seaweedfs", "ssh": "ssh_server"}.get(request.param)
    return request.param, request.getfixturevalue(fixture) if fixture else None


@pytest.fixture
def connect(kind: tuple[str, SeaweedFS | SshServer | None], tmp_path: Path) -> Iterator[Connect]:
    name, server = kind
    if name == "file":
        yield lambda: open_objects(f"file://{tmp_path}/remote", make=True)
    elif server is not None:
        url = server.new_url()
        yield lambda: server.connect(url)
    else:
        bucket = f"bucket-{uuid.uuid4().hex}"

        def open_memory() -> Objects:
            objects = open_objects(f"memory://{bucket}/top")
            if name == "retried":
                return RetryingObjects(SilentAtFirst(objects), RetryPolicy())
            if name == "wrapped":
                free = RateLimit(None)
                return PrefixedObjects(LimitedObjects(CountingObjects(objects), free, free), "a/b")
            return objects

        yield open_memory
        forget_bucket(bucket)


@pytest.fixture
def objects(connect: Connect) -> Iterator[Objects]:
    opened = connect()
    yield opened
    opened.close()


def test_what_is_put_is_read_back(connect: Connect, objects: Objects) -> None:
    """An object of any parts is read back whole, in ranges and from its end, by another client too."""
    parts = [b"0123", memoryview(b"456"), b"", memoryview(bytearray(b"789"))]
    objects.put("a/b/c", parts)
    other = connect()
    assert objects.get("a/b/c") == other.get("a/b/c") == b"0123456789"
    asked = [(0, 3), (2, 4), (9, 1), (8, 5), (10, 3), (50, 2), (4, 0)]
    assert [bytes(part) for part in other.get_ranges("a/b/c", asked)] == [
        b"012", b"2345", b"9", b"89", b"", b"", b"",
    ]  # fmt: skip
    assert objects.get_ranges("a/b/c", []) == []
    assert other.tail("a/b/c", 4) == (10, b"6789")
    assert other.tail("a/b/c", 40) == (10, b"0123456789")
    info = other.info("a/b/c")
    assert info is not None
    assert info[:2] == ("a/b/c", 10)
    assert list(other.list("a/")) == [info]
    other.close()


def test_an_empty_object_can_be_stored(objects: Objects) -> None:
    """An empty object is there and has nothing."""
    objects.put("empty", [])
    assert objects.get("empty") == b""
    assert objects.tail("empty", 5) == (0, b"")
    assert [bytes(part) for part in objects.get_ranges("empty", [(0, 4), (7, 1)])] == [b"", b""]
    info = objects.info("empty")
    assert info is not None
    assert info.size_bytes == 0


def test_a_put_replaces_and_a_create_does_not(objects: Objects) -> None:
    """`put` replaces an object, also a longer one; `create` leaves what is there and returns False."""
    objects.put("name", [b"longer than that"])
    objects.put("name", [b"short"])
    assert not objects.create("name", b"other")
    assert objects.get("name") == b"short"
    assert objects.create("new/name", b"mine")
    assert not objects.create("new/name", b"mine")
    assert objects.get("new/name") == b"mine"
    objects.delete(["new/name"])
    assert objects.create("new/name", b"again")


def test_each_way_of_reading_tells_a_missing_object(objects: Objects) -> None:
    """Each way of reading tells a missing object, and deleting one is no error."""
    objects.put("there", [b"x"])
    for read in (
        objects.get,
        lambda name: objects.tail(name, 3),
        lambda name: objects.get_ranges(name, [(0, 2)]),
    ):
        with pytest.raises(NoSuchObject) as missing:
            read("not/there")
        assert "not/there" in str(missing.value)
    assert objects.info("not/there") is None
    assert list(objects.list("not/")) == []
    objects.delete(["not/there", "there", "nor/this"])
    assert objects.info("there") is None
    objects.delete([])


def test_a_listing_has_what_begins_with_a_text(objects: Objects) -> None:
    """A listing has the names that begin with a text, in order, and with ``after`` only those behind it."""
    names = [
        "gc/0000000001",
        "gc/0000000001.done",
        "gc/0000000001.final",
        "gc/0000000002",
        "gx",
        "w/a/1",
        "w/b/0",
    ]
    for name in reversed(names):
        objects.put(name, [name.encode()])
    listed = lambda *arguments, **options: [info.name for info in objects.list(*arguments, **options)]  # noqa: E731
    assert listed("") == names
    assert listed("gc/") == names[:4]
    assert listed("g") == names[:5]
    assert listed("gc/0000000001") == names[:3]
    assert listed("gc/0000000001.") == names[1:3]
    assert listed("w/", after="w/a/1") == ["w/b/0"]
    assert listed("gc/", after="gc/0000000001.done") == names[2:4]
    assert listed("gc/", after="gc/0000000001.e") == names[2:4]
    assert listed("gc/", after="gc/9") == []
    assert [info.size_bytes for info in objects.list("w/")] == [5, 5]


def test_a_long_listing_is_whole(objects: Objects) -> None:
    """More names than a page of a listing come once each, in order; deleting takes more than a page too."""
    names = [f"w/{number:032x}" for number in range(1203)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: objects.create(name, b""), names))
    assert [info.name for info in objects.list("w/")] == names
    assert [info.name for info in objects.list("w/", after=names[1100])] == names[1101:]
    objects.delete(iter(names[:1100]))
    assert [info.name for info in objects.list("w/")] == names[1100:]


@pytest.mark.parametrize(
    "name", ["", "/a", "a/", "a//b", "../a", "a/../b", ".hidden", "a/.b", "a b", "a\0", "ä", "a" * 201]
)
def test_a_name_that_is_none(objects: Objects, name: str) -> None:
    """A name that some store could take for another one is refused by all of them."""
    for call in (
        lambda: objects.put(name, [b""]),
        lambda: objects.create(name, b""),
        lambda: objects.get(name),
        lambda: objects.tail(name, 1),
        lambda: objects.get_ranges(name, [(0, 1)]),
        lambda: objects.info(name),
        lambda: objects.delete([name]),
    ):
        if isinstance(objects, PrefixedObjects) and not name:
            continue
        with pytest.raises(ValueError, match="not the name of an object"):
            call()


RACERS = 50


def test_of_many_racers_one_wins(connect: Connect) -> None:
    """Of many racers for one name one is told that it won, and its object stays; three times."""
    clients = [connect() for _ in range(RACERS)]
    with ThreadPoolExecutor(RACERS) as threads:
        for turn in range(3):
            barrier = threading.Barrier(RACERS)

            def race(number: int, turn: int = turn, barrier: threading.Barrier = barrier) -> bool:
                barrier.wait(60)
                return clients[number].create(f"race/{turn}", b"%d" % number)

            won = list(threads.map(race, range(RACERS)))
            assert won.count(True) == 1
            assert clients[0].get(f"race/{turn}") == b"%d" % won.index(True)
    for client in clients:
        client.close()


def test_a_reader_sees_whole_objects_alone(connect: Connect) -> None:
    """While an object is replaced again and again, every reader gets one of the whole contents."""
    size = 300_000
    writer, reader = connect(), connect()
    writer.put("name", [b"\0" * size])
    done = threading.Event()

    def write() -> None:
        try:
            for value in range(1, 40):
                writer.put("name", [bytes([value]) * 100_000] * 3)
        finally:
            done.set()

    with ThreadPoolExecutor(1) as threads:
        written = threads.submit(write)
        seen = 0
        while not (done.is_set() and seen):
            data = reader.get("name")
            assert len(data) == size
            assert data == data[:1] * size
            seen += 1
        written.result()
    writer.close()
    reader.close()


@given(
    st.binary(max_size=3000),
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 3000)), max_size=6),
    st.integers(0, 4000),
)
def test_ranges_are_those_of_the_content(
    objects: Objects, data: bytes, ranges: list[tuple[int, int]], last: int
) -> None:
    """Ranges and tails are the slices of the content, for any content and any ranges."""
    objects.put("name", [data])
    read = [bytes(part) for part in objects.get_ranges("name", ranges)]
    assert read == [data[offset : offset + length] for offset, length in ranges]
    assert objects.tail("name", last) == (len(data), data[max(0, len(data) - last) :])
