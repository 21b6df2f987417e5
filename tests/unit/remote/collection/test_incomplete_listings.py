"""Tests that a collector deletes nothing by a listing that lacks what is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from support.remote_world import (
    DAY_NS,
    EAGER,
    Bucket,
    BucketJudge,
    Ids,
    MemoryState,
    Uploader,
    chunk,
    make_collector,
)

from ciuic.remote.log_reader import (
    IncompleteListing,
    LogReader,
    LostCommits,
    NothingCommitted,
    RolledBack,
    Rounds,
)
from ciuic.remote.object_names import parse_log_entry, parse_pack
from ciuic.remote.objects.model import ObjectInfo
from ciuic.remote.remote_index import RemoteIndex
from ciuic.remote.upkeep.collection_round import Collector


class LackingBucket(Bucket):
    """Bucket whose listing number ``at`` of a prefix has only what ``keeps`` says; -1 for every listing from now on."""

    prefix = "w/"
    at: int | None = None
    keeps: Callable[[str], bool] = staticmethod(lambda name: False)
    before: Callable[[], object] = staticmethod(lambda: None)
    """Called right before a listing that lacks something."""
    listings = 0

    def lack(self, prefix: str, at: int, keeps: Callable[[str], bool]) -> None:
        self.prefix, self.at, self.keeps, self.listings = prefix, at, staticmethod(keeps), 0

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        found = super().list(prefix, after=after)
        if self.at is None or not prefix.startswith(self.prefix):
            return found
        self.listings += 1
        if self.at not in (-1, self.listings - 1):
            return found
        self.before()
        found = super().list(prefix, after=after)
        return (info for info in found if self.keeps(info.name))


class Fleet:
    """Bucket with the snapshots of two writers, of which each removed one, and collectors that begin with nothing."""

    def __init__(self) -> None:
        self.now_ns = 10 * DAY_NS
        self.bucket = LackingBucket(self.tick)
        self.ids = Ids("fleet")
        self.judge = BucketJudge(self.bucket)
        self.writers = []
        for number in range(2):
            uploader = Uploader(self.bucket, self.ids, MemoryState(), RemoteIndex.open(None, threads=1))
            uploader.begin()
            gone = uploader.upload({chunk(10 * number): None}, "cs-abcdef")
            kept = uploader.upload({chunk(10 * number + 1): None}, "cs-abcdef")
            uploader.log.remove([gone])
            self.judge.acknowledged.add(kept)
            self.writers.append(uploader.log.writer)

    def tick(self) -> int:
        self.now_ns += 1
        return self.now_ns

    def collect(self) -> None:
        index = RemoteIndex.open(None, threads=1)
        try:
            make_collector(self.bucket, self.ids, MemoryState(), index, policy=EAGER).run()
        finally:
            index.close()

    def packs(self) -> int:
        return sum(parse_pack(name) is not None for name in self.bucket.objects)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_empty_listing_of_logs_is_refused_at_each_place(fleet: Fleet) -> None:
    """A listing of all logs without an entry, once, ends the collection with an error of its own; the next one goes on."""
    refused = 0
    for at in range(20):
        fleet.bucket.lack("w/", at, lambda name: False)
        try:
            fleet.collect()
        except IncompleteListing:
            refused += 1
        assert not fleet.judge.problem()
        if fleet.bucket.listings <= at:
            break
    assert refused >= 3
    assert fleet.packs() == 2


def test_listing_without_one_writer_costs_nothing(fleet: Fleet) -> None:
    """A listing that lacks one of two logs, at any place, loses none of its snapshots."""
    for at in range(20):
        fleet.bucket.lack("w/", at, lambda name: fleet.writers[1] not in name)
        with suppress(IncompleteListing, LostCommits):
            fleet.collect()
        assert not fleet.judge.problem()
        if fleet.bucket.listings <= at:
            break
    assert fleet.packs() == 2


def test_log_that_the_listing_for_fences_lacks_has_a_fence(fleet: Fleet) -> None:
    """A writer that begins before a round, and that the next listing lacks, hears of the round all the same."""
    known = set(fleet.bucket.objects)
    late = Uploader(fleet.bucket, fleet.ids, MemoryState(), RemoteIndex.open(None, threads=1))
    fleet.bucket.lack("w/", 1, lambda name: late.log.writer not in name)
    fleet.bucket.before = staticmethod(late.begin)
    fleet.collect()
    assert late.log.writer
    fences = [name for name in set(fleet.bucket.objects) - known if name.startswith(f"w/{late.log.writer}/")]
    assert len(fences) == 2


def test_logs_that_commit_nothing_are_no_reason_to_delete(fleet: Fleet) -> None:
    """Packs without any log that commits or removes a snapshot stay, and the error says so."""
    for name in list(fleet.bucket.objects):
        if name.startswith(("w/", "manifests/")):
            del fleet.bucket.objects[name]
    with pytest.raises(NothingCommitted, match=r"4 packs.*nothing was deleted"):
        fleet.collect()
    assert not fleet.bucket.deleted


def test_late_listing_is_told_from_older_remote(fleet: Fleet) -> None:
    """A listing that lacks an entry that is there is incomplete; a log whose entries are gone was rolled back."""
    logs = LogReader(fleet.bucket, fleet.judge._sealer, threads=1)
    logs.refresh()
    fleet.bucket.lack("w/", -1, lambda name: False)
    with pytest.raises(IncompleteListing, match=r"the listing of w/.* lacks w/.*, which is there"):
        logs.refresh()
    for name in list(fleet.bucket.objects):
        if name.startswith(f"w/{fleet.writers[0]}/"):
            del fleet.bucket.objects[name]
    fleet.bucket.at = None
    with pytest.raises(RolledBack):
        logs.refresh()


def test_round_that_a_listing_lacks_is_noticed(fleet: Fleet) -> None:
    """A writer that begins reads a round although the listing of rounds does not have it."""
    fleet.collect()
    fleet.bucket.lack("gc/", 0, lambda name: False)
    rounds = Rounds(fleet.bucket, fleet.judge._sealer)
    rounds.refresh()
    assert (rounds.last, rounds.finished) == (0, 0)
    fleet.bucket.lack("gc/", -1, lambda name: False)
    with pytest.raises(IncompleteListing):
        Rounds(fleet.bucket, fleet.judge._sealer).refresh()


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("believed", [False, True])
def test_log_that_was_cut_is_not_believed(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, first: int, believed: bool
) -> None:
    """Nothing is deleted beside a log that was deleted, or cut at its end; a collector that believes it deletes a snapshot."""
    fleet.judge.acknowledged.clear()
    late = Uploader(fleet.bucket, fleet.ids, MemoryState(), RemoteIndex.open(None, threads=1))
    late.begin()
    late.upload({chunk(7): None}, "cs-abcdef")
    late.upload({chunk(8): None}, "cs-abcdef")
    kept = late.upload({chunk(9): None}, "cs-abcdef")
    for name in list(fleet.bucket.objects):
        position = parse_log_entry(name)
        if position and position.writer == late.log.writer and position.number >= first:
            del fleet.bucket.objects[name]
    if believed:
        monkeypatch.setattr(Collector, "_require_logs", lambda self: None)
        fleet.collect()
        assert kept in fleet.bucket.deleted
        return
    with pytest.raises(LostCommits, match="no log commits or removes it"):
        fleet.collect()
    assert not fleet.bucket.deleted
