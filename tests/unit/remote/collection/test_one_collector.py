"""Tests of one collector: what it deletes, spares, copies and takes up."""

from __future__ import annotations

import pytest
from support.remote_world import (
    DAY_NS,
    EAGER,
    BucketJudge,
    Ids,
    Killed,
    MeetingBucket,
    MemoryState,
    Party,
    Uploader,
    chunk,
    chunks_of,
    make_collector,
    record,
    sealer,
    store_pack,
)

from ciuic.errors import Damaged, NotFound
from ciuic.remote.documents import LogRetired, LogState, decode_manifest, read_entry
from ciuic.remote.log_reader import LogReader
from ciuic.remote.object_names import PackRef, pack_name, parse_log_entry, parse_pack, round_name
from ciuic.remote.objects.model import Objects
from ciuic.remote.remote_index import RemoteIndex
from ciuic.remote.upkeep.collection_round import CollectionPolicy, CollectionResult, Collector
from ciuic.remote.writer_log import LogUpkeep


class World:
    """Bucket with a clock that stands still, one uploader, and collectors that begin with nothing."""

    def __init__(self) -> None:
        self.now_ns = 10 * DAY_NS
        self.bucket = MeetingBucket(self.tick)
        self.ids = Ids("world")
        self.state = MemoryState()
        self.uploader = Uploader(self.bucket, self.ids, self.state, RemoteIndex.open(None, threads=1))
        self.uploader.begin()
        self.judge = BucketJudge(self.bucket)

    def tick(self) -> int:
        self.now_ns += 1
        return self.now_ns

    def upload(self, *numbers: int) -> str:
        manifest = self.uploader.upload(dict.fromkeys(map(chunk, numbers)), "cs-abcdef")
        self.judge.acknowledged.add(manifest)
        return manifest

    def remove(self, *manifests: str) -> None:
        self.judge.acknowledged.difference_update(manifests)
        self.uploader.log.remove(manifests)

    def collect(
        self, objects: Objects | None = None, policy: CollectionPolicy = EAGER, **options: int
    ) -> CollectionResult:
        index = RemoteIndex.open(None, threads=1)
        try:
            return make_collector(
                objects or self.bucket, self.ids, MemoryState(), index, policy=policy, **options
            ).run()
        finally:
            index.close()

    def packs(self) -> set[PackRef]:
        return {ref for name in self.bucket.objects if (ref := parse_pack(name))}


@pytest.fixture
def world() -> World:
    return World()


def test_only_what_no_snapshot_needs_is_deleted(world: World) -> None:
    """Packs and manifests of removed snapshots go, manifests first; those of others stay."""
    gone = world.upload(1, 2)
    before = world.packs()
    kept = world.upload(3, 4)
    world.remove(gone)
    result = world.collect()
    assert (set(result.packs), result.manifests, result.round) == (before, (gone,), 0)
    assert world.packs().isdisjoint(before)
    assert kept in world.bucket.objects
    assert list(world.bucket.deleted)[: 1 + len(before)] == [gone, *map(pack_name, sorted(before))]
    assert not world.judge.problem()
    assert world.collect().round == -1


