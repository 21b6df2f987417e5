"""Check, verification and repair of a remote: what is lost or damaged is named, and stored again where a sound copy is anywhere."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.remote_host import BLOCK, RemoteHost, flip_object, new_remote, reading
from support.restoring import write

from ciuic.maintenance.check import CheckReport
from ciuic.maintenance.verify import verify_sample, verify_snapshots
from ciuic.remote.access import add_slot
from ciuic.remote.objects.memory_objects import MemoryObjects, forget_bucket
from ciuic.remote.reading.opening import read_remote
from ciuic.remote.sealing.key_slots import recovery_secret, show_recovery_key
from ciuic.remote.upkeep.check import check_remote, repair_remote
from ciuic.repository import Repository


class World:
    """A remote with two hosts that share half of their files."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.bucket = f"repair-{os.urandom(6).hex()}"
        self.remote = new_remote(MemoryObjects(self.bucket))
        self.alpha, self.beta = (
            RemoteHost(place / name, self.remote, name=name) for name in ("alpha", "beta")
        )
        common, rng = random.Random(1).randbytes(8 * BLOCK + 5), random.Random(2)
        for host in (self.alpha, self.beta):
            write(host.root / "common", common)
            for number in range(3):
                write(host.root / "folder" / f"{number}", rng.randbytes(5 * BLOCK))
            host.snapshot()
            host.upload()
        self.caches = 0

    def names(self, prefix: str) -> list[str]:
        return sorted(info.name for info in self.remote.objects.list(prefix))

    def check(self, *, read_data: bool = True) -> CheckReport:
        with reading(self.remote, self.place / "cache") as opened:
            return check_remote(opened, read_data=read_data)

    def repair(self, local: Repository | None) -> CheckReport:
        def reopen():  # type: ignore[no-untyped-def]
            return read_remote(self.remote, cache_root=self.place / "cache", retry_seconds=1)

        return repair_remote(reopen, local, host="operator", read_data=True)

    def is_whole(self) -> bool:
        """Return whether a machine that knows nothing finds everything right."""
        self.caches += 1
        with reading(self.remote, self.place / f"new-{self.caches}") as opened:
            assert len(opened.snapshots.ids()) == 2
            return verify_snapshots(opened.repositories[0], checksum=True).damages == []


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    (tmp_path / "cache").mkdir()
    made = World(tmp_path)
    yield made
    forget_bucket(made.bucket)


def kinds(report: CheckReport) -> set[tuple[str, str, bool]]:
    return {(finding.severity, finding.kind, finding.repaired) for finding in report.findings}


@pytest.mark.parametrize("read_data", [False, True])
def test_a_sound_remote_has_no_findings(world: World, read_data: bool) -> None:
    """Nothing is found in a remote as it was uploaded, and a repair changes no object."""
    report = world.check(read_data=read_data)
    assert (report.findings, report.damaged, report.snapshots) == ([], False, 2)
    assert report.packs == len(world.names("packs/"))
    before = {name: bytes(world.remote.objects.get(name)) for name in world.names("")}
    assert world.repair(world.alpha.repository).findings == []
    assert {name: bytes(world.remote.objects.get(name)) for name in world.names("")} == before


@pytest.mark.parametrize("lost", [True, False])
def test_manifests_are_read_although_they_are_cached(world: World, lost: bool) -> None:
    """A machine that has read the remote before finds that manifests are gone or other than committed."""
    assert world.check().findings == []
    for name in world.names("manifests/"):
        if lost:
            world.remote.objects.delete([name])
        else:
            world.remote.objects.put(name, [b"junk"])
    for read_data in (False, True):
        report = world.check(read_data=read_data)
        assert report.damaged


def damage(world: World, way: str) -> None:
    """Damage what both hosts need, in the packs that alpha uploaded first."""
    data = max(world.names("packs/data/"), key=lambda name: len(world.remote.objects.get(name)))
    if way == "record":
        flip_object(world.remote.objects, data, 1000)
    elif way == "table":
        flip_object(world.remote.objects, data, -100)
    elif way == "lost data":
        world.remote.objects.delete(world.names("packs/data/"))
    elif way == "lost trees":
        world.remote.objects.delete(world.names("packs/meta/"))
    elif way == "tree records":
        for name in world.names("packs/meta/"):
            flip_object(world.remote.objects, name, 70)
    elif way == "everything":
        world.remote.objects.delete(world.names("packs/"))


@pytest.mark.parametrize("way", ["record", "table", "lost data", "lost trees", "tree records", "everything"])
def test_repair_stores_again_what_the_hosts_have(world: World, way: str) -> None:
    """Two hosts, one after the other, mend from their repositories whatever is lost or damaged; then a new machine reads all."""
    damage(world, way)
    assert not world.is_whole()
    assert world.check().damaged
    first = world.repair(world.alpha.repository)
    second = world.repair(world.beta.repository)
    assert any(finding.repaired for finding in [*first.findings, *second.findings])
    assert not second.damaged, [finding.message for finding in second.findings]
    assert world.is_whole()
    assert world.check().findings == []


