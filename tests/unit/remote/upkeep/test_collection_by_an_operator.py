"""Collection by an operator: frees what no snapshot of any host needs, in every space, and says so before."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from support.dying_objects import DyingObjects, Killed
from support.remote_host import BLOCK, RemoteHost, new_remote, reading
from support.restoring import write

from ciuic.errors import CiuicError, Damaged, NotFound
from ciuic.maintenance.verify import verify_snapshots
from ciuic.protocol.stored_remotely import read_record
from ciuic.remote.access import Remote
from ciuic.remote.documents import LiveManifest, LogEntry, LogRemove, read_entry
from ciuic.remote.log_reader import LogReader, LostCommits
from ciuic.remote.object_names import LOGS_PREFIX, MANIFESTS_PREFIX, parse_log_entry
from ciuic.remote.objects.memory_objects import MemoryObjects, forget_bucket
from ciuic.remote.objects.model import Objects
from ciuic.remote.objects.opening import open_objects
from ciuic.remote.objects.wrappers import CountingObjects
from ciuic.remote.reading.remote_repository import SpaceReader
from ciuic.remote.upkeep.check import repair_remote
from ciuic.remote.upkeep.collect import (
    CollectedSpace,
    collect_remote,
    give_up_snapshots,
    preview_collection,
    resolve_snapshots,
)
from ciuic.remote.upkeep.collection_round import (
    CollectionPolicy,
    LiveChunks,
    MarkSnapshots,
    live_chunks,
)
from ciuic.remote.writer_log import LogUpkeep
from ciuic.repository.identity import Bytes

AT_ONCE = CollectionPolicy(young_ns=0, repack_share=0.6)


@pytest.fixture
def objects() -> Iterator[CountingObjects]:
    name = f"upkeep-{os.urandom(6).hex()}"
    yield CountingObjects(MemoryObjects(name))
    forget_bucket(name)


def names(remote: Remote) -> set[str]:
    return {info.name for info in remote.objects.list("")}


def two_snapshots(place: Path, remote: Remote, *, own_identity: bool = False) -> tuple[RemoteHost, str, str]:
    """Upload two snapshots that share half of their files; return host and ids."""
    host = RemoteHost(place, remote, name=place.name, own_identity=own_identity)
    rng = random.Random(place.name)
    for number in range(6):
        write(host.root / f"{number}", rng.randbytes(9 * BLOCK + 3))
    first = host.snapshot()
    host.upload()
    for number in range(3):
        write(host.root / f"{number}", rng.randbytes(9 * BLOCK + 3))
    second = host.snapshot()
    host.upload()
    return host, first.id, second.id


def forget(remote: Remote, cache: Path, text: str) -> None:
    with reading(remote, cache) as opened:
        give_up_snapshots(opened, resolve_snapshots(opened, [text]), host="operator")


def collect(remote: Remote, cache: Path) -> list[CollectedSpace]:
    with reading(remote, cache) as opened:
        return collect_remote(opened, host="operator", policy=AT_ONCE)


@pytest.mark.parametrize("sealed", [True, False])
def test_a_given_up_snapshot_is_freed(objects: CountingObjects, tmp_path: Path, sealed: bool) -> None:
    """What only the given-up snapshot needed goes, the other snapshot verifies, and a second run finds nothing."""
    remote = new_remote(objects, sealed=sealed)
    _, first, second = two_snapshots(tmp_path / "host", remote)
    forget(remote, tmp_path / "cache", first)
    (done,) = collect(remote, tmp_path / "cache")
    assert done.packs
    assert len(done.manifests) == 1
    # The first snapshot's packs are half needed: their live half was copied.
    assert done.repacked_bytes > 0
    assert done.freed_bytes > done.repacked_bytes
    with reading(remote, tmp_path / "other cache") as opened:
        assert opened.snapshots.ids() == [second]
        assert verify_snapshots(opened.repositories[0], checksum=True).damages == []
        (again,) = collect_remote(opened, host="operator", policy=AT_ONCE)
    assert (again.packs, again.manifests) == ((), ())


def test_a_preview_tells_and_changes_nothing(objects: CountingObjects, tmp_path: Path) -> None:
    """A preview names just what a collection deletes then, and makes no request that writes."""
    remote = new_remote(objects)
    _, first, _ = two_snapshots(tmp_path / "host", remote)
    forget(remote, tmp_path / "cache", first)
    before = {kind: objects.counts()[kind].requests for kind in ("put", "create", "delete")}
    with reading(remote, tmp_path / "cache") as opened:
        (said,) = preview_collection(opened, now_ns=time.time_ns(), policy=AT_ONCE)
    assert {kind: objects.counts()[kind].requests for kind in before} == before
    (done,) = collect(remote, tmp_path / "cache")
    assert (said.packs, said.manifests) == (done.packs, done.manifests)
    assert (said.freed_bytes, said.repacked_bytes) == (done.freed_bytes, done.repacked_bytes)


def test_what_is_young_stays(objects: CountingObjects, tmp_path: Path) -> None:
    """With the usual policy nothing goes that was stored within a day."""
    remote = new_remote(objects)
    _, first, _ = two_snapshots(tmp_path / "host", remote)
    forget(remote, tmp_path / "cache", first)
    with reading(remote, tmp_path / "cache") as opened:
        (done,) = collect_remote(opened, host="operator")
    assert (done.packs, done.manifests) == ((), ())


def test_every_space_is_collected(objects: CountingObjects, tmp_path: Path) -> None:
    """A repository with an identity of its own is collected in its own space, by its own log."""
    remote = new_remote(objects)
    _, first, second = two_snapshots(tmp_path / "host", remote)
    old, old_first, old_second = two_snapshots(tmp_path / "old", remote, own_identity=True)
    for id_ in (first, old_first):
        forget(remote, tmp_path / "cache", id_)
    done = collect(remote, tmp_path / "cache")
    assert [space.id for space in done] == [remote.id, old.repository.id]
    assert all(space.packs and len(space.manifests) == 1 for space in done)
    with reading(remote, tmp_path / "other cache") as opened:
        assert set(opened.snapshots.ids()) == {second, old_second}
        for repository in opened.repositories:
            assert verify_snapshots(repository, checksum=True).damages == []


def test_a_damaged_space_keeps_no_other_from_being_collected(
    objects: CountingObjects, tmp_path: Path
) -> None:
    """Where the log of a writer is gone, its space is left as it is, and named; the space of another repository is collected."""
    remote = new_remote(objects)
    _, first, _second = two_snapshots(tmp_path / "host", remote)
    old, old_first, _old_second = two_snapshots(tmp_path / "old", remote, own_identity=True)
    for id_ in (first, old_first):
        forget(remote, tmp_path / "cache", id_)
    remote.objects.delete([name for name in names(remote) if name.startswith("w/")])
    packs = {name for name in names(remote) if name.startswith("packs/")}
    done: list[CollectedSpace] = []
    with (
        reading(remote, tmp_path / "new cache") as opened,
        pytest.raises(LostCommits, match="nothing was deleted"),
    ):
        collect_remote(opened, host="operator", policy=AT_ONCE, collected=done.append)
    assert [(space.id, bool(space.packs)) for space in done] == [(old.repository.id, True)]
    assert {name for name in names(remote) if name.startswith("packs/")} == packs


def test_one_log_serves_all_runs(objects: CountingObjects, tmp_path: Path) -> None:
    """Operators of one host go on with one log as long as its cache is there."""
    remote = new_remote(objects)
    two_snapshots(tmp_path / "host", remote)
    for _ in range(3):
        collect(remote, tmp_path / "cache")
    assert len({name.split("/")[1] for name in names(remote) if name.startswith("w/")}) == 2


def test_held_snapshots_are_not_given_up(objects: CountingObjects, tmp_path: Path) -> None:
    """A snapshot that was held when it was uploaded is refused, unless held ones are asked for; so are unknown ones."""
    remote = new_remote(objects)
    host = RemoteHost(tmp_path / "host", remote)
    write(host.root / "file", b"content")
    id_ = host.snapshot().id
    with host.repository.writer() as writer:
        writer.set_marks(id_, hold=True, reason="the paper")
    host.upload()
    with reading(remote, tmp_path / "cache") as opened:
        with pytest.raises(CiuicError, match="held; nothing was removed"):
            resolve_snapshots(opened, [id_])
        assert resolve_snapshots(opened, [id_, "latest"], held=True) == [id_]
        with pytest.raises(NotFound):
            resolve_snapshots(opened, ["cs-123456"])


def test_a_given_up_snapshot_is_not_uploaded_again(objects: CountingObjects, tmp_path: Path) -> None:
    """A host that still has what an operator gave up leaves it, also after all logs were cut, until told otherwise."""
    remote = new_remote(objects)
    host, first, second = two_snapshots(tmp_path / "host", remote)
    forget(remote, tmp_path / "cache", first)
    for _ in range(2):
        host.upload()
        with reading(remote, tmp_path / "other cache") as opened:
            assert opened.snapshots.ids() == [second]
        collect(remote, tmp_path / "cache")
        # What says so has been summed up, and deleted, when the host comes again.
        reader = LogReader(remote.objects, remote.sealer)
        reader.refresh()
        LogUpkeep(remote.objects, remote.sealer, reader, max_entries=0).run(None)
    assert not any(isinstance(entry, LogRemove) for entry in entries(remote))
    record = read_record("remote", tmp_path / "host" / "state")
    assert record is not None
    assert record.passed_over == {first}
    host.upload(again=[first])
    host.upload()
    with reading(remote, tmp_path / "other cache") as opened:
        assert set(opened.snapshots.ids()) == {first, second}
        assert verify_snapshots(opened.repositories[0], checksum=True).damages == []


def test_a_snapshot_that_was_committed_twice_is_given_up_whole(
    objects: CountingObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts of one cloned disk that both committed a snapshot do not bring it back."""
    remote = new_remote(objects)
    host = RemoteHost(tmp_path / "host", remote)
    write(host.root / "file", b"content")
    first = str(host.snapshot().id)
    clone = host.copy(tmp_path / "clone", remote)
    host.upload()
    # Both began before either had committed.
    with monkeypatch.context() as patch:
        patch.setattr(LogReader, "live", lambda self: {})
        clone.upload()
    assert len([name for name in names(remote) if name.startswith("manifests/")]) == 2
    forget(remote, tmp_path / "cache", first)
    with reading(remote, tmp_path / "other cache") as opened:
        assert opened.snapshots.ids() == []


