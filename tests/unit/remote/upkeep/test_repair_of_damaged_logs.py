"""Damaged logs of a remote: reported, stopping the collector alone, and mended by what proves their content."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from support.remote_host import BLOCK, RemoteHost, flip_object, new_remote, reading
from support.restoring import write

from ciuic.errors import CiuicError, Damaged
from ciuic.maintenance.check import CheckReport
from ciuic.maintenance.verify import verify_snapshots
from ciuic.remote.access import add_slot, open_remote
from ciuic.remote.documents import LogCommit, LogState, decode_log_entry
from ciuic.remote.log_reader import LogReader, LostCommits
from ciuic.remote.object_names import parse_log_entry
from ciuic.remote.objects.memory_objects import MemoryObjects, forget_bucket
from ciuic.remote.reading import opening
from ciuic.remote.reading.opening import read_remote
from ciuic.remote.sealing.key_slots import recovery_secret, show_recovery_key
from ciuic.remote.upkeep import check
from ciuic.remote.upkeep.check import check_remote, repair_remote
from ciuic.remote.upkeep.collect import collect_remote, give_up_snapshots, resolve_snapshots
from ciuic.remote.upkeep.collection_round import CollectionPolicy
from ciuic.remote.writer_log import append_to_log
from ciuic.repository import Repository
from ciuic.repository.errors import UnsupportedFormat

SECRET = recovery_secret(show_recovery_key(bytes(range(32))))


class World:
    """A remote with two hosts; the first has three snapshots, the other one."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.bucket = f"logs-{os.urandom(6).hex()}"
        self.remote = new_remote(MemoryObjects(self.bucket))
        self.alpha, self.beta = (
            RemoteHost(place / name, self.remote, name=name) for name in ("alpha", "beta")
        )
        rng = random.Random(1)
        for host, count in ((self.alpha, 3), (self.beta, 1)):
            for number in range(count):
                write(host.root / f"{number}", rng.randbytes(5 * BLOCK))
                host.snapshot()
            host.upload()
        self.caches = 0

    def commits(self, host: RemoteHost) -> list[str]:
        """Return the names of a host's commits."""
        found = []
        for info in self.remote.objects.list("w/"):
            position = parse_log_entry(info.name)
            assert position is not None
            data = bytes(self.remote.objects.get(info.name))
            entry = decode_log_entry(self.remote.sealer, position.writer, position.number, data)
            if isinstance(entry, LogCommit) and entry.repository == host.repository.id:
                found.append(info.name)
        return found

    def sum_up(self) -> list[str]:
        """Have all logs summed up and cut; return the names of the sums."""
        reader = LogReader(self.remote.objects, self.remote.sealer)
        reader.refresh()
        for writer, summary in list(reader.logs.items()):
            entry = LogState(nonce="ab" * 16, live=tuple(summary.committed.values()), removed=())
            assert append_to_log(self.remote.objects, self.remote.sealer, writer, summary, entry)
        names = [info.name for info in self.remote.objects.list("w/")]
        ends = {name.split("/")[1]: name for name in names}
        self.remote.objects.delete([name for name in names if name not in ends.values()])
        return list(ends.values())

    def seen(self) -> tuple[set[str], bool, bool]:
        """Return what a machine that knows nothing sees: snapshots, whether they verify, whether logs are damaged."""
        self.caches += 1
        with reading(self.remote, self.place / f"new-{self.caches}") as opened:
            whole = not verify_snapshots(opened.repositories[0], checksum=True).damages
            return opened.snapshots.names(), whole, bool(opened.log_damage)

    def check(self) -> CheckReport:
        with reading(self.remote, self.place / "cache") as opened:
            return check_remote(opened)

    def repair(self, local: Repository | None = None, caches: tuple[str, ...] = ()) -> CheckReport:
        def reopen():  # type: ignore[no-untyped-def]
            self.caches += 1
            (self.place / f"new-{self.caches}").mkdir()
            cache = self.place / f"new-{self.caches}"
            return read_remote(self.remote, cache_root=cache, retry_seconds=1)

        return repair_remote(reopen, local, host="operator", caches=caches)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    forget_bucket(made.bucket)