@pytest.mark.parametrize("way", ["record", "table", "lost data"])
def test_what_nobody_has_stays_damaged(world: World, way: str) -> None:
    """Without a repository a repair leaves what it cannot mend: reported, and no pack is deleted that may have it."""
    damage(world, way)
    packs = world.names("packs/")
    report = world.repair(None)
    assert report.damaged
    assert set(packs) <= set(world.names("packs/"))
    assert not world.is_whole()
    assert any("--repair" in finding.hint for finding in report.findings)


def test_a_damaged_pack_goes_when_others_have_its_content(world: World) -> None:
    """The damaged pack is deleted by a round, so that no other host relies on its chunks any more."""
    data = max(world.names("packs/data/"), key=lambda name: len(world.remote.objects.get(name)))
    flip_object(world.remote.objects, data, 1000)
    world.repair(world.alpha.repository)
    world.repair(world.beta.repository)
    assert data not in world.names("packs/data/")
    # A host with an index from before sends what it needs again.
    write(world.alpha.root / "later", b"later")
    world.alpha.snapshot()
    world.alpha.upload()
    with reading(world.remote, world.place / "third") as opened:
        assert verify_snapshots(opened.repositories[0], checksum=True).damages == []


@pytest.mark.parametrize("way", ["gone", "flipped"])
def test_a_lost_manifest_is_committed_again(world: World, way: str) -> None:
    """The host that has the snapshot commits it under a new manifest; another host cannot."""
    (name,) = [name for name in world.names("manifests/") if "/alpha-" in name]
    if way == "gone":
        world.remote.objects.delete([name])
    else:
        flip_object(world.remote.objects, name, 50)
    assert {kind for _, kind, _ in kinds(world.check())} == {"snapshot"}
    assert world.repair(world.beta.repository).damaged
    report = world.repair(world.alpha.repository)
    assert kinds(report) == {("error", "snapshot", True)}
    assert world.is_whole()
    assert len([name for name in world.names("manifests/") if "/alpha-" in name]) == (
        1 if way == "gone" else 2
    )


def test_slots_and_rounds_are_looked_at(world: World) -> None:
    """A key slot that decayed and a round that does not open are errors, and keep no reader from reading."""
    add_slot(world.remote, "paper", recovery_secret(show_recovery_key(bytes(range(32)))))
    flip_object(world.remote.objects, "keys/paper", 60)
    world.remote.objects.put("gc/0000000000", [b"no round"])
    world.remote.objects.put("keys/page.html", [b"<html></html>"])
    assert kinds(world.check()) == {
        ("error", "key slot", False),
        ("warning", "key slot", False),
        ("error", "round", False),
    }
    assert world.is_whole()


BLOCKS = 400


@pytest.fixture
def host(tmp_path: Path) -> object:
    name = f"sample-{os.urandom(6).hex()}"
    made = RemoteHost(tmp_path / "host", new_remote(MemoryObjects(name)))
    write(made.root / "file", random.Random(1).randbytes(BLOCKS * BLOCK))
    made.snapshot()
    made.upload()
    yield made
    forget_bucket(name)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_as_much_is_read_as_was_asked_for(host: RemoteHost, tmp_path: Path, share: float) -> None:
    """A sound remote passes, and the blocks that were read are the share within five standard deviations."""
    seen = []
    with reading(host.remote, tmp_path / "cache") as opened:
        (repository,) = opened.repositories
        result = verify_sample(repository, None, share, rng=random.Random(2), progress=seen.append)
    assert result.damages == []
    assert result.files == 1
    deviation = (BLOCKS * share * (1 - share)) ** 0.5
    assert abs(result.bytes_read / BLOCK - share * BLOCKS) <= 5 * deviation
    # Content is what is read last: the last state has all of it.
    assert seen[-1].bytes_done == result.bytes_read


def test_damage_of_a_block_that_was_read_is_named(host: RemoteHost, tmp_path: Path) -> None:
    """A changed block is found if it is among those that were read; a lost pack in any case."""
    largest = max(host.remote.objects.list("packs/data/"), key=lambda info: info.size_bytes)
    flip_object(host.remote.objects, largest.name, largest.size_bytes // 2)
    found = []
    for seed in range(8):
        with reading(host.remote, tmp_path / "cache") as opened:
            result = verify_sample(opened.repositories[0], None, 0.5, rng=random.Random(seed))
        found.append([damage.path for damage in result.damages])
    assert [] in found
    assert [os.fsencode(host.root / "file")] in found
    host.remote.objects.delete([largest.name])
    with reading(host.remote, tmp_path / "other cache") as opened:
        assert verify_sample(opened.repositories[0], None, 0.0).damaged