def entries(remote: Remote) -> list[LogEntry]:
    return [
        read_entry(remote.objects, remote.sealer, position.writer, position.number)
        for name in names(remote)
        if (position := parse_log_entry(name)) is not None
    ]


class DyingUploader(DyingObjects):
    """Objects of an uploader that is killed between a manifest and its commit."""

    def __init__(self, objects: Objects) -> None:
        super().__init__(objects, 10**6)
        self.stored = ""

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        super().put(name, data)
        self.stored = name

    def create(self, name: str, data: bytes) -> bool:
        if self.stored.startswith(MANIFESTS_PREFIX) and name.startswith(LOGS_PREFIX):
            raise Killed
        made = super().create(name, data)
        self.stored = name
        return made


def lose_before_commit(host: RemoteHost) -> None:
    host.remote = host.remote._replace(objects=DyingUploader(host.remote.objects))
    with pytest.raises(Killed):
        host.upload()
    host.repository.close()


def test_what_a_lost_host_was_about_to_commit_stays(tmp_path: Path) -> None:
    """A repair commits the manifest of a lost host a day later: no collection has taken what it relied on until then."""
    objects = open_objects(f"file://{tmp_path}/nas", make=True)

    def age() -> None:
        # By as much: which of two objects is the later one says whether a writer went on.
        for path in (tmp_path / "nas").rglob("*"):
            os.utime(path, (path.stat().st_mtime - 2 * 86_400,) * 2)

    remote = new_remote(objects)
    host, given_up, kept = two_snapshots(tmp_path / "lost", remote)
    forget(remote, tmp_path / "cache", given_up)
    forget(remote, tmp_path / "cache", kept)
    with host.repository.writer() as writer:
        writer.remove_snapshots([given_up, kept])
    age()
    write(host.root / "new", b"new")
    last = host.snapshot().id
    lose_before_commit(host)
    with reading(remote, tmp_path / "cache") as opened:
        collect_remote(opened, host="operator")
        assert opened.snapshots.ids() == []
    age()
    with reading(remote, tmp_path / "cache") as opened, pytest.raises(LostCommits):
        collect_remote(opened, host="operator")
    repair_remote(lambda: reading(remote, tmp_path / "cache"), None, host="operator")
    with reading(remote, tmp_path / "other cache") as opened:
        assert opened.snapshots.ids() == [last]
        assert verify_snapshots(opened.repositories[0], checksum=True).damages == []


