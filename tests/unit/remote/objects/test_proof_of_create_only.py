"""Proof of create-only: stores that keep it pass, and each way of not keeping it is noticed."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from support.object_servers import SeaweedFS

from ciuic.remote.objects.memory_objects import MemoryObjects, forget_bucket
from ciuic.remote.objects.model import (
    NoSuchObject,
    ObjectInfo,
    Objects,
    RemoteFull,
    RemoteRefused,
    RemoteUnreachable,
)
from ciuic.remote.objects.opening import open_objects
from ciuic.remote.objects.store_check import (
    PROOF_PREFIX,
    CreateOnlyNotKept,
    ListingNotKept,
    measure,
    prove_create_only,
)
from ciuic.repository.identity import Bytes


@pytest.fixture
def bucket() -> Iterator[str]:
    name = f"proof-{uuid.uuid4().hex}"
    yield name
    forget_bucket(name)


def prove(
    connect: Callable[[], Objects], sleep: Callable[[float], None] = lambda _seconds: None
) -> tuple[str, ...]:
    return prove_create_only(connect, sleep=sleep).left


def test_stores_that_keep_it(bucket: str, tmp_path: Path, seaweedfs: SeaweedFS) -> None:
    """A store in memory, a directory and SeaweedFS keep create-only, and nothing is left there."""
    url = seaweedfs.new_url()
    for connect in (
        lambda: MemoryObjects(bucket),
        lambda: open_objects(f"file://{tmp_path}/remote", make=True),
        lambda: seaweedfs.connect(url),
    ):
        proof = prove_create_only(connect, rounds=2, pause_seconds=0)
        assert proof == (2, 16, ())
        assert list(connect().list("")) == []


class Overwriting(MemoryObjects):
    """Ceph before version 18, and OSS in a versioned bucket: the condition is ignored."""

    def create(self, name: str, data: bytes) -> bool:
        self.put(name, [data])
        return True


class Full(MemoryObjects):
    """A server without room."""

    def create(self, name: str, data: bytes) -> bool:
        raise RemoteFull(f"cannot create {name}: the store has no room for more (507)")


def test_a_store_without_room_breaks_no_promise(bucket: str) -> None:
    """A store that takes nothing is told as one without room, not as one that does not keep create-only."""
    with pytest.raises(RemoteFull, match="no room"):
        prove(lambda: Full(bucket))


class SaysTakenButOverwrites(MemoryObjects):
    """A store that answers rightly and stores all the same."""

    def create(self, name: str, data: bytes) -> bool:
        created = super().create(name, data)
        self.put(name, [data])
        return created


class OverwritesLater(MemoryObjects):
    """A store that keeps create-only among requests at one moment alone, as behind a cache."""

    calls = 0
    lock = threading.Lock()

    def create(self, name: str, data: bytes) -> bool:
        with self.lock:
            type(self).calls += 1
            late = self.calls > 16
        if late:
            self.put(name, [data])
            return True
        return super().create(name, data)


class ChecksFirst(MemoryObjects):
    """A gateway that looks whether the object is there, and then stores it."""

    everybody_looked = threading.Barrier(16)

    def create(self, name: str, data: bytes) -> bool:
        taken = self.info(name) is not None
        if not taken:
            self.everybody_looked.wait(30)
            self.put(name, [data])
        return not taken


class Forgets(MemoryObjects):
    """A store that accepts and stores nothing."""

    def create(self, name: str, data: bytes) -> bool:
        created = super().create(name, data)
        self.delete([name])
        return created


class Replaces(MemoryObjects):
    """A store whose objects are changed by somebody else."""

    def create(self, name: str, data: bytes) -> bool:
        return super().create(name, b"not yours")


@pytest.mark.parametrize(
    "kind", [Overwriting, SaysTakenButOverwrites, OverwritesLater, ChecksFirst, Forgets, Replaces]
)
def test_stores_that_do_not_keep_it(bucket: str, kind: type[MemoryObjects]) -> None:
    """Each way of not keeping create-only is refused, with words that say what happened and what to use."""
    with pytest.raises(CreateOnlyNotKept, match="does not keep create-only") as error:
        prove(lambda: kind(bucket))
    assert "If-None-Match" in error.value.hint
    assert list(MemoryObjects(bucket).list("")) == []


class ListsLate(MemoryObjects):
    """A store, or a cache before it, whose listings lack what was created a moment ago."""

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        return iter(())


def test_store_that_lists_late(bucket: str) -> None:
    """A store whose listing lacks what was created before is refused, and nothing is left there."""
    with pytest.raises(ListingNotKept, match="does not list what was created before") as error:
        prove(lambda: ListsLate(bucket))
    assert "strongly consistent" in error.value.hint
    assert list(MemoryObjects(bucket).list("")) == []


@pytest.mark.parametrize("pause", [1, 2])
def test_what_happens_during_a_pause(bucket: str, pause: int) -> None:
    """An object that is replaced, or gone, after a pause is noticed: what is read at once may be a cache's."""
    for spoil in (
        lambda name: MemoryObjects(bucket).put(name, [b"another"]),
        lambda name: MemoryObjects(bucket).delete([name]),
    ):
        pauses: list[float] = []

        def sleep(seconds: float, spoil: Callable[[str], None] = spoil, pauses: list[float] = pauses) -> None:
            pauses.append(seconds)
            if len(pauses) == pause:
                (info,) = MemoryObjects(bucket).list(PROOF_PREFIX)
                spoil(info.name)

        with pytest.raises(CreateOnlyNotKept):
            prove_create_only(lambda: MemoryObjects(bucket), rounds=1, sleep=sleep)


