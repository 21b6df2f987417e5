"""Tests that no order of requests, lost replies, pauses and kills costs a remote a chunk that a snapshot needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.remote_protocol import (
    MORE,
    OF_LISTINGS,
    THE_NINE,
    Contents,
    Search,
    Storm,
    Violation,
    WriterMachine,
    retry,
)
from support.remote_world import (
    Bucket,
    BucketJudge,
    Ids,
    MemoryState,
    Uploader,
    chunk,
    make_collector,
    record,
    sealer,
    store_pack,
)

from ciuic.remote.documents import LogRemove, StoredRound, create_entry, create_round, read_round
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.log_reader import LostCommits, NothingCommitted
from ciuic.remote.object_names import PackRef, RoundPart, pack_name, round_name
from ciuic.remote.objects.model import Objects
from ciuic.remote.remote_index import RemoteIndex
from ciuic.remote.upkeep import check
from ciuic.remote.upkeep.check import mend_rounds
from ciuic.remote.upkeep.collection_round import CollectionPolicy, Collector

WANTED = chunk(1)
OLD_PACK = PackRef("d" + "11" * 16)
SECOND_PACK = PackRef("d" + "22" * 16)


@pytest.mark.parametrize("seed", range(12))
def test_random_operations_keep_every_snapshot(seed: int) -> None:
    """After each request of three writers and two collectors every snapshot has its chunks, whatever fails."""
    storm = Storm(seed, switch_share=(1.0, 0.3, 0.1)[seed % 3])
    storm.run(150, max_steps=200_000)
    assert storm.operations >= 150
    # A run that deleted nothing would prove nothing.
    assert storm.bucket.deleted


# 20 for ten thousand operations, and for mutations that chance meets late (docs/torture.md).
STORMS = int(os.environ.get("CIUIC_STORMS", "4"))


@pytest.mark.slow
def test_long_storms_keep_every_snapshot() -> None:
    """The same for 500 snapshots, removals and rounds in each of several buckets."""
    done = 0
    for seed in range(1000, 1000 + STORMS):
        storm = Storm(seed, switch_share=(1.0, 0.3, 0.1)[seed % 3])
        storm.run(500, max_steps=1_000_000)
        done += storm.operations
    assert done >= 500 * STORMS


# These lose a chunk in few orders of requests: chance takes long to meet one, and the search below meets all.
RARE = {"list_before_hello", "overlapping_rounds"}


@pytest.mark.parametrize("name", sorted(set(THE_NINE) - RARE))
def test_mutation_of_one_step_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Random operations lose a chunk within 200,000 requests with each mutation that is not rare."""
    THE_NINE[name](monkeypatch)
    assert first_violation(200_000), f"{name}: nothing was lost"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "first_seed"),
    [
        # A storm that finds it, until the code changes; then the next ones do, after some minutes.
        ("bases_not_marked", 336),
        ("manifest_name_reused", 0),
        *([("every_final_counts", 0), ("entry_before_not_read", 0)] if STORMS >= 20 else []),
    ],
)
def test_further_mutation_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str, first_seed: int) -> None:
    """So does each of these, of what the model does not have, within 700,000 requests."""
    MORE[name](monkeypatch)
    assert first_violation(700_000, first_seed), f"{name}: nothing was lost"


def first_violation(max_requests: int, first_seed: int = 0) -> str:
    """Return what storms find wrong, one after the other, until they have sent so many requests."""
    requests = 0
    for seed in range(first_seed, first_seed + max_requests):
        # No sums of writers' own logs: they take requests, and none of these mutations.
        storm = Storm(seed, switch_share=(1.0, 0.3, 0.1)[seed % 3], sum_share=0)
        try:
            # Short ones: what goes wrong does so while there are few copies of anything.
            storm.run(60, max_steps=20_000)
        except Violation as violation:
            return str(violation)
        requests += len(storm.history)
        if requests > max_requests:
            break
    return ""