@pytest.mark.parametrize("way", ["flip", "delete", "all", "sum"])
def test_a_lost_commit_is_found_by_its_manifest(world: World, way: str) -> None:
    """Without any host, snapshots whose commits are damaged or missing are named, and committed again."""
    everything = world.seen()[0]
    if way == "sum":
        for name in world.sum_up():
            flip_object(world.remote.objects, name)
    else:
        for name in world.commits(world.alpha)[: 3 if way == "all" else 1]:
            if way == "delete":
                world.remote.objects.delete([name])
            else:
                flip_object(world.remote.objects, name)
    shown, whole, damaged = world.seen()
    assert (whole, damaged) == (True, True)
    assert len(shown) == {"flip": 3, "delete": 3, "all": 1, "sum": 0}[way]
    report = world.check()
    assert report.damaged
    assert {finding.kind for finding in report.findings} == {"log"}
    assert {one for finding in report.findings for one in finding.snapshots} == everything - shown
    repaired = world.repair()
    assert not repaired.damaged
    assert all(finding.repaired for finding in repaired.findings)
    assert world.seen() == (everything, True, False)
    assert not world.check().findings


def delete_log(world: World, host: RemoteHost) -> None:
    """Delete every object of the logs that a host wrote."""
    writers = {name.split("/")[1] for name in world.commits(host)}
    names = [info.name for info in world.remote.objects.list("w/")]
    world.remote.objects.delete([name for name in names if name.split("/")[1] in writers])