class LosesReplies(MemoryObjects):
    """A store on a bad line: every create is done, and every second answer is lost."""

    answers = 0
    lock = threading.Lock()

    def create(self, name: str, data: bytes) -> bool:
        created = super().create(name, data)
        with self.lock:
            type(self).answers += 1
            lost = created or (self.answers % 2 and self.answers < 16)
        if lost:
            raise RemoteUnreachable("the reply was lost")
        return created


def test_lost_replies_are_no_second_winner(bucket: str) -> None:
    """When the winner's reply is lost, what is there decides who won."""
    assert prove_create_only(lambda: LosesReplies(bucket), rounds=1, sleep=lambda _seconds: None).left == ()


class MayNotDelete(MemoryObjects):
    """A store with the credentials of a host, which may not delete."""

    def delete(self, names: Iterable[str]) -> None:
        raise RemoteRefused("not allowed")


def test_credentials_without_delete(bucket: str) -> None:
    """Where deleting is not allowed the proof holds, and names what it left."""
    left = prove(lambda: MayNotDelete(bucket))
    assert sorted(left) == [info.name for info in MemoryObjects(bucket).list("")]
    assert all(name.startswith(PROOF_PREFIX) for name in left)


def test_other_failures_are_not_told_as_a_broken_promise(bucket: str) -> None:
    """A store that refuses to write, or loses its bucket, says so itself."""

    class Refuses(MemoryObjects):
        def create(self, name: str, data: bytes) -> bool:
            raise RemoteRefused("no")

    with pytest.raises(RemoteRefused):
        prove(lambda: Refuses(bucket))


def test_a_measurement_leaves_nothing(bucket: str) -> None:
    """`measure` proves, writes, reads, lists and deletes it all again."""
    ticks = iter(range(10_000))
    written: list[int] = []

    class Noting(MemoryObjects):
        def put(self, name: str, data: Sequence[Bytes]) -> None:
            written.append(sum(len(part) for part in data))
            super().put(name, data)

    measured = measure(
        lambda: Noting(bucket),
        objects=3,
        object_bytes=1 << 20,
        small=4,
        clock=lambda: float(next(ticks)),
        sleep=lambda _seconds: None,
    )
    assert measured.proof == (3, 16, ())
    assert written == [1 << 20] * 3
    assert measured.put_bytes_per_second == measured.get_bytes_per_second == 3 << 20
    assert measured.small_put_seconds == measured.small_get_seconds == measured.range_seconds == 1
    assert list(MemoryObjects(bucket).list("")) == []
    with pytest.raises(NoSuchObject):
        MemoryObjects(bucket).get("x")