def first_bucket(*more_packs: PackRef) -> tuple[Contents, str]:
    """Return a bucket with one snapshot of one chunk, in one pack and these, and its manifest."""
    bucket = Bucket()
    index = RemoteIndex.open(None, threads=1)
    uploader = Uploader(bucket, Ids("first"), MemoryState(), index)
    uploader.begin()
    index.add(OLD_PACK, 0, store_pack(bucket, uploader.sealer, OLD_PACK, [record(WANTED)]))
    manifest = uploader.upload({WANTED: None}, "cs-abcdef")
    for ref in more_packs:
        store_pack(bucket, uploader.sealer, ref, [record(WANTED)])
    index.close()
    return frozenset((name, data) for name, (data, _) in bucket.objects.items()), manifest


def known_index(*packs: PackRef) -> RemoteIndex:
    """Return an index that was complete while the first bucket was as it is, and met its packs in this order."""
    index = RemoteIndex.open(None, threads=1)
    for ref in packs or (OLD_PACK,):
        index.add(ref, 0, [record(WANTED)[0]])
    index.mark_complete(-1)
    return index


def writer(number: int) -> Callable[[Objects, Callable[[Any], None]], None]:
    def run(objects: Objects, say: Callable[[Any], None]) -> None:
        index = known_index()
        try:
            uploader = Uploader(objects, Ids(f"writer {number}"), MemoryState(), index, list_packs=False)
            retry(uploader.begin)
            say(retry(lambda: uploader.upload({WANTED: None}, "cs-abcdef")))
        finally:
            index.close()

    return run


def collector(number: int, *packs: PackRef) -> Callable[[Objects, Callable[[Any], None]], None]:
    def run(objects: Objects, say: Callable[[Any], None]) -> None:
        index = known_index(*packs)
        policy = CollectionPolicy(young_ns=-1, repack_share=0)
        try:
            retry(
                make_collector(
                    objects, Ids(f"collector {number}"), MemoryState(), index, max_entries=1000, policy=policy
                ).run
            )
        except (LostCommits, NothingCommitted):
            # It deletes nothing, and its process ends.
            pass
        finally:
            index.close()

    return run


def remover(manifest: str) -> Callable[[Objects, Callable[[Any], None]], None]:
    def run(objects: Objects, say: Callable[[Any], None]) -> None:
        ids = Ids("remover")
        entry = LogRemove(nonce=ids.hex(), manifests=(manifest,))
        create_entry(objects, sealer(ids), "ef" * 16, 0, entry)

    return run


def search_all(
    contents: Contents,
    parties: Sequence[Callable[[Objects, Callable[[Any], None]], None]],
    max_states: int,
    lacks_in: str = "",
    stolen: Sequence[str] = (),
    kept: Collection[str] = (),
) -> tuple[str, int]:
    """Search all orders of requests; return what is wrong, and the number of states."""
    bucket = Bucket()
    judge = BucketJudge(bucket)
    judge.kept.update(kept)

    def problem(contents: Contents, said: frozenset[Any]) -> str:
        bucket.objects = {name: (data, 0) for name, data in contents}
        judge.acknowledged = set(said)
        return judge.problem()

    found = Search(parties, problem, lacks_in, stolen)
    return found.run(contents, max_states), found.states


def cut_log(max_states: int) -> tuple[str, int]:
    """Search with a commit, a round, and somebody who deletes the log of the first snapshot, the newest entry first."""
    contents, manifest = first_bucket()
    log = sorted(name for name, _ in contents if name.startswith("w/"))

    def notices(
        party: Callable[[Objects, Callable[[Any], None]], None],
    ) -> Callable[[Objects, Callable[[Any], None]], None]:
        def run(objects: Objects, say: Callable[[Any], None]) -> None:
            with suppress(DamagedRemote):
                party(objects, say)

        return run

    def thief(objects: Objects, say: Callable[[Any], None]) -> None:
        for name in reversed(log):
            objects.delete([name])

    return search_all(
        contents, [notices(writer(0)), notices(collector(0)), thief], max_states, stolen=log, kept={manifest}
    )


def writer_and_collector(max_states: int) -> tuple[str, int]:
    """Search with a commit, a round, and a removal of the only snapshot."""
    contents, manifest = first_bucket()
    return search_all(contents, [writer(0), collector(0), remover(manifest)], max_states)


def lacking_listing(max_states: int, prefix: str) -> tuple[str, int]:
    """Search with a commit and a round, any one listing of this prefix lacks something; the only snapshot was removed before."""
    contents, manifest = first_bucket()
    bucket = Bucket()
    remover(manifest)(bucket, lambda said: None)
    removed = {(name, data) for name, (data, _) in bucket.objects.items()}
    return search_all(contents | removed, [writer(0), collector(0)], max_states, prefix)