@pytest.mark.parametrize("way", ["gone", "cut"])
def test_a_deleted_log_is_damage_and_no_verdict(
    world: World, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A log that was deleted, or cut at its end, is named; nothing of it is collected, and a repair commits it anew."""
    everything = world.seen()[0]
    if way == "gone":
        delete_log(world, world.alpha)
    else:
        for module in (check, opening):
            monkeypatch.setattr(module, "UPLOADING_NS", -(1 << 60))
        commits = world.commits(world.alpha)
        world.remote.objects.delete(commits[-1:])
    packs = [info.name for info in world.remote.objects.list("packs/")]
    shown, _, warned = world.seen()
    assert len(shown) == {"gone": 1, "cut": 3}[way]
    assert warned
    report = world.check()
    assert report.damaged
    assert {finding.kind for finding in report.findings} == {"log"}
    assert "no log commits or removes it" in report.findings[0].message
    policy = CollectionPolicy(young_ns=-(1 << 62))
    with (
        reading(world.remote, world.place / "cache") as opened,
        pytest.raises(LostCommits, match="nothing was"),
    ):
        collect_remote(opened, host="operator", policy=policy)
    assert [info.name for info in world.remote.objects.list("packs/")] == packs
    repaired = world.repair()
    assert not repaired.damaged
    assert all(finding.repaired for finding in repaired.findings)
    with reading(world.remote, world.place / "new cache") as opened:
        collect_remote(opened, host="operator", policy=policy)
    assert world.seen() == (everything, True, False)
    assert not world.check().findings


def test_what_a_damaged_log_hides_is_not_deleted(world: World) -> None:
    """Nothing is collected or given up while an entry of a log cannot be read; afterwards it is."""
    everything = world.seen()[0]
    flip_object(world.remote.objects, world.commits(world.alpha)[0])
    policy = CollectionPolicy(young_ns=-(1 << 62))
    with reading(world.remote, world.place / "cache") as opened:
        with pytest.raises(Damaged, match="damaged"):
            collect_remote(opened, host="operator", policy=policy)
        (id_,) = resolve_snapshots(opened, [next(iter(opened.snapshots.names()))])
        with pytest.raises(Damaged, match="nothing was given up"):
            give_up_snapshots(opened, [id_], host="operator")
    world.repair()
    with reading(world.remote, world.place / "cache") as opened:
        collect_remote(opened, host="operator", policy=policy)
    assert world.seen() == (everything, True, False)


def test_a_host_uploads_again_what_no_log_commits(world: World) -> None:
    """A host goes on beside its damaged log, and commits what it has, also where the manifest is lost."""
    everything = world.seen()[0]
    entry = world.commits(world.alpha)[0]
    position = parse_log_entry(entry)
    assert position is not None
    data = bytes(world.remote.objects.get(entry))
    lost = decode_log_entry(world.remote.sealer, position.writer, position.number, data)
    assert isinstance(lost, LogCommit)
    flip_object(world.remote.objects, entry)
    world.remote.objects.delete([lost.manifest])
    world.alpha.upload()
    assert world.seen() == (everything, True, True)
    assert not world.repair().damaged
    assert world.seen() == (everything, True, False)


def test_a_cache_of_the_host_proves_its_log(world: World, tmp_path: Path) -> None:
    """A log that a cache has read to its end is mended exactly: what was given up stays so."""
    with reading(world.remote, world.place / "cache") as opened:
        gone = sorted(opened.snapshots.names())[0]
        give_up_snapshots(opened, resolve_snapshots(opened, [gone]), host="operator")
    left = world.seen()[0]
    assert gone not in left
    cache = str(tmp_path / "logs")
    LogReader(world.remote.objects, world.remote.sealer, cache_path=cache).refresh()
    for info in list(world.remote.objects.list("w/")):
        flip_object(world.remote.objects, info.name)
    assert not world.seen()[0]
    assert not world.repair(caches=(cache,)).damaged
    assert world.seen() == (left, True, False)


@pytest.mark.parametrize("what", ["remote.json", "keys/", "w/", "gc/"])
def test_a_later_version_is_refused_in_words(world: World, what: str) -> None:
    """No object of a later version is taken for damage that could be repaired; packs are in test_remote_seals.py."""
    add_slot(world.remote, "main", SECRET)
    with reading(world.remote, world.place / "cache") as opened:
        (id_, *_) = resolve_snapshots(opened, [sorted(opened.snapshots.names())[0]])
        give_up_snapshots(opened, [id_], host="operator")
    policy = CollectionPolicy(young_ns=-(1 << 62), repack_share=0)
    with reading(world.remote, world.place / "cache") as opened:
        collect_remote(opened, host="operator", policy=policy)
    for info in list(world.remote.objects.list(what)):
        data = bytes(world.remote.objects.get(info.name))
        if data.startswith(b"{"):
            later = data.replace(b'"version":1', b'"version":2')
            later = later[: later.index(b',"check"')]
            later += b',"check":"%s"}' % xxhash.xxh3_64_hexdigest(later).encode()
        else:
            later = data[:8] + b"\x02\x00" + data[10:]
        world.remote.objects.put(info.name, [later])
    before = {info.name: bytes(world.remote.objects.get(info.name)) for info in world.remote.objects.list("")}
    said = []
    (world.place / "new").mkdir()
    try:
        remote = open_remote(world.remote.objects, [SECRET])
        with read_remote(remote, cache_root=world.place / "new", retry_seconds=1) as opened:
            said += [damage.message for damage in opened.log_damage]
            said += [bad.reason for bad in opened.snapshots.unreadable()]
            said += [finding.message for finding in check_remote(opened).findings]
            collect_remote(opened, host="operator", policy=policy)
    except CiuicError as error:
        said.append(error.message)
    assert any("version 2" in text for text in said), said
    if what == "w/":
        with pytest.raises(UnsupportedFormat, match="version 2"):
            world.repair()
    # The operator's own log may have begun anew.
    after = {info.name: bytes(world.remote.objects.get(info.name)) for info in world.remote.objects.list("")}
    assert all(after.get(name) == data for name, data in before.items())
