"""Thaws: exactly what a selection needs, asked for once, durable, and continued after a kill."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.archiving_objects import ArchivingClasses, ArchivingObjects, ArchivingStore, World, make_world
from support.dying_objects import DyingObjects, Killed
from support.remote_host import BLOCK, reading

from ciuic.remote.object_names import PackRef, pack_name, parse_pack, table_name
from ciuic.remote.objects.memory_objects import MemoryObjects, forget_bucket
from ciuic.remote.objects.model import RemoteUnreachable, UntrustedStore
from ciuic.remote.objects.storage_classes import THAW_SPEEDS, ObjectClass, ThawSpeed
from ciuic.remote.pack import RemotePackReader
from ciuic.remote.reading.opening import ReadableRemote
from ciuic.remote.remote_index import cold_packs
from ciuic.remote.upkeep.cold_packs import (
    ColdPack,
    ThawJob,
    ThawJobs,
    begin_thaw,
    cold_needs,
    continue_thaw,
    jobs_directory,
    unreadable_now,
    wait_until_ready,
)
from ciuic.remote.upkeep.collection_round import Repacker
from ciuic.repository import Walker
from ciuic.repository.identity import Bytes
from ciuic.repository.lookup import find
from ciuic.types import SnapshotId

NOW_NS = 10**18
HOUR_NS = 3600 * 10**9


@pytest.fixture
def bucket() -> Iterator[MemoryObjects]:
    name = f"thaw-{os.urandom(6).hex()}"
    memory = MemoryObjects(name)
    for at in range(5):
        memory.put(f"packs/data/00/{at}", [b"x"])
    yield memory
    forget_bucket(name)


def archived(memory: MemoryObjects, polls: int = 2) -> ArchivingStore:
    store = ArchivingStore(polls)
    store.classes = {info.name: "GLACIER" for info in memory.list("packs/")}
    return store


def begin(jobs: ThawJobs, classes: ArchivingClasses, speed: ThawSpeed = "standard") -> ThawJob:
    packs = {info.name: 1 for info in classes.inner.list("packs/")}
    return begin_thaw(
        jobs,
        classes,
        url="s3://bucket/x",
        snapshots=["cs-123456"],
        paths=[],
        packs=packs,
        speed=speed,
        days=3,
        now_ns=NOW_NS,
    )


@pytest.mark.parametrize(("speed", "hours"), [("expedited", 0.1), ("standard", 5), ("bulk", 12)])
def test_a_thaw_asks_once_and_says_until_when(
    bucket: MemoryObjects, tmp_path: Path, speed: ThawSpeed, hours: float
) -> None:
    """Each pack is asked for once with speed and days; the promise is the store's; the job ends when all can be read."""
    store, jobs = archived(bucket), ThawJobs(tmp_path / "thaw")
    classes = ArchivingClasses(bucket, store)
    job = begin(jobs, classes, speed)
    assert sorted(store.asked) == [(f"packs/data/00/{at}", speed, 3) for at in range(5)]
    assert job.ready_by_ns == NOW_NS + int(hours * HOUR_NS)
    assert not job.is_ready
    slept: list[float] = []
    job = wait_until_ready(
        jobs, classes, job, now_ns=lambda: NOW_NS + 1, sleep=slept.append, poll_seconds=300.0
    )
    assert (job.is_ready, slept, len(store.asked)) == (True, [300.0, 300.0], 5)
    assert job.ready_by_ns == NOW_NS + int(hours * HOUR_NS)
    (known,) = jobs.all()
    assert known == job
    # Another host that asks for the same.
    assert begin(ThawJobs(tmp_path / "other"), classes).is_ready
    assert len(store.asked) == 5


def test_waiting_for_a_store_ends_where_its_certificate_is_of_another(
    bucket: MemoryObjects, tmp_path: Path
) -> None:
    """Asking again does not change that; a store that only does not answer is asked again."""
    jobs, slept = ThawJobs(tmp_path / "thaw"), list[float]()

    class Failing(ArchivingClasses):
        """Classes that cannot be looked at."""

        def look(self, name: str) -> ObjectClass:
            raise RemoteUnreachable(name) if len(slept) < 3 else UntrustedStore(name)

    job = begin(jobs, ArchivingClasses(bucket, archived(bucket)))
    failing = Failing(bucket, archived(bucket))
    with pytest.raises(UntrustedStore):
        wait_until_ready(jobs, failing, job, now_ns=lambda: NOW_NS, sleep=slept.append, poll_seconds=1.0)
    assert len(slept) == 3


def test_a_thaw_that_is_killed_anywhere_is_continued_from_its_file(
    bucket: MemoryObjects, tmp_path: Path
) -> None:
    """After a kill at any request the job is on the disk, and continuing it asks for what is missing and nothing else."""
    at = 0
    while True:
        store, jobs = archived(bucket), ThawJobs(tmp_path / f"{at}")
        dying = ArchivingClasses(DyingObjects(bucket, at + 1), store)
        try:
            begin(jobs, dying)
            ended = True
        except Killed:
            ended = False
        (job,) = jobs.all()
        again = continue_thaw(jobs, ArchivingClasses(bucket, store), job, now_ns=NOW_NS)
        assert {name for name, _, _ in store.asked} == set(job.packs)
        assert not again.unasked
        if ended:
            return
        at += 1