def two_collectors(max_states: int) -> tuple[str, int]:
    """Search with two collectors of which each would rather delete another of two packs with one chunk."""
    contents, _ = first_bucket(SECOND_PACK)
    parties = [collector(0, OLD_PACK, SECOND_PACK), collector(1, SECOND_PACK, OLD_PACK)]
    return search_all(contents, parties, max_states)


def test_every_order_of_one_writer_and_one_collector_is_safe() -> None:
    """All 5,610 states of a commit, a round and a removal that run at once are right."""
    problem, states = writer_and_collector(100_000)
    assert problem == ""
    assert 1_000 < states < 100_000


@pytest.mark.slow
def test_every_order_of_two_collectors_is_safe() -> None:
    """All states of two collectors that disagree on what to delete are right."""
    problem, states = two_collectors(1_000_000)
    assert problem == ""
    assert 1_000 < states < 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["w/", "gc/", "packs/", "manifests/"])
def test_every_order_with_a_listing_that_lacks_something_is_safe(prefix: str) -> None:
    """States of a commit and a round, any one listing of which lacks something, are right: the first 15,000."""
    problem, states = lacking_listing(15_000, prefix)
    assert problem == ""
    assert states > 1_000


def test_every_order_with_a_log_that_is_deleted_is_safe() -> None:
    """In all 1,634 states of a commit and a round while a third party deletes a log, its snapshot keeps its chunks."""
    problem, states = cut_log(20_000)
    assert problem == ""
    assert 1_000 < states < 20_000


def test_search_finds_belief_in_a_deleted_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search finds a lost manifest or chunk where no log is missed."""
    monkeypatch.setattr(Collector, "_require_logs", lambda self: None)
    problem, _ = cut_log(20_000)
    assert "is gone" in problem or "is in no pack" in problem


def ended_round(damaged: RoundPart, *, spared: bool = False) -> tuple[Contents, str]:
    """Return a bucket after a round with one damaged part: the round deleted the pack of a removed snapshot, or spared that of a live one."""
    contents, manifest = first_bucket()
    bucket = Bucket()
    bucket.objects = {name: (data, 0) for name, data in contents}
    seals = sealer(Ids("the round"))
    condemned = StoredRound(nonce="aa" * 16, condemned=(OLD_PACK,))
    nothing = StoredRound(nonce="bb" * 16)
    if not spared:
        remover(manifest)(bucket, lambda said: None)
        bucket.delete([pack_name(OLD_PACK)])
    create_round(bucket, seals, 0, "begun", condemned)
    create_round(bucket, seals, 0, "final", nothing if spared else condemned)
    create_round(bucket, seals, 0, "done", nothing)
    bucket.put(round_name(0, damaged), [b"junk"])
    return frozenset((name, data) for name, (data, _) in bucket.objects.items()), manifest


def repairer(number: int) -> Callable[[Objects, Callable[[Any], None]], None]:
    def run(objects: Objects, say: Callable[[Any], None]) -> None:
        ids = Ids(f"repairer {number}")
        mend_rounds(objects, sealer(ids), ids.hex)

    return run


def repaired_round(
    max_states: int, damaged: RoundPart, *, spared: bool = False, collects: bool = False
) -> tuple[str, int]:
    """Search with a commit of a writer that was away during the round, two repairs of its damaged part, or one and a collection."""
    contents, manifest = ended_round(damaged, spared=spared)
    stolen = [round_name(0, damaged)]

    def refuses(
        party: Callable[[Objects, Callable[[Any], None]], None],
    ) -> Callable[[Objects, Callable[[Any], None]], None]:
        def run(objects: Objects, say: Callable[[Any], None]) -> None:
            with suppress(DamagedRemote):
                party(objects, say)

        return run

    return search_all(
        contents,
        [refuses(writer(0)), repairer(0), refuses(collector(0)) if collects else repairer(1)],
        max_states,
        stolen=stolen,
        kept={manifest} if spared else (),
    )


@pytest.mark.parametrize("damaged", ["final", "done"])
@pytest.mark.parametrize("spared", [False, True])
def test_every_order_with_a_repair_of_a_round_is_safe(damaged: RoundPart, spared: bool) -> None:
    """In all states of a commit while a damaged part of an ended round is repaired twice, snapshots keep their chunks."""
    problem, states = repaired_round(20_000, damaged, spared=spared)
    assert problem == ""
    assert 20 < states < 20_000


@pytest.mark.slow
@pytest.mark.parametrize("damaged", ["final", "done"])
def test_every_order_with_a_repair_and_a_collection_is_safe(damaged: RoundPart) -> None:
    """States of a commit and a collection while a damaged part of an ended round is repaired are right: the first 50,000."""
    problem, states = repaired_round(50_000, damaged, collects=True)
    assert problem == ""
    assert states > 1_000


def test_a_repaired_round_can_be_read() -> None:
    """After a repair each part of the ended round opens, and says what the round deleted."""
    for damaged in ("final", "done"):
        contents, _ = ended_round(damaged)
        bucket = Bucket()
        bucket.objects = {name: (data, 0) for name, data in contents}
        repairer(0)(bucket, lambda said: None)
        seals = sealer(Ids("a reader"))
        assert read_round(bucket, seals, 0, "done").condemned == ()
        assert read_round(bucket, seals, 0, "final").condemned == (OLD_PACK,)


def test_search_finds_a_repair_that_forgets_what_was_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search finds a lost chunk where a repair says that the round deleted nothing."""
    real = check.encode_round

    def forgets(seals: Any, round_: int, part: RoundPart, content: StoredRound) -> bytes:
        return real(seals, round_, part, StoredRound(nonce=content.nonce))

    monkeypatch.setattr(check, "encode_round", forgets)
    problem, _ = repaired_round(20_000, "final")
    assert "is in no pack" in problem


