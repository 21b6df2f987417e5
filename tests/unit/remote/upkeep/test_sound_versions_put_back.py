"""Putting sound versions back into a bucket that was attacked, and renewing locks."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.remote_host import BLOCK, RemoteHost, new_remote, reading
from support.restoring import write
from support.versioned_objects import VersionedObjects, attack

from ciuic.errors import NotPermitted
from ciuic.maintenance.verify import verify_snapshots
from ciuic.remote.access import add_slot, open_remote, remove_slot
from ciuic.remote.objects.model import NoSuchObject, RemoteUnreachable
from ciuic.remote.reading.versions import SoundObjects, open_remote_versions
from ciuic.remote.sealing.key_slots import SlotSecret
from ciuic.remote.upkeep.check import check_remote
from ciuic.remote.upkeep.collect import give_up_snapshots, open_collector
from ciuic.remote.upkeep.collection_round import CollectionPolicy
from ciuic.remote.upkeep.version_repair import check_versions, renew_locks

SECRET = SlotSecret("key-file", bytes(range(32)))
OTHER = SlotSecret("key-file", bytes(32))


class Bucket:
    """Bucket with versions that has a remote with two snapshots of one host."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.objects = VersionedObjects()
        self.remote = new_remote(self.objects)
        add_slot(self.remote, "host", SECRET)
        self.host = RemoteHost(place / "host", self.remote)
        rng = random.Random(3)
        for turn in range(2):
            write(self.host.root / f"{turn}", rng.randbytes(9 * BLOCK))
            self.host.snapshot()
            self.host.upload()

    def behind(self) -> SoundObjects:
        return open_remote_versions(self.objects.versions(), [SECRET]).objects

    def contents(self) -> dict[str, bytes]:
        """Return what a plain reader finds."""
        return {info.name: self.objects.get(info.name) for info in self.objects.list("")}

    def assert_verifies(self, snapshots: int) -> None:
        """Open the bucket as it is and verify every byte."""
        with reading(open_remote(self.objects, [SECRET]), self.place / os.urandom(4).hex()) as opened:
            assert len(opened.snapshots.names()) == snapshots
            report = check_remote(opened, read_data=True)
            assert not report.findings


@pytest.mark.parametrize("seed", range(3))
def test_a_repair_undoes_an_attack(tmp_path: Path, seed: int) -> None:
    """After a repair the bucket has what it had, byte for byte, and the next check finds nothing."""
    bucket = Bucket(tmp_path)
    before = bucket.contents()
    attack(bucket.objects, random.Random(seed))
    looked = check_versions(bucket.behind(), None)
    assert looked.damaged
    assert bucket.contents() != before
    report = check_versions(bucket.behind(), bucket.objects)
    assert not report.damaged
    assert all(finding.repaired or finding.severity == "warning" for finding in report.findings)
    after = bucket.contents()
    assert {name: after.get(name) for name in before} == before
    # What was made up and misleads no reader may stay.
    assert not any(name.startswith(("w/", "gc/", "keys/", "repositories/")) for name in after.keys() - before)
    assert not check_versions(bucket.behind(), None).damaged
    with reading(open_remote(bucket.objects, [SECRET]), tmp_path / "cache") as opened:
        damages = verify_snapshots(opened.repositories[0], checksum=True).damages
    # A pack that was made up is told, and nothing needs it.
    assert [damage for damage in damages if damage.kind != "pack" or damage.snapshots] == []


def test_an_interrupted_repair_goes_on(tmp_path: Path) -> None:
    """A repair that ends at any request leaves nothing worse, and the next one ends it."""
    bucket = Bucket(tmp_path)
    before = bucket.contents()
    attack(bucket.objects, random.Random(9))
    for requests in range(0, 60, 5):
        writer: Any = _Failing(bucket.objects, requests)
        try:
            check_versions(bucket.behind(), writer)
        except RemoteUnreachable:
            continue
        break
    else:
        raise AssertionError("more requests than expected")
    after = bucket.contents()
    assert {name: after.get(name) for name in before} == before


class _Failing:
    """Objects that fail after a number of requests."""

    def __init__(self, objects: VersionedObjects, requests: int) -> None:
        self._objects = objects
        self._left = requests

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                raise RemoteUnreachable("no answer")
            return getattr(self._objects, name)(*arguments)

        return call


