"""A remote whose packs lie in another place than its log: where names go, mistakes in naming the places, deletions and rescue."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.remote_host import BLOCK, RemoteHost, reading
from support.restoring import write
from support.ssh_server import SshServer
from support.versioned_objects import VersionedObjects, attack

from ciuic.errors import UsageError
from ciuic.maintenance.verify import verify_snapshots
from ciuic.remote.access import (
    Remote,
    add_slot,
    init_remote,
    open_remote,
    remove_slot,
    repository_space,
    repository_spaces,
)
from ciuic.remote.objects.memory_objects import MemoryObjects
from ciuic.remote.objects.model import NoSuchObject, Objects, RemoteUnreachable
from ciuic.remote.objects.opening import open_classes, open_objects, open_versions
from ciuic.remote.objects.split_objects import PacksElsewhere, SplitObjects, SplitVersions
from ciuic.remote.objects.urls import StoreSettings
from ciuic.remote.reading.versions import SoundObjects, open_remote_versions
from ciuic.remote.sealing.key_slots import SlotSecret
from ciuic.remote.sealing.sealer import MasterKey
from ciuic.remote.upkeep.check import check_remote, repair_remote
from ciuic.remote.upkeep.collect import give_up_snapshots, open_collector
from ciuic.remote.upkeep.collection_round import CollectionPolicy
from ciuic.remote.upkeep.version_repair import check_versions, renew_locks
from ciuic.repository import Repository
from ciuic.repository.identity import Bytes

SECRET = SlotSecret("key-file", bytes(range(32)))
PACKS_URL = "memory://packs"
SPACE = "repositories/" + "ab" * 16


def names(objects: Objects, prefix: str = "") -> list[str]:
    return [info.name for info in objects.list(prefix)]


def made(objects: Objects, packs_url: str = PACKS_URL) -> Remote:
    remote = init_remote(objects, master=MasterKey.generate(), block_size=BLOCK, packs_url=packs_url)
    add_slot(remote, "host", SECRET)
    return remote


class Pair:
    """Place of the log, and place of the packs, which has versions."""

    def __init__(self) -> None:
        self.log = VersionedObjects()
        self.packs = VersionedObjects()
        self.objects = SplitObjects(self.log, self.packs)

    def versions(self) -> SplitVersions:
        return SplitVersions(self.log.versions(), self.packs.versions())

    def behind(self) -> SoundObjects:
        return open_remote_versions(self.versions(), [SECRET]).objects


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_each_name_goes_to_its_place(pair: Pair) -> None:
    """Packs, tables and manifests go to one place, everything else to the other; identity and keys to both. Listings have both."""
    there = ["manifests/files/0-0/h-1", "packs/data/ab/1", "packs/meta/ab/1", "tables/ab/1"]
    here = ["gc/0000000001", "proof/1", "w/1/0000000000"]
    both = ["keys/host", "remote.json"]
    every = sorted([*there, *here, *both])
    every = [*every, *(f"{SPACE}/{name}" for name in every if name != "keys/host")]
    every.sort()
    for name in every:
        assert pair.objects.create(name, name.encode())
    in_space = lambda one: [*one, *(f"{SPACE}/{name}" for name in one if name != "keys/host")]  # noqa: E731
    assert names(pair.log) == sorted(in_space([*here, *both]))
    assert names(pair.packs) == sorted(in_space([*there, *both]))
    for prefix in (
        "",
        "r",
        "re",
        "repositories/",
        f"{SPACE}/",
        f"{SPACE}/pa",
        "p",
        "packs/",
        "m",
        "w/",
        "t",
        "keys/",
        f"{SPACE}/w/",
    ):
        assert names(pair.objects, prefix) == [name for name in every if name.startswith(prefix)]
    assert [info.name for info in pair.objects.list("", after="packs/data/ab/1")] == [
        name for name in every if name > "packs/data/ab/1"
    ]
    for name in every:
        assert pair.objects.get(name) == bytes(pair.objects.get_ranges(name, [(0, 99)])[0]) == name.encode()
        assert pair.objects.tail(name, 99)[1] == name.encode()
        assert pair.objects.info(name) is not None
    pair.objects.delete(every)
    assert not names(pair.log)
    assert not names(pair.packs)
    with pytest.raises(NoSuchObject):
        pair.objects.get("remote.json")


def test_a_place_that_is_not_that_of_the_packs_is_refused(pair: Pair) -> None:
    """A missing, a wrong and a needless place of packs are each refused with what to do; the right one opens the remote."""
    remote = made(pair.objects)
    assert open_remote(pair.objects, [SECRET], packs_url=PACKS_URL).id == remote.id
    with pytest.raises(PacksElsewhere, match=f"in another place, made as {PACKS_URL}") as refused:
        open_remote(pair.log, [SECRET])
    assert "--packs-url" in refused.value.hint
    empty = SplitObjects(pair.log, VersionedObjects())
    with pytest.raises(PacksElsewhere, match="has no part of the remote"):
        open_remote(empty, [SECRET], packs_url=PACKS_URL)
    other = Pair()
    made(other.objects)
    with pytest.raises(PacksElsewhere, match="packs of another remote"):
        open_remote(SplitObjects(pair.log, other.packs), [SECRET], packs_url=PACKS_URL)
    with pytest.raises(PacksElsewhere, match="there is no remote at"):
        open_remote(SplitObjects(VersionedObjects(), pair.packs), [SECRET], packs_url=PACKS_URL)
    with pytest.raises(PacksElsewhere, match="has the packs of another remote"):
        made(SplitObjects(VersionedObjects(), pair.packs))
    whole = VersionedObjects()
    made(whole, "")
    with pytest.raises(PacksElsewhere, match="has no part"):
        open_remote(SplitObjects(whole, VersionedObjects()), [SECRET], packs_url=PACKS_URL)
    with pytest.raises(UsageError, match="must be another place"):
        open_objects("memory://bucket/b/", StoreSettings(packs_url="memory://bucket/b"))
    with pytest.raises(UsageError, match="cannot be read here"):
        open_versions(
            "s3://bucket/a",
            StoreSettings(packs_url="file:///nas"),
            {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"},
        )


class FailsToPut(MemoryObjects):
    """Place in which nothing can be put while it is told to fail."""

    fails = True

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        if self.fails:
            raise RemoteUnreachable("gone")
        super().put(name, data)


def test_an_init_that_is_interrupted_between_the_places(pair: Pair) -> None:
    """A remote whose copy is missing is not opened, and says what to do; a key slot or a space is copied by the next attempt."""
    packs = FailsToPut("packs-of-an-interrupted-init", "")
    objects = SplitObjects(pair.log, packs)
    with pytest.raises(RemoteUnreachable):
        made(objects)
    with pytest.raises(PacksElsewhere) as refused:
        open_remote(objects, [SECRET], packs_url=PACKS_URL)
    assert "was interrupted and nothing was ever uploaded, remove it from" in refused.value.hint
    pair.log.delete(["remote.json"])
    packs.fails = False
    remote = init_remote(objects, master=MasterKey.generate(), block_size=BLOCK, packs_url=PACKS_URL)
    packs.fails = True
    with pytest.raises(RemoteUnreachable):
        add_slot(remote, "host", SECRET)
    packs.fails = False
    # As `check --behind-deletions --repair` does.
    assert not objects.create("keys/host", b"anything")
    assert packs.get("keys/host") == pair.log.get("keys/host")


def test_a_space_whose_copy_was_interrupted(tmp_path: Path, pair: Pair) -> None:
    """The space of a repository with its own identity is copied when the repository is opened once more; listings find it once."""
    remote = made(pair.objects)
    with Repository.create(tmp_path / "own", block_size=BLOCK) as repository:
        space = repository_space(remote, repository)
        name = f"repositories/{repository.id}/remote.json"
        pair.packs.delete([name])
        assert repository_space(remote, repository).identity == space.identity
        assert pair.packs.get(name) == pair.log.get(name)
    assert [one.identity for one in repository_spaces(remote)] == [space.identity]


def test_a_removed_key_is_gone_from_both_places(pair: Pair) -> None:
    """A key slot is removed where its copy is as well."""
    remote = made(pair.objects)
    add_slot(remote, "second", SlotSecret("key-file", bytes(32)))
    remove_slot(remote, "second")
    assert names(pair.log, "keys/") == names(pair.packs, "keys/") == ["keys/host"]


@pytest.fixture
def host(tmp_path: Path, pair: Pair) -> RemoteHost:
    host = RemoteHost(tmp_path / "host", made(pair.objects))
    rng = random.Random(3)
    for turn in range(2):
        write(host.root / f"{turn}", rng.randbytes(9 * BLOCK))
        host.snapshot()
        host.upload()
    return host


def verifies(pair: Pair, cache: Path, snapshots: int = 2) -> None:
    remote = open_remote(pair.objects, [SECRET], packs_url=PACKS_URL)
    with reading(remote, cache) as opened:
        assert len(opened.snapshots.names()) == snapshots
        assert not opened.log_damage
        assert not check_remote(opened, read_data=True).findings
        assert not verify_snapshots(opened.repositories[0], checksum=True).damages


def repaired(pair: Pair, cache: Path, local: Repository | None) -> None:
    remote = open_remote(pair.objects, [SECRET], packs_url=PACKS_URL)
    assert not repair_remote(lambda: reading(remote, cache), local, host="host", read_data=True).damaged


def test_uploads_reading_collection_and_repair(tmp_path: Path, pair: Pair, host: RemoteHost) -> None:
    """What is uploaded is read, collected and repaired, and each object stays in its place."""
    verifies(pair, tmp_path / "one")
    tops = lambda objects: {name.split("/")[0] for name in names(objects)}  # noqa: E731
    assert tops(pair.log) == {"keys", "remote.json", "w"}
    assert tops(pair.packs) == {"keys", "manifests", "packs", "remote.json"}
    first = host.repository.snapshots.list()[-1].id
    with reading(host.remote, tmp_path / "two") as opened:
        give_up_snapshots(opened, [first], host="host")
    with (
        reading(host.remote, tmp_path / "three") as opened,
        open_collector(opened.readers[0], host="host", policy=CollectionPolicy(young_ns=0)) as collector,
    ):
        collector.run()
    assert "gc" in tops(pair.log)
    verifies(pair, tmp_path / "four", 1)
    lost = names(pair.packs, "packs/data/")[0]
    pair.packs.delete([lost])
    with reading(host.remote, tmp_path / "five") as opened:
        assert check_remote(opened, read_data=True).damaged
    repaired(pair, tmp_path / "repair", host.repository)
    verifies(pair, tmp_path / "six", 1)


def test_places_of_two_kinds(tmp_path: Path, ssh_server: SshServer) -> None:
    """The log may lie on another machine, and the packs in a directory here."""
    objects = SplitObjects(
        ssh_server.connect(ssh_server.new_url()), open_objects(f"file://{tmp_path}/packs", make=True)
    )
    try:
        host = RemoteHost(tmp_path / "host", made(objects))
        write(host.root / "file", random.Random(5).randbytes(9 * BLOCK))
        host.snapshot()
        host.upload()
        with reading(open_remote(objects, [SECRET], packs_url=PACKS_URL), tmp_path / "cache") as opened:
            assert not check_remote(opened, read_data=True).findings
            assert len(opened.snapshots.names()) == 1
    finally:
        objects.close()


def test_storage_classes_are_those_of_the_place_of_the_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes are changed where the packs are, whatever the log lies in."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ak")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sk")
    assert open_classes("file:///nas", StoreSettings(packs_url="s3://locked/a")).scheme == "s3"
    with pytest.raises(UsageError, match="storage classes of file:// are not changed"):
        open_classes("s3://log/a", StoreSettings(packs_url="file:///nas"))


def wipe_log(pair: Pair) -> None:
    pair.log.stored.clear()


def wipe_copies(pair: Pair) -> None:
    pair.packs.delete(["remote.json", "keys/host"])


def attack_packs(pair: Pair) -> None:
    attack(pair.packs, random.Random(1))


def attack_everything(pair: Pair) -> None:
    attack(pair.packs, random.Random(1))
    pair.log.stored.clear()


def forge_copies(pair: Pair) -> None:
    pair.packs.put("remote.json", [b"forged"])
    pair.packs.put("keys/host", [b"forged"])


def forge_copies_and_wipe_log(pair: Pair) -> None:
    forge_copies(pair)
    pair.log.stored.clear()


@pytest.mark.parametrize(
    "does", [wipe_log, wipe_copies, forge_copies, forge_copies_and_wipe_log, attack_packs, attack_everything]
)
def test_a_rescue_from_the_place_of_the_packs(
    tmp_path: Path, pair: Pair, host: RemoteHost, does: Callable[[Pair], None]
) -> None:
    """Whatever was done to the log, which has no versions, and to the packs, which have: repairs bring everything back."""
    does(pair)
    assert not check_versions(pair.behind(), pair.objects).damaged
    repaired(pair, tmp_path / "repair", None)
    verifies(pair, tmp_path / "cache")
    assert pair.packs.get("keys/host") == pair.log.get("keys/host")


def test_the_versions_of_another_remote(pair: Pair) -> None:
    """Behind deletions the place of the packs of another remote is told as well, and one that had this remote is not."""
    made(pair.objects)
    other = Pair()
    made(other.objects)
    remote_json = pair.log.get("remote.json")
    pair.packs.put("remote.json", [b"forged" * len(remote_json)])
    pair.packs.delete(["remote.json"])
    pair.versions().require_copy(remote_json)
    with pytest.raises(PacksElsewhere, match="no part of the remote"):
        SplitVersions(pair.log.versions(), other.packs.versions()).require_copy(remote_json)


def test_locks_are_renewed_where_the_packs_are(pair: Pair, host: RemoteHost) -> None:
    """Of everything in the place of the packs one version is locked, and nothing in that of the log."""
    pair.log.has_locks = False
    objects = pair.behind()
    done = renew_locks(objects, objects.versions, 10**18)
    assert {name for name, _ in pair.packs.locks} == set(names(pair.packs))
    assert done.locked == len(pair.packs.locks)
    assert not done.astray