def test_search_finds_a_repair_that_deletes_what_a_round_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search finds a lost chunk where a repair deletes what the round began with, not what it decided."""

    def deletes_all(objects: Objects, content: StoredRound) -> None:
        objects.delete([pack_name(OLD_PACK)])

    monkeypatch.setattr(check, "delete_condemned", deletes_all)
    problem, _ = repaired_round(20_000, "done", spared=True)
    assert "is in no pack" in problem


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_LISTINGS)
def test_search_finds_belief_in_a_listing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A search finds a lost chunk where a listing that lacks something is believed."""
    prefix, mutate = OF_LISTINGS[name]
    mutate(monkeypatch)
    problem, _ = lacking_listing(100_000, prefix)
    assert "is in no pack" in problem


@pytest.mark.parametrize("name", THE_NINE)
def test_search_finds_mutation(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A search finds a lost chunk for each of the nine mutations of the protocol, within 20,000 states."""
    THE_NINE[name](monkeypatch)
    problem, _ = (two_collectors if name == "overlapping_rounds" else writer_and_collector)(20_000)
    assert "is in no pack" in problem


class StormMachine(RuleBasedStateMachine):
    """Hypothesis chooses whose request is next, and what happens to it."""

    @initialize(seed=st.integers(0, 1 << 16))
    def begin(self, seed: int) -> None:
        self.storm = Storm(seed, universe=3)

    @rule(
        at=st.integers(0, 4),
        fate=st.sampled_from(
            ["go", "go", "go", "lose reply", "lose request", "late", "kill after", "kill before"]
        ),
        more=st.integers(0, 40),
    )
    def request(self, at: int, fate: str, more: int) -> None:
        self.storm.let(self.storm.machines[at], fate)
        for _ in range(more):
            self.storm.let(self.storm.machines[at], "go")

    @precondition(lambda self: any(machine.party.objects.late for machine in self.storm.machines))
    @rule()
    def late_requests_arrive(self) -> None:
        for machine in self.storm.machines:
            self.storm.deliver_late(machine)

    @rule(one=st.integers(0, 2), other=st.integers(0, 2))
    def clone_disk(self, one: int, other: int) -> None:
        source, target = self.storm.machines[one], self.storm.machines[other]
        assert isinstance(source, WriterMachine)
        if not target.party.running:
            target.state = MemoryState(source.state.position)

    def teardown(self) -> None:
        if hasattr(self, "storm"):
            self.storm.close()


StormMachine.TestCase.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStormMachine = StormMachine.TestCase