def test_what_a_collection_deleted_stays_deleted(tmp_path: Path) -> None:
    """Packs and manifests that a round deleted, and entries of a log that were summed up, are not put back."""
    bucket = Bucket(tmp_path)
    with reading(bucket.remote, tmp_path / "cache") as opened:
        oldest = sorted(opened.snapshots.load_all()[0], key=lambda snapshot: snapshot.time_ns)[0]
        give_up_snapshots(opened, [oldest.id], host="host")
    with reading(bucket.remote, tmp_path / "cache") as opened:
        policy = CollectionPolicy(young_ns=-(1 << 62), repack_share=0)
        with open_collector(opened.readers[0], host="host", policy=policy) as collector:
            collector.run()
    left = bucket.contents()
    deleted = bucket.objects.stored.keys() - left
    assert any(name.startswith("manifests/") for name in deleted)
    assert not check_versions(bucket.behind(), bucket.objects).findings
    assert bucket.contents() == left
    bucket.objects.delete([info.name for info in list(bucket.objects.list(""))])
    assert not check_versions(bucket.behind(), bucket.objects).damaged
    assert bucket.contents() == left
    bucket.assert_verifies(1)


def test_a_key_slot_that_was_removed_stays_removed(tmp_path: Path) -> None:
    """Only the slot that opened the remote is put back: another one was perhaps taken from a thief."""
    bucket = Bucket(tmp_path)
    add_slot(bucket.remote, "thief", OTHER)
    remove_slot(bucket.remote, "thief")
    # As a user does who wants it back.
    bucket.objects.put("keys/thief", [b"noise"])
    bucket.objects.delete(["keys/host"])
    report = check_versions(bucket.behind(), bucket.objects)
    assert {finding.kind for finding in report.findings} == {"key slot"}
    assert not report.damaged
    open_remote(bucket.objects, [SECRET])
    with pytest.raises(NoSuchObject):
        bucket.objects.get("keys/thief")


def test_locks_are_renewed_for_what_is_needed(tmp_path: Path) -> None:
    """One lock for the sound version of each needed object, also behind a deletion, and none for what was made up."""
    bucket = Bucket(tmp_path)
    needed = {name: versions[0][0] for name, versions in bucket.objects.stored.items()}
    before = bucket.objects.now_ns
    objects = bucket.behind()
    done = renew_locks(objects, objects.versions, before + 1000)
    assert done == (len(needed), 0)
    assert bucket.objects.locks == dict.fromkeys(needed.items(), before + 1000)
    attack(bucket.objects, random.Random(4))
    bucket.objects.locks.clear()
    objects = bucket.behind()
    done = renew_locks(objects, objects.versions, before + 2000)
    sealed = {name: id_ for name, id_ in needed.items() if not name.startswith("keys/")}
    locked = {name: id_ for name, id_ in bucket.objects.locks if not name.startswith("keys/")}
    assert {name: locked.get(name) for name in sealed} == sealed
    assert done.astray > 0
    check_versions(bucket.behind(), bucket.objects)
    bucket.objects.locks.clear()
    objects = bucket.behind()
    assert renew_locks(objects, objects.versions, before + 3000).astray == 0
    # Of what was put back the version that a plain reader reads.
    current = {name: bucket.objects.stored[name][-1][0] for name in needed}
    assert current.items() <= dict(bucket.objects.locks.keys()).items()
    bucket.objects.has_locks = False
    with pytest.raises(NotPermitted, match="no object lock"):
        renew_locks(objects, objects.versions, before + 2000)


def test_uploads_go_on_after_a_repair(tmp_path: Path) -> None:
    """The host of an attacked bucket uploads its next snapshot into the repaired one, and all are read plainly."""
    bucket = Bucket(tmp_path)
    attack(bucket.objects, random.Random(11))
    check_versions(bucket.behind(), bucket.objects)
    write(bucket.host.root / "later", b"after the attack")
    bucket.host.snapshot()
    bucket.host.upload()
    with reading(open_remote(bucket.objects, [SECRET]), tmp_path / "cache") as opened:
        assert len(opened.snapshots.names()) == 3
        damages = verify_snapshots(opened.repositories[0], checksum=True).damages
        assert [damage for damage in damages if damage.kind != "pack" or damage.snapshots] == []