def test_a_pack_that_begins_to_move_is_spared(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A condemned pack that a writer names as moving, before it has a fence in its log, is not deleted."""
    world.remove(world.upload(1))
    moving = world.packs()
    world.upload(3)
    fence_logs = Collector._fence_logs

    def overtaken(collector: Collector, round_: int) -> None:
        assert world.uploader.log.move(sorted(moving), checked=world.uploader.log.rounds.version)
        fence_logs(collector, round_)

    monkeypatch.setattr(Collector, "_fence_logs", overtaken)
    assert world.collect().rescued == 1
    assert moving <= world.packs()


def test_young_packs_are_spared(world: World) -> None:
    """What was uploaded within a day by the store's clock is not collected, and is a day later."""
    world.remove(world.upload(1))
    policy = CollectionPolicy()
    assert world.collect(policy=policy).round == -1
    world.now_ns += DAY_NS
    assert len(world.collect(policy=policy).packs) == 1


def test_double_chunk_loses_one_copy(world: World) -> None:
    """Of two packs with the same chunks one is deleted, and never both."""
    world.upload(1, 2)
    store_pack(
        world.bucket, world.uploader.sealer, PackRef("d" + "77" * 16), [record(chunk(1)), record(chunk(2))]
    )
    assert len(world.collect().packs) == 1
    assert not world.judge.problem()
    assert world.collect().round == -1


def test_mostly_dead_pack_is_copied(world: World) -> None:
    """The live chunks of a mostly dead pack move to a new pack, with their bases, and the old one goes."""
    gone = world.upload(*range(10, 30))
    (old,) = world.packs()
    world.upload(10, 11)
    world.remove(gone)
    result = world.collect()
    assert result.packs == (old,)
    assert result.repacked_bytes == 32
    assert not world.judge.problem()
    (new,) = world.packs()
    assert len(world.bucket.objects[pack_name(new)][0]) < 500


def test_base_of_a_live_chunk_is_live(world: World) -> None:
    """A pack that only holds the base of a live difference stays."""
    base = world.upload(2)
    world.judge.acknowledged.add(world.uploader.upload({chunk(1): chunk(2)}, "cs-abcdef"))
    world.remove(base)
    assert world.collect().packs == ()
    assert not world.judge.problem()


def test_collector_that_stops_anywhere_is_continued(world: World) -> None:
    """Wherever one collector is killed, the next one ends its round, and nothing else is ever lost."""
    stops = 0
    while True:
        fresh = World()
        fresh.remove(fresh.upload(1, 2), fresh.upload(3))
        fresh.upload(2, 5)
        party = Party(fresh.bucket, "first")
        party.start(lambda fresh=fresh, party=party: fresh.collect(party.objects))  # type: ignore[misc]
        for _ in range(stops):
            if party.running:
                party.step()
        if not party.running:
            assert party.error is None
            break
        party.step("kill after" if stops % 2 else "kill before")
        assert isinstance(party.error, Killed)
        assert not fresh.judge.problem()
        began = round_name(0) in fresh.bucket.objects
        fresh.collect()
        assert not began or round_name(0, "done") in fresh.bucket.objects
        assert round_name(1) not in fresh.bucket.objects or round_name(0, "done") in fresh.bucket.objects
        assert not fresh.judge.problem()
        stops += 1
    assert stops > 30


def test_commit_during_a_round_is_rescued(world: World) -> None:
    """A snapshot that was committed after the first mark, before its log's fence, keeps the pack that it relies on."""
    world.remove(world.upload(1))
    party = Party(world.bucket, "collector")
    party.start(lambda: world.collect(party.objects))
    while party.request != f"create {round_name(0)}":
        party.step()
    party.step()
    world.upload(1)
    while party.running:
        party.step()
    assert party.error is None
    assert not world.judge.problem()
    assert len(world.packs()) == 1


def test_damaged_snapshot_stops_collection(world: World) -> None:
    """While a snapshot that exists cannot be read, nothing is deleted."""
    world.remove(world.upload(1))
    kept = world.upload(2)
    data, modified_ns = world.bucket.objects.pop(kept)
    packs = world.packs()
    with pytest.raises(NotFound):
        world.collect()
    world.bucket.objects[kept] = (data[:-1] + b"\0", modified_ns)
    with pytest.raises(Damaged):
        world.collect()
    assert world.packs() == packs
    assert not [name for name in world.bucket.objects if name.startswith("gc/")]


def test_unreadable_pack_is_never_deleted(world: World) -> None:
    """A pack whose table cannot be read may have anything: it stays, and is reported."""
    world.remove(world.upload(1))
    (ref,) = world.packs()
    data, modified_ns = world.bucket.objects[pack_name(ref)]
    world.bucket.objects[pack_name(ref)] = (data[:-1] + b"\0", modified_ns)
    result = world.collect()
    assert result.unreadable == (ref,)
    assert world.packs() == {ref}


def log_entries(world: World, writer: str) -> dict[int, type]:
    return {
        position.number: type(read_entry(world.bucket, world.uploader.sealer, *position))
        for name in sorted(world.bucket.objects)
        if (position := parse_log_entry(name)) and position.writer == writer
    }


def test_logs_are_kept_up_side_by_side(world: World) -> None:
    """Fences, and looks at whether a writer is silent, do not wait for those of other logs."""
    gone = world.upload(1)
    world.upload(2)
    world.remove(gone)
    for _ in range(2):
        Uploader(world.bucket, world.ids, MemoryState(), RemoteIndex.open(None, threads=1)).begin()
    index = RemoteIndex.open(None, threads=1)
    collector = make_collector(world.bucket, world.ids, MemoryState(), index, threads=4)
    fence_logs = collector._fence_logs

    def fence_logs_that_meet(round_: int) -> None:
        # Logs of three uploaders, and of the collector itself.
        world.bucket.meet("create w/", 4)
        fence_logs(round_)
        world.bucket.meet("", 1)

    collector._fence_logs = fence_logs_that_meet  # type: ignore[method-assign]
    assert collector.run().manifests == (gone,)
    index.close()
    reader = LogReader(world.bucket, world.uploader.sealer)
    world.bucket.meet("info w/", 4)
    LogUpkeep(world.bucket, world.uploader.sealer, reader).run(world.now_ns)
    assert not world.judge.problem()


def test_long_log_is_summed_up(world: World) -> None:
    """Entries before a summary are deleted, but none from the writer's last own on; snapshots stay as they were."""
    for number in range(20):
        world.upload(number)
    world.remove(world.upload(3, 4))
    live = world.judge.live()
    own = world.uploader.log.next_number - 1
    world.collect(max_entries=5)
    found = log_entries(world, world.uploader.log.writer)
    assert min(found) == own
    assert LogState in found.values()
    assert world.judge.live() == live
    assert world.upload(1)
    assert not world.judge.problem()


def test_removal_is_forgotten_only_after_its_commit(world: World) -> None:
    """A removal in one log of a snapshot in another is kept until no log commits the snapshot, then it is dropped."""
    other = Uploader(world.bucket, world.ids, MemoryState(), RemoteIndex.open(None, threads=1))
    other.begin()
    manifest = world.upload(1)
    world.judge.acknowledged.discard(manifest)
    other.log.remove([manifest])

    def removed() -> set[str]:
        reader = LogReader(world.bucket, world.uploader.sealer, threads=1)
        reader.refresh()
        assert manifest not in reader.live()
        return reader.logs[other.log.writer].removed

    def sum_up() -> None:
        reader = LogReader(world.bucket, world.uploader.sealer, threads=1)
        reader.refresh()
        LogUpkeep(world.bucket, world.uploader.sealer, reader, max_entries=0, new_id=world.ids.hex).run(None)
        world.uploader.log.hello()
        other.log.hello()

    sum_up()
    # The commit was there when it was decided what to keep.
    assert removed() == {manifest}
    sum_up()
    assert removed() == set()


def test_log_of_a_silent_writer_is_ended(world: World) -> None:
    """A log without an entry of its writer for 30 days gets its last entry; the writer then begins another."""
    kept = world.upload(1)
    writer = world.uploader.log.writer
    for _ in range(40):
        world.now_ns += DAY_NS
        reader = LogReader(world.bucket, world.uploader.sealer, threads=1)
        reader.refresh()
        LogUpkeep(world.bucket, world.uploader.sealer, reader, new_id=world.ids.hex).run(world.now_ns)
    assert list(log_entries(world, writer).values())[-1] is LogRetired
    assert world.judge.live() == {kept}
    world.upload(2)
    assert world.uploader.log.writer != writer
    assert not world.judge.problem()


def test_manifest_is_read_as_it_was_written(world: World) -> None:
    """The helper that judges the bucket sees the chunks of a snapshot."""
    manifest = world.upload(1, 2)
    data = world.bucket.objects[manifest][0]
    assert set(chunks_of(decode_manifest(sealer(Ids(0)), manifest, data))) == {chunk(1), chunk(2)}
