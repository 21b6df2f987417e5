"""Snapshots of several hosts in one remote: named without doubt, read from where they belong."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from support import trees
from support.remote_host import RemoteHost, flip_object, new_remote, reading
from support.restoring import write
from support.stored import store

from ciuic.errors import CiuicError, NotFound, UsageError
from ciuic.maintenance.verify import VerifyResult, verify_each, verify_snapshots
from ciuic.remote.access import Remote
from ciuic.remote.documents import encode_repository
from ciuic.remote.object_names import LOGS_PREFIX, MANIFESTS_PREFIX, PACKS_PREFIX, space_json
from ciuic.remote.objects.memory_objects import MemoryObjects, forget_bucket
from ciuic.remote.objects.model import ObjectInfo, Objects
from ciuic.repository.identity import Identity
from ciuic.restore import execute, plan_restore
from ciuic.types import SnapshotId


@pytest.fixture
def remote() -> Iterator[Remote]:
    """Provide an empty sealed remote."""
    name = f"hosts-{os.urandom(6).hex()}"
    yield new_remote(MemoryObjects(name))
    forget_bucket(name)


def stored_host(
    place: Path, remote: Remote, name: str, *numbers: int, own_identity: bool = False
) -> RemoteHost:
    """Make a host with the snapshots ``cs-<number>``, cut at the second of their number, and upload them."""
    host = RemoteHost(place / f"{name}-{os.urandom(4).hex()}", remote, name=name, own_identity=own_identity)
    for number in numbers:
        with host.repository.writer() as writer:
            content = random.Random(f"{name}{number}").randbytes(9000)
            store(writer, {b"who": name.encode(), b"data": content}, number=number, time_ns=number * 10**9)
    host.upload()
    return host


def test_an_id_of_two_hosts_is_named_with_the_host(remote: Remote, tmp_path: Path) -> None:
    """Ids that occur once are plain; one that occurs twice is qualified, and refused without its host."""
    stored_host(tmp_path, remote, "alpha", 1, 2)
    stored_host(tmp_path, remote, "beta", 2, 3)
    with reading(remote, tmp_path / "cache") as opened:
        snapshots = opened.snapshots
        assert snapshots.names() == {"cs-000001", "alpha/cs-000002", "beta/cs-000002", "cs-000003"}
        for text in ("cs-000002", "000002"):
            with pytest.raises(UsageError, match="alpha/cs-000002, beta/cs-000002"):
                snapshots.resolve(text)
        with pytest.raises(UsageError, match="could be"):
            snapshots.resolve("00000")
        assert snapshots.resolve("latest") == "cs-000003"
        assert snapshots.resolve("alpha/latest") == "alpha/cs-000002"
        assert snapshots.resolve("alpha/latest~1") == snapshots.resolve("alpha/000001") == "cs-000001"
        assert snapshots.resolve("beta/cs-000002") == snapshots.resolve("beta/latest~1") == "beta/cs-000002"
        with pytest.raises(NotFound, match="no snapshot of a host gamma"):
            snapshots.resolve("gamma/latest")
        with pytest.raises(NotFound):
            snapshots.resolve("alpha/cs-000003")
        for name in snapshots.names():
            loaded = snapshots.load(snapshots.resolve(name))
            assert loaded.id == name
            assert snapshots.info(loaded.id).id == name
        (repository,) = opened.repositories
        assert verify_snapshots(repository, checksum=True).damages == []


class CommittingMeanwhile:
    """Objects where a new host commits after the logs were listed, and before manifests are."""

    def __init__(self, objects: Objects, commit: Callable[[], object]) -> None:
        self._objects = objects
        self._commit: Callable[[], object] | None = commit
        self._committed = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        if prefix == MANIFESTS_PREFIX:
            assert self._committed.wait(60)
        found = list(self._objects.list(prefix, after=after))
        if prefix == LOGS_PREFIX and self._commit is not None:
            commit, self._commit = self._commit, None
            commit()
            self._committed.set()
        return iter(found)


def test_a_commit_between_the_listings_is_no_damage(remote: Remote, tmp_path: Path) -> None:
    """Manifests and logs are listed at once: a host that commits its first snapshot meanwhile is read whole."""
    stored_host(tmp_path, remote, "alpha", 1)
    objects = CommittingMeanwhile(remote.objects, lambda: stored_host(tmp_path, remote, "beta", 2))
    with reading(remote._replace(objects=cast("Objects", objects)), tmp_path / "cache") as opened:
        assert opened.log_damage == []
        assert opened.snapshots.names() == {"cs-000001", "cs-000002"}


def test_a_damaged_space_hides_itself_alone(remote: Remote, tmp_path: Path) -> None:
    """A repository whose identity is damaged or planted is named, and all others are read."""
    stored_host(tmp_path, remote, "alpha", 1)
    spoilt = stored_host(tmp_path, remote, "beta", 2, own_identity=True).repository.id
    planted, clear = os.urandom(16).hex(), os.urandom(16).hex()
    objects = remote.objects
    flip_object(objects, space_json(spoilt))
    objects.put(space_json(planted), [b'{"version": 99}'])
    in_clear = encode_repository(
        repository_id=bytes.fromhex(clear),
        master=None,
        block_size=1 << 16,
        created_ns=1,
        identity=Identity("xxh3-128", None, 1),
    )
    objects.put(space_json(clear), [in_clear])
    objects.put(f"repositories/{os.urandom(16).hex()}/junk", [b"junk"])
    with reading(remote, tmp_path / "cache") as opened:
        assert opened.snapshots.names() == {"cs-000001"}
        assert sorted(one.name for one in opened.lost_spaces) == sorted(
            f"{objects.url}/{space_json(id_)}" for id_ in (spoilt, planted, clear)
        )


def test_one_host_alone_is_seen(remote: Remote, tmp_path: Path) -> None:
    """With the name of a host its snapshots are all that there is, and an unknown name is refused."""
    stored_host(tmp_path, remote, "alpha", 1, 2)
    stored_host(tmp_path, remote, "beta", 2, 3)
    with reading(remote, tmp_path / "cache") as opened:
        alpha = opened.of_host("alpha")
        assert alpha.snapshots.resolve("000002") == "alpha/cs-000002"
        assert alpha.snapshots.resolve("latest") == "alpha/cs-000002"
        assert {id_ for repository in alpha.repositories for id_ in repository.snapshots.names()} == {
            "cs-000001",
            "alpha/cs-000002",
        }
        with pytest.raises(NotFound) as refused:
            opened.of_host("gamma")
        assert refused.value.hint == "hosts there are: alpha, beta"


def test_two_hosts_of_one_name_are_told_apart(remote: Remote, tmp_path: Path) -> None:
    """Different snapshots with one id, of hosts with one name, each have a name that leads to it."""
    stored_host(tmp_path, remote, "twin", 1)
    other = RemoteHost(tmp_path / "other", remote, name="twin")
    with other.repository.writer() as writer:
        store(writer, {b"who": b"other"}, number=1)
    other.upload()
    with reading(remote, tmp_path / "cache") as opened:
        names = opened.snapshots.names()
        assert len(names) == 2
        with pytest.raises(UsageError, match="several hosts"):
            opened.snapshots.resolve("twin/cs-000001")
        for name in names:
            assert name.startswith("twin~")
            assert opened.snapshots.load(opened.snapshots.resolve(name)).id == name


def test_a_cloned_disk_shows_its_snapshot_once(remote: Remote, tmp_path: Path) -> None:
    """A snapshot that two uploaders of one repository have committed is there once."""
    host = stored_host(tmp_path, remote, "clone", 1)
    # A clone that had not seen the other's log yet.
    logs = {info.name: bytes(remote.objects.get(info.name)) for info in remote.objects.list("w/")}
    remote.objects.delete(logs)
    shutil.rmtree(host.repository.path.parent / "state")
    (host.repository.path.parent / "state").mkdir()
    host.upload()
    for name, data in logs.items():
        remote.objects.put(name, [data])
    assert len([*remote.objects.list("manifests/")]) == 2
    with reading(remote, tmp_path / "cache") as opened:
        assert opened.snapshots.names() == {"cs-000001"}
        assert opened.snapshots.load(opened.snapshots.resolve("latest")).id == "cs-000001"


def test_repositories_with_their_own_identity_are_read_too(remote: Remote, tmp_path: Path) -> None:
    """Snapshots of an older repository are listed with the others, and restored from its own space."""
    new = stored_host(tmp_path, remote, "new", 1)
    old = RemoteHost(tmp_path / "old", remote, name="old", own_identity=True)
    write(old.root / "file", random.Random(2).randbytes(30_000))
    manifest = trees.manifest(old.root)
    snapshot = old.snapshot()
    old.upload()
    assert new.repository.identity != old.repository.identity
    with reading(remote, tmp_path / "cache") as opened:
        assert opened.snapshots.names() == {"cs-000001", snapshot.id}
        assert opened.snapshots.resolve("latest") == snapshot.id
        for repository in opened.repositories:
            assert verify_snapshots(repository, checksum=True).damages == []
        with pytest.raises(UsageError, match="name chunks differently"):
            opened.repository_of([snapshot.id, opened.snapshots.resolve("000001")])
        there = tmp_path / "there"
        there.mkdir()
        plan = plan_restore(
            opened.repository_of([snapshot.id]), snapshot, [os.fsencode(old.root)], dest=os.fsencode(there)
        )
        assert execute(plan).complete
    trees.assert_same(manifest, trees.manifest(there / "root"))


class CountingLists:
    """Objects that count listings by their prefix."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self.counts: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        self.counts[prefix] += 1
        return self._objects.list(prefix, after=after)