@given(
    data=st.binary(max_size=300),
    speed=st.sampled_from(THAW_SPEEDS),
)
def test_a_file_that_is_no_job_is_passed_over(
    data: bytes, speed: ThawSpeed, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The jobs that are whole are found beside any other content of the directory."""
    place = tmp_path_factory.mktemp("jobs")
    jobs = ThawJobs(place / "thaw")
    job = ThawJob(
        id="0" * 16,
        url="s3://b",
        snapshots=("cs-1",),
        speed=speed,
        days=1,
        created_ns=1,
        size_bytes=1,
        packs={"a": "wanted"},
    )
    jobs.store(job)
    (jobs.path / f"{'1' * 16}.thaw").write_bytes(data)
    assert jobs.all() == [job]
    jobs.remove(job)
    assert jobs.all() == []


def test_jobs_lie_in_the_state_directory_of_the_user() -> None:
    """XDG_STATE_HOME counts where it is an absolute path; root has a directory of the machine."""
    assert jobs_directory({"XDG_STATE_HOME": "/x"}) == Path("/x/ciuic/thaw")
    fallback = jobs_directory({"XDG_STATE_HOME": "x", "HOME": "/h"})
    assert fallback == (
        Path("/var/lib/ciuic/thaw") if os.geteuid() == 0 else Path("/h/.local/state/ciuic/thaw")
    )


def needs_of(
    opened: ReadableRemote, world: World, snapshot: str, *names: str, thorough: bool = False
) -> list[ColdPack]:
    (repository,) = opened.repositories
    loaded = opened.snapshots.load(SnapshotId(snapshot))
    paths = [os.fsencode(world.host.root / name) for name in names] or [os.fsencode(world.host.root)]
    selected = [find(repository, loaded, path) for path in paths]
    return cold_needs(repository, selected, thorough=thorough)


def test_a_selection_needs_just_its_packs(tmp_path: Path) -> None:
    """All cold packs for the old snapshot, those of one file for that file, none for the new one; thawed ones can be read."""
    bucket = f"needs-{os.urandom(6).hex()}"
    world = make_world(tmp_path / "host", bucket)
    with reading(world.remote, tmp_path / "before") as opened:
        assert needs_of(opened, world, world.first) == []
    world.move(tmp_path / "cache")
    cold = set(cold_packs(world.memory))
    with reading(world.remote, tmp_path / "fresh") as opened:
        reader = opened.readers[0]
        everything = needs_of(opened, world, world.first)
        assert {pack.ref for pack in everything} == cold
        assert {info.name: info.size_bytes for info in world.memory.list("packs/data/")}.items() >= {
            pack.name: pack.size_bytes for pack in everything
        }.items()
        one_file = needs_of(opened, world, world.first, "0")
        assert one_file
        assert {pack.ref for pack in one_file} <= cold
        assert needs_of(opened, world, world.second) == []
        assert unreadable_now(reader, everything) == everything
        world.store.thawed.add(everything[0].name)
        assert unreadable_now(reader, everything) == everything[1:]
        assert all(parse_pack(pack_name(pack.ref)) == pack.ref for pack in everything)
    forget_bucket(bucket)


@pytest.mark.parametrize("thorough", [False, True])
def test_each_archived_pack_is_asked_once(tmp_path: Path, thorough: bool) -> None:
    """Stores charge for each request."""
    bucket = f"asked-{os.urandom(6).hex()}"
    world = make_world(tmp_path / "host", bucket)
    world.move(tmp_path / "cache")
    asked: list[str] = []

    class Asked(ArchivingObjects):
        """Objects that note which archived ones are asked for."""

        def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Bytes]:
            if self.store.is_archived(name):
                asked.append(name)
            return super().get_ranges(name, ranges)

    remote = world.remote._replace(objects=Asked(world.memory, world.store))
    with reading(remote, tmp_path / "fresh") as opened:
        needed = needs_of(opened, world, world.first, thorough=thorough)
    assert needed
    assert sorted(asked) == sorted(pack.name for pack in needed)
    forget_bucket(bucket)


def test_a_chunk_with_a_warm_copy_needs_no_thaw(tmp_path: Path) -> None:
    """What another pack has warm, too, is read from there: nothing is asked for, and the content comes."""
    bucket = f"copies-{os.urandom(6).hex()}"
    world = make_world(tmp_path / "host", bucket)
    before = world.names("packs/data/")
    repacker = Repacker(world.memory, world.remote.sealer)
    readers = [
        RemotePackReader(world.remote.sealer, ref) for name in before if (ref := parse_pack(name)) is not None
    ]
    repacker.copy_all(
        {PackRef(one.ref): {record.id for record in one.read_table(world.memory)} for one in readers}
    )
    for one in readers:
        world.memory.put(table_name(one.ref), [one.copy_of_table(world.memory)])
        world.store.classes[one.name] = "GLACIER"
    with reading(world.remote, tmp_path / "fresh") as opened:
        assert needs_of(opened, world, world.first) == []
        (repository,) = opened.repositories
        snapshot = opened.snapshots.load(SnapshotId(world.first))
        (data,) = {
            reached.id
            for reached in Walker(repository).walk(snapshot)
            if reached.kind == "data" and reached.entry and reached.entry.name == b"0" and reached.block == 0
        }
        assert len(repository.chunks.get(data)) == BLOCK
    forget_bucket(bucket)