def uploading_hosts(place: Path, remote: Remote, count: int) -> None:
    """Store manifests of so many hosts that are not committed."""
    for number in range(count):
        host = RemoteHost(place / f"{number}", remote, name=f"uploads-{number}")
        write(host.root / "file", os.urandom(BLOCK))
        host.snapshot()
        lose_before_commit(host)


def test_manifests_about_to_be_committed_cost_no_listing(tmp_path: Path) -> None:
    """However many of them there are, a collection lists as often."""
    listings = []
    for count in (1, 4):
        name = f"uploading-{os.urandom(6).hex()}"
        objects = CountingObjects(MemoryObjects(name))
        remote = new_remote(objects)
        place = tmp_path / f"{count}"
        uploading_hosts(place, remote, count)
        two_snapshots(place / "host", remote)
        with reading(remote, place / "cache") as opened:
            before = objects.counts()["list"].requests
            collect_remote(opened, host="operator")
        listings.append(objects.counts()["list"].requests - before)
        forget_bucket(name)
    assert listings[0] == listings[1]


def test_a_manifest_that_loses_what_it_refers_to_stops_no_collection(
    objects: CountingObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another collector takes that between two looks, snapshots that are committed are not called damaged."""
    remote = new_remote(objects)
    uploading_hosts(tmp_path, remote, 1)
    _, first, second = two_snapshots(tmp_path / "host", remote)
    committed = LogReader(remote.objects, remote.sealer)
    committed.refresh()

    def overtaken(reader: SpaceReader, **options: Callable[[], None]) -> MarkSnapshots:
        marked = live_chunks(reader, **options)

        def mark(snapshots: Mapping[str, LiveManifest]) -> LiveChunks:
            if len(snapshots) > 1 and not snapshots.keys() <= committed.live().keys():
                raise Damaged("it is gone")
            return marked(snapshots)

        return mark

    monkeypatch.setattr("ciuic.remote.upkeep.collect.live_chunks", overtaken)
    with reading(remote, tmp_path / "cache") as opened:
        collect_remote(opened, host="operator")
        assert set(opened.snapshots.ids()) == {first, second}