@pytest.mark.parametrize("checksum", [False, True])
def test_many_snapshots_are_verified_each_for_itself_by_one_listing(
    remote: Remote, tmp_path: Path, checksum: bool
) -> None:
    """Damage is told of the snapshot that has it alone, and packs are listed as often for eight hosts as for one."""
    for number in range(1, 9):
        stored_host(tmp_path, remote, f"host-{number}", number)
    counting = CountingLists(remote.objects)
    counted = remote._replace(objects=cast(Objects, counting))
    lists = []
    for ids in ({"cs-000001"}, {f"cs-00000{number}" for number in range(1, 9)}):
        with reading(counted, tmp_path / f"cache-{len(ids)}") as opened:
            (repository,) = opened.repositories
            counting.counts.clear()
            results = dict(verify_each(repository, [SnapshotId(id_) for id_ in ids], checksum=checksum))
        assert results.keys() == ids
        assert not any(cast(VerifyResult, one).damaged for one in results.values())
        lists.append(counting.counts.copy())
    assert lists[0] == lists[1]
    assert sum(lists[1].values())
    packs = {info.name for info in remote.objects.list(PACKS_PREFIX)}
    stored_host(tmp_path, remote, "ill", 9)
    for name in {info.name for info in remote.objects.list(PACKS_PREFIX)} - packs:
        flip_object(remote.objects, name, 200)
    with reading(remote, tmp_path / "cache-ill") as opened:
        (repository,) = opened.repositories
        opened.read_anew()
        results = dict(verify_each(repository, sorted(repository.snapshots.names()), checksum=True))  # type: ignore[arg-type]
    assert {id_ for id_, one in results.items() if isinstance(one, CiuicError) or one.damaged} == {
        "cs-000009"
    }
