"""Tests that no order of requests, lost replies, pauses and kills costs a remote a chunk that a snapshot needs."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.depth import by_depth
from support.remote_protocol import (
    COLD,
    MORE,
    OF_LISTINGS,
    THE_NINE,
    Contents,
    Search,
    Storm,
    Violation,
    WriterMachine,
    no_fence,
    retry,
)
from support.remote_world import (
    Bucket,
    BucketJudge,
    Ids,
    Killed,
    MemoryState,
    Uploader,
    chunk,
    make_collector,
    mark_manifests,
    record,
    sealer,
    store_pack,
)

from ciuic.config import TierRule
from ciuic.errors import CiuicError
from ciuic.maintenance.check import CheckReport
from ciuic.remote import log_reader, remote_index
from ciuic.remote.documents import (
    LiveManifest,
    LogFence,
    LogRemove,
    StoredRound,
    create_entry,
    create_round,
    decode_round,
    read_round,
)
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.log_reader import (
    InlinePool,
    LogReader,
    LostCommits,
    NothingCommitted,
    Rounds,
    unlogged_manifests,
)
from ciuic.remote.object_names import (
    MANIFESTS_PREFIX,
    PackRef,
    RoundPart,
    pack_name,
    parse_log_entry,
    parse_pack,
    parse_round,
    round_name,
    table_name,
)
from ciuic.remote.objects.model import Objects, RemoteUnreachable
from ciuic.remote.objects.storage_classes import ListedClass
from ciuic.remote.pack import RemotePackReader
from ciuic.remote.remote_index import RemoteIndex, list_packs
from ciuic.remote.upkeep import check, cold_packs, collection_round
from ciuic.remote.upkeep.check import mend_rounds
from ciuic.remote.upkeep.cold_packs import AgedSnapshot, _Mover
from ciuic.remote.upkeep.collection_round import CollectionPolicy, Collector
from ciuic.remote.writer_log import LogUpkeep, WriterLog
from ciuic.repository.identity import Bytes
from ciuic.repository.index_database import IndexDatabase

Party = Callable[[Objects, Callable[[Any], None]], None]
"""One of several that use a remote at the same time: it is given the remote, and tells what it believes."""

WANTED = chunk(1)
OLD_PACK = PackRef("d" + "11" * 16)
SECOND_PACK = PackRef("d" + "22" * 16)


@pytest.fixture(autouse=True, scope="module")
def copied_indexes() -> Iterator[None]:
    """Copy the tables of an empty index for each party: a search has tens of thousands, and to make them took a third of it."""
    empty = IndexDatabase.memory()
    RemoteIndex(empty, threads=1)

    def copy_of_empty() -> IndexDatabase:
        one = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        empty.db.backup(one)
        return IndexDatabase(one)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IndexDatabase, "memory", copy_of_empty)
        yield
    empty.db.close()


@pytest.mark.parametrize("seed", range(12))
def test_random_operations_keep_every_snapshot(seed: int) -> None:
    """After each request of three writers and two collectors every snapshot has its chunks, whatever fails."""
    storm = Storm(seed, switch_share=(1.0, 0.3, 0.1)[seed % 3])
    storm.run(150, max_steps=200_000)
    assert storm.operations >= 150
    # A run that deleted nothing would prove nothing.
    assert storm.bucket.deleted


# 20 for ten thousand operations, and for mutations that chance meets late (docs/torture.md).
STORMS = int(os.environ.get("CIUIC_STORMS", by_depth("1", "20")))


@pytest.mark.slow
@pytest.mark.full
def test_long_storms_keep_every_snapshot() -> None:
    """The same for 500 snapshots, removals and rounds in each of several buckets.

    The test before this one has the same operations in smaller numbers.
    """
    done = 0
    for seed in range(1000, 1000 + STORMS):
        storm = Storm(seed, switch_share=(1.0, 0.3, 0.1)[seed % 3])
        storm.run(500, max_steps=1_000_000)
        done += storm.operations
    assert done >= 500 * STORMS


# These lose a chunk in few orders of requests: chance takes long to meet one, and the search below meets all.
RARE = {"list_before_hello", "overlapping_rounds"}


# Storms that find them, until the code changes; then the next ones do, after some seconds.
FINDING_SEEDS = {"fence_before_round": 72, "no_hello": 28}


@pytest.mark.parametrize("name", sorted(set(THE_NINE) - RARE))
def test_mutation_of_one_step_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Random operations lose a chunk within 200,000 requests with each mutation that is not rare."""
    THE_NINE[name](monkeypatch)
    assert first_violation(200_000, FINDING_SEEDS.get(name, 0)), f"{name}: nothing was lost"


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


def writer(number: int) -> Party:
    def run(objects: Objects, say: Callable[[Any], None]) -> None:
        index = known_index()
        try:
            uploader = Uploader(objects, Ids(f"writer {number}"), MemoryState(), index, list_packs=False)
            retry(uploader.begin)
            say(retry(lambda: uploader.upload({WANTED: None}, "cs-abcdef")))
        finally:
            index.close()

    return run


def collector(number: int, *packs: PackRef) -> Party:
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


def remover(manifest: str) -> Party:
    def run(objects: Objects, say: Callable[[Any], None]) -> None:
        ids = Ids("remover")
        entry = LogRemove(nonce=ids.hex(), manifests=(manifest,))
        create_entry(objects, sealer(ids), "ef" * 16, 0, entry)

    return run


class Claim(NamedTuple):
    """What a check calls damage, where nobody has damaged anything."""

    text: str


def search_all(
    contents: Contents,
    parties: Sequence[Party],
    max_states: int,
    lacks_in: str = "",
    stolen: Sequence[str] = (),
    kept: Collection[str] = (),
    owner: int = -1,
    kept_names: Sequence[str] = (),
    doomed: Collection[str] = (),
    also: Callable[[Contents], str] = lambda contents: "",
    quiet: Sequence[str] = (),
) -> tuple[str, int]:
    """Search all orders of requests; return what is wrong, and the number of states.

    What is ``doomed`` is judged as gone: a paused collector may delete it at any time. ``also`` says what else is wrong.
    """
    bucket = Bucket()
    judge = BucketJudge(bucket)
    judge.kept.update(kept)

    def problem(contents: Contents, said: frozenset[Any]) -> str:
        bucket.objects = {name: (data.removesuffix(COLD), 0) for name, data in contents if name not in doomed}
        judge.acknowledged = {one for one in said if isinstance(one, str)}
        claims = [one.text for one in said if isinstance(one, Claim)]
        return "".join(claims[:1]) or also(contents) or judge.problem()

    found = Search(parties, problem, lacks_in, stolen, owner, kept_names, quiet)
    return found.run(contents, max_states), found.states


def refusing(party: Party) -> Party:
    """Return the same party, which ends where the remote is damaged."""

    def run(objects: Objects, say: Callable[[Any], None]) -> None:
        with suppress(DamagedRemote):
            party(objects, say)

    return run


def cut_log(max_states: int) -> tuple[str, int]:
    """Search with a commit, a round, and somebody who deletes the log of the first snapshot, the newest entry first."""
    contents, manifest = first_bucket()
    log = sorted(name for name, _ in contents if name.startswith("w/"))

    def thief(objects: Objects, say: Callable[[Any], None]) -> None:
        for name in reversed(log):
            objects.delete([name])

    return search_all(
        contents,
        [refusing(writer(0)), refusing(collector(0)), thief],
        max_states,
        stolen=log,
        kept={manifest},
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
    return search_all(
        contents, parties, max_states, kept_names=["manifests/"], quiet=["manifests/", "tables/"]
    )


def test_every_order_of_one_writer_and_one_collector_is_safe() -> None:
    """All states of a commit, a round and a removal that run at once are right."""
    problem, states = writer_and_collector(100_000)
    assert problem == ""
    assert 1_000 < states < 100_000


@pytest.mark.slow
def test_every_order_of_two_collectors_is_safe() -> None:
    """States of two collectors that disagree on what to delete are right: the first 20,000, or all in `make torture`."""
    max_states = by_depth(20_000, 1_000_000)
    problem, states = two_collectors(max_states)
    assert problem == ""
    assert states > 1_000
    assert states < 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["w/", "gc/", "packs/", "manifests/"])
def test_every_order_with_a_listing_that_lacks_something_is_safe(prefix: str) -> None:
    """States of a commit and a round, any one listing of which lacks something, are right: the first 5,000, or 100,000 in `make torture`."""
    problem, states = lacking_listing(by_depth(5_000, 100_000), prefix)
    assert problem == ""
    assert states > 1_000


def test_every_order_with_a_log_that_is_deleted_is_safe() -> None:
    """In all states of a commit and a round while a third party deletes a log, its snapshot keeps its chunks."""
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


def repairer(number: int) -> Party:
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

    return search_all(
        contents,
        [refusing(writer(0)), repairer(0), refusing(collector(0)) if collects else repairer(1)],
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
    """States of a commit and a collection while a damaged part of an ended round is repaired are right: the first 15,000, or 200,000 in `make torture`."""
    problem, states = repaired_round(by_depth(15_000, 200_000), damaged, collects=True)
    assert problem == ""
    assert states > 1_000


def test_a_repaired_round_can_be_read() -> None:
    """After a repair each part of the ended round opens and says what it deleted; without a `.done`, a collection ends it once more."""
    for damaged in ("final", "done"):
        contents, _ = ended_round(damaged)
        bucket = Bucket()
        bucket.objects = {name: (data, 0) for name, data in contents}
        repairer(0)(bucket, lambda said: None)
        seals = sealer(Ids("a reader"))
        if damaged == "done":
            assert bucket.info(round_name(0, "done")) is None
        else:
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


def checker(objects: Objects, say: Callable[[Any], None]) -> None:
    """Check all logs, the manifests that they account for, and the tables of packs."""
    seals = sealer(Ids("checker"))
    reader: Any = SimpleNamespace(space=SimpleNamespace(objects=objects, sealer=seals))
    report = CheckReport()
    check._check_logs(reader, report)
    check._check_rounds(reader, report)
    for finding in report.findings:
        if finding.severity != "info":
            say(Claim(f"sound, and called damaged: {finding.message}"))
    packs = list_packs(objects)
    for _, found in remote_index.read_tables(objects, seals, packs, packs, 1):
        if isinstance(found, CiuicError):
            say(Claim(f"sound, and called damaged: {found.message}"))


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a check ask for one entry after the other, so that a run depends on its replies alone."""
    monkeypatch.setattr(check, "LogReader", partial(LogReader, threads=1))


@pytest.fixture
def young(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all manifests count as young: their writers may be about to commit them."""
    monkeypatch.setattr(check, "UPLOADING_NS", 1 << 62)


def checked(max_states: int, *parties: Party) -> tuple[str, int]:
    """Search with a check beside these."""
    contents, _ = first_bucket()
    return search_all(contents, [checker, *parties], max_states)


def late_checker(objects: Objects, say: Callable[[Any], None]) -> None:
    """Check where a listing may lack something: the check may end without a result."""
    with suppress(RemoteUnreachable):
        checker(objects, say)


@pytest.mark.usefixtures("young")
@pytest.mark.parametrize("prefix", ["w/", "gc/", "packs/", "manifests/"])
def test_a_check_calls_no_late_listing_damage(prefix: str) -> None:
    """In all states of a check beside an upload, any one listing of which lacks something, nothing is called damage."""
    contents, _ = first_bucket()
    problem, states = search_all(contents, [late_checker, writer(0)], 20_000, prefix)
    assert problem == ""
    assert 100 < states < 20_000


def removing_collector(objects: Objects, say: Callable[[Any], None]) -> None:
    """Remove the only snapshot, and run two collections that sum up every log."""
    _, manifest = first_bucket()
    remover(manifest)(objects, say)
    index = known_index()
    policy = CollectionPolicy(young_ns=1 << 62, repack_share=0)
    ids, state = Ids("summing collector"), MemoryState()
    try:
        for _ in range(2):
            retry(make_collector(objects, ids, state, index, max_entries=0, policy=policy).run)
    finally:
        index.close()


@pytest.mark.usefixtures("young")
def test_a_check_calls_no_upload_damage() -> None:
    """In all states of a check beside an upload, wherever it stops, nothing is called damage."""
    problem, states = checked(50_000, writer(0))
    assert problem == ""
    assert 100 < states < 50_000


@pytest.mark.usefixtures("young")
def test_a_check_calls_no_collection_damage() -> None:
    """In the first 20,000 states of a check beside a commit, a removal and a collection nothing is called damage."""
    _, manifest = first_bucket()
    problem, states = checked(20_000, writer(0), collector(0), remover(manifest))
    assert problem == ""
    assert states > 1_000


@pytest.mark.usefixtures("one_thread")
def test_a_check_calls_no_removed_snapshot_damage() -> None:
    """In all states of a check of old manifests beside a removal and sums of logs nothing is called damage."""
    problem, states = checked(50_000, removing_collector)
    assert problem == ""
    assert 100 < states < 50_000


@pytest.mark.usefixtures("young")
def test_search_finds_logs_read_before_manifests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search finds a false alarm where a check lists manifests after it has read the logs."""

    def unlogged(reader: Any, logs: LogReader) -> Any:
        space = reader.space
        stored = list(space.objects.list(MANIFESTS_PREFIX))
        return unlogged_manifests(space.objects, space.sealer, stored, logs, 0)

    monkeypatch.setattr(check, "_unlogged", unlogged)
    # Else the log would be found late, and the check end without a result.
    monkeypatch.setattr(log_reader, "_listed_late", lambda objects, writer: "")
    problem, _ = checked(50_000, writer(0))
    assert "called damaged" in problem


@pytest.mark.usefixtures("young")
def test_search_finds_belief_in_a_missing_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search finds a false alarm where a log that one listing lacks counts as gone."""
    monkeypatch.setattr(log_reader, "_listed_late", lambda objects, writer: "")
    contents, _ = first_bucket()
    problem, _ = search_all(contents, [late_checker, writer(0)], 20_000, "w/")
    assert "called damaged" in problem


@pytest.mark.usefixtures("one_thread")
def test_search_finds_a_forgotten_removal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search finds a false alarm where sums of logs forget removals whose manifests are there."""
    run = LogUpkeep.run
    monkeypatch.setattr(LogUpkeep, "run", lambda self, now_ns, stored=(): run(self, now_ns))
    problem, _ = checked(50_000, removing_collector)
    assert "called damaged" in problem


@pytest.mark.usefixtures("young")
def test_search_finds_a_deleted_pack_called_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search finds a false alarm where a pack that a round deletes after it was listed is damage."""
    real = remote_index.read_tables

    def strict(*asked: Any) -> Iterator[tuple[PackRef, Any]]:
        for ref, found in real(*asked):
            yield ref, CiuicError(f"{pack_name(ref)} is gone") if found is None else found

    monkeypatch.setattr(remote_index, "read_tables", strict)
    _, manifest = first_bucket()
    problem, _ = checked(50_000, collector(0), remover(manifest))
    assert "called damaged" in problem


class ModelClasses:
    """Storage classes, of which a change is a copy that begins and arrives."""

    scheme = "s3"

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def list(self, prefix: str) -> Iterator[ListedClass]:
        return (ListedClass(info.name, "") for info in self._objects.list(prefix))

    def change(self, name: str, storage_class: str) -> None:
        # A pack that was deleted since the copy began is back when it arrives.
        self._objects.put(name, [self._objects.get(name), COLD])


class ModelMover(_Mover):
    """Mover of every data pack that a snapshot needs: manifests of these tests tell no time."""

    def _aged(self, snapshots: Mapping[str, LiveManifest]) -> list[AgedSnapshot]:
        return [AgedSnapshot(name, "host", "job", 0) for name in snapshots]


EVERYTHING_COLD = TierRule(after_seconds=0, storage_class="GLACIER", keep_newest=0)


def mover(objects: Objects, say: Callable[[Any], None]) -> None:
    ids = Ids("mover")
    seals = sealer(ids)
    index = RemoteIndex.open(None, threads=1)
    log = WriterLog(
        objects,
        seals,
        MemoryState(),  # type: ignore[arg-type]
        Rounds(objects, seals, known=None),
        host="mover",
        repository="ab" * 16,
        new_id=ids.hex,
    )
    space = SimpleNamespace(objects=objects, sealer=seals, id="remote")
    reader: Any = SimpleNamespace(space=space, retry=SimpleNamespace(call=lambda call: call()))
    classes: Any = ModelClasses(objects)
    marks: Any = mark_manifests(objects, seals)
    logs = LogReader(objects, seals, threads=1)
    try:
        ModelMover(reader, classes, log=log, logs=logs, index=index, mark=marks).run([EVERYTHING_COLD], 1)
    except DamagedRemote:
        # A round condemned what the plan needs.
        pass
    finally:
        index.close()


def misplaced(contents: Contents) -> str:
    """Return what a move has spoilt: a cold pack without the copy of its table, or one that is back after its deletion."""
    names = dict(contents)
    seals = sealer(Ids("judge"))
    for name, data in contents:
        ref = parse_pack(name)
        if ref and data.endswith(COLD) and table_name(ref) not in names:
            return f"{name} is cold, and has no copy of its table"
        round_ = parse_round(name)
        if round_ and round_.part == "final" and round_name(round_.round, "done") in names:
            for deleted in decode_round(seals, round_.round, "final", data).condemned:
                if pack_name(PackRef(deleted)) in names:
                    return f"{pack_name(PackRef(deleted))} is back after its deletion"
    return ""


def moved(max_states: int, *parties: Party) -> tuple[str, int]:
    """Search with a move of all packs beside these, of a bucket with two packs of one chunk."""
    contents, _ = first_bucket(SECOND_PACK)
    return search_all(contents, [mover, *parties], max_states, kept_names=["manifests/"], also=misplaced)


def collected_cold(max_states: int) -> tuple[str, int]:
    """Search with a collection after such a move, beside the removal of the only snapshot."""
    contents, manifest = first_bucket(SECOND_PACK)
    bucket = Bucket()
    bucket.objects = {name: (data, 0) for name, data in contents}
    mover(bucket, lambda said: None)
    cold = frozenset((name, data) for name, (data, _) in bucket.objects.items())
    assert sum(data.endswith(COLD) for _, data in cold) == 2
    return search_all(cold, [DUPLICATES, remover(manifest)], max_states, also=misplaced)


class CopyingBucket(Bucket):
    """Bucket in which a copy of a pack begins, and does not arrive before its mover is killed."""

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        if parse_pack(name):
            raise Killed(name)
        super().put(name, data)


def late_copy(max_states: int) -> tuple[str, int]:
    """Search with a collection, and the copy of the pack that it would delete, which arrives after its mover was killed."""
    contents, _ = first_bucket(SECOND_PACK)
    bucket = CopyingBucket()
    bucket.objects = {name: (data, 0) for name, data in contents}
    with suppress(Killed):
        mover(bucket, lambda said: None)
    begun = frozenset((name, data) for name, (data, _) in bucket.objects.items())
    assert table_name(OLD_PACK) in bucket.objects

    def arrive(objects: Objects, say: Callable[[Any], None]) -> None:
        objects.put(pack_name(OLD_PACK), [dict(contents)[pack_name(OLD_PACK)], COLD])

    return search_all(begun, [arrive, DUPLICATES], max_states, also=misplaced)


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a mover move one pack after the other, so that a run depends on its replies alone."""
    monkeypatch.setattr(cold_packs, "ThreadPoolExecutor", lambda threads: InlinePool())


def host_without_index(objects: Objects, say: Callable[[Any], None]) -> None:
    """Commit by what a listing shows, from the tables of cold packs, too."""
    index = RemoteIndex.open(None, threads=1)
    try:
        uploader = Uploader(objects, Ids("host without index"), MemoryState(), index)
        retry(uploader.begin)
        say(retry(lambda: uploader.upload({WANTED: None}, "cs-abcdef")))
    finally:
        index.close()


DUPLICATES = collector(0, OLD_PACK, SECOND_PACK)


@pytest.mark.usefixtures("inline")
def test_every_order_of_a_move_and_an_upload_is_safe() -> None:
    """In all states of a move beside an upload every cold pack has its table, and the snapshot its chunks."""
    problem, states = moved(50_000, host_without_index)
    assert problem == ""
    assert 300 < states < 50_000


@pytest.mark.usefixtures("inline")
def test_every_order_of_a_move_and_a_collection_is_safe() -> None:
    """In the first 30,000 states of a move beside a collection no pack is back after its deletion, or without its table."""
    problem, states = moved(30_000, DUPLICATES)
    assert problem == ""
    assert states > 1_000


@pytest.mark.usefixtures("inline")
def test_every_order_of_a_collection_of_cold_packs_is_safe() -> None:
    """In all states of a collection of cold packs and a removal none is without its table."""
    problem, states = collected_cold(50_000)
    assert problem == ""
    assert 100 < states < 50_000


@pytest.mark.usefixtures("inline")
def test_every_order_of_a_late_copy_and_a_collection_is_safe() -> None:
    """In all states of a collection while the copy of a killed mover arrives no pack is back after its deletion."""
    problem, states = late_copy(50_000)
    assert problem == ""
    assert 50 < states < 50_000


def not_in_the_log(patch: pytest.MonkeyPatch) -> None:
    """A mover does not say which packs move."""
    patch.setattr(WriterLog, "move", lambda self, packs, *, checked: True)


def moves_not_spared(patch: pytest.MonkeyPatch) -> None:
    """A collector does not spare what moves."""
    patch.setattr(LogReader, "moving", lambda self: frozenset())


def condemned_moves(patch: pytest.MonkeyPatch) -> None:
    """A mover takes no notice of what a round condemns."""
    patch.setattr(
        Rounds, "condemned", property(lambda self: frozenset(), lambda self, value: None), raising=False
    )


def table_last(patch: pytest.MonkeyPatch) -> None:
    """A mover copies the table after the pack has become cold."""

    def move(self: ModelMover, ref: PackRef, storage_class: str) -> str:
        objects, classes = self._objects, self._classes
        copy = RemotePackReader(self._sealer, ref).copy_of_table(objects)
        classes.change(pack_name(ref), storage_class)
        objects.put(table_name(ref), [copy])
        return ""

    patch.setattr(ModelMover, "_move", move)


def table_deleted_first(patch: pytest.MonkeyPatch) -> None:
    """A collector deletes the copy of a table before the pack."""
    real = collection_round.delete_condemned

    def delete(objects: Objects, content: StoredRound) -> None:
        objects.delete([table_name(PackRef(ref)) for ref in content.condemned])
        real(objects, content)

    patch.setattr(collection_round, "delete_condemned", delete)


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize(
    ("mutate", "search"),
    [
        (not_in_the_log, partial(moved, 60_000, DUPLICATES)),
        (condemned_moves, partial(moved, 60_000, DUPLICATES)),
        (moves_not_spared, partial(late_copy, 50_000)),
        (table_last, partial(moved, 60_000, DUPLICATES)),
        (table_deleted_first, partial(collected_cold, 50_000)),
    ],
)
def test_search_finds_a_wrong_move(
    monkeypatch: pytest.MonkeyPatch,
    mutate: Callable[[pytest.MonkeyPatch], None],
    search: Callable[[], tuple[str, int]],
) -> None:
    """A search finds a pack that is back, or cannot be read by a new index, for each mutation of the protocol of moves."""
    mutate(monkeypatch)
    problem, _ = search()
    assert "is back after its deletion" in problem or "no copy of its table" in problem


DECIDED = round_name(0, "final")


# Beside the chunk that is live, each pack has one that is needed again only by the snapshot that begins.
BOTH_PACKS = {OLD_PACK: (WANTED, chunk(2)), SECOND_PACK: (WANTED, chunk(3))}


def undecided_round() -> tuple[Contents, str]:
    """Return a bucket in a round that condemned both packs of a live chunk, and decided to delete the second."""
    contents, manifest = first_bucket()
    bucket = Bucket()
    bucket.objects = {name: (data, 0) for name, data in contents}
    seals = sealer(Ids("the round"))
    for ref, chunks in BOTH_PACKS.items():
        store_pack(bucket, seals, ref, map(record, chunks))
    create_round(bucket, seals, 0, "begun", StoredRound(nonce="aa" * 16, condemned=(OLD_PACK, SECOND_PACK)))
    for writer in {position.writer for name, _ in contents if (position := parse_log_entry(name))}:
        create_entry(bucket, seals, writer, 2, LogFence(nonce="ab" * 16, round=0))
    create_round(bucket, seals, 0, "final", StoredRound(nonce="bb" * 16, condemned=(SECOND_PACK,)))
    return frozenset((name, data) for name, (data, _) in bucket.objects.items()), manifest


def late_collector(objects: Objects, say: Callable[[Any], None]) -> None:
    """Go on with a round as a collector that was paused after it had decided."""
    objects.delete([pack_name(SECOND_PACK)])
    create_round(objects, sealer(Ids("late")), 0, "done", StoredRound(nonce="cc" * 16))


def replace_round(objects: Objects, ids: Ids) -> None:
    mend_rounds(objects, sealer(ids), ids.hex)
    index = RemoteIndex.open(None, threads=1)
    try:
        retry(make_collector(objects, ids, MemoryState(), index, max_entries=1000).mend)
    finally:
        index.close()


def first_repair(objects: Objects, say: Callable[[Any], None]) -> None:
    """Damage the decision of the round, and repair it."""
    objects.put(DECIDED, [b"junk"])
    replace_round(objects, Ids("first repair"))


def later_repair(objects: Objects, say: Callable[[Any], None]) -> None:
    """Repair the round as another host."""
    replace_round(objects, Ids("later repair"))


def replaced_round(max_states: int, *parties: Party) -> tuple[str, int]:
    """Search with a round whose decision is damaged and replaced beside these, and what it names deleted at any time."""
    contents, manifest = undecided_round()

    return search_all(
        contents,
        [*map(refusing, [first_repair, *parties])],
        max_states,
        stolen=[DECIDED],
        kept={manifest},
        owner=-1 if later_repair in parties else 0,
        kept_names=["manifests/"],
        quiet=["tables/"],
        doomed=[pack_name(SECOND_PACK)],
    )


def knowing_writer(objects: Objects, say: Callable[[Any], None]) -> None:
    """Commit, with an index of both packs."""
    index = RemoteIndex.open(None, threads=1)
    for ref, chunks in BOTH_PACKS.items():
        index.add(ref, 0, [record(some)[0] for some in chunks])
    index.mark_complete(-1)
    try:
        uploader = Uploader(objects, Ids("knowing writer"), MemoryState(), index, list_packs=False)
        retry(uploader.begin)
        say(retry(lambda: uploader.upload({chunk(2): None, chunk(3): None}, "cs-abcdef")))
    finally:
        index.close()


def new_writer(objects: Objects, say: Callable[[Any], None]) -> None:
    """Commit by what a listing shows, as a host without an index."""
    index = RemoteIndex.open(None, threads=1)
    try:
        uploader = Uploader(objects, Ids("new writer"), MemoryState(), index)
        retry(uploader.begin)
        say(retry(lambda: uploader.upload({chunk(2): None, chunk(3): None}, "cs-abcdef")))
    finally:
        index.close()


@pytest.mark.slow
def test_every_order_with_a_replaced_round_is_safe() -> None:
    """In all states of a commit while a round without a readable decision is replaced, snapshots keep their chunks."""
    problem, states = replaced_round(100_000, knowing_writer)
    assert problem == ""
    assert 1_000 < states < 100_000


@pytest.mark.parametrize(
    "party",
    [new_writer, late_collector, later_repair, collector(0, OLD_PACK, SECOND_PACK)],
    ids=["new writer", "late collector", "later repair", "collector"],
)
def test_replacing_a_round_beside_others_is_safe(
    party: Party,
) -> None:
    """So are the first 10,000 beside a host without an index, a collector that knows the decision or not, and another repair."""
    problem, states = replaced_round(10_000, party)
    assert problem == ""
    assert states > 500


def test_a_replaced_round_is_ended() -> None:
    """After a repair both rounds can be read, and everything that the first began with is gone; with its end damaged, too."""
    for damaged_end in (False, True):
        contents, _ = undecided_round()
        bucket = Bucket()
        bucket.objects = {name: (data, 0) for name, data in contents}
        if damaged_end:
            bucket.put(round_name(0, "done"), [b"junk"])
        first_repair(bucket, lambda said: None)
        rounds = Rounds(bucket, sealer(Ids("a reader")))
        rounds.refresh()
        assert (rounds.finished, rounds.unfinished, rounds.damaged) == (1, None, {})
        assert rounds.deleted == {OLD_PACK, SECOND_PACK}
        assert not {pack_name(OLD_PACK), pack_name(SECOND_PACK)} & bucket.objects.keys()
        assert not BucketJudge(bucket).problem()


class DyingBucket(Bucket):
    """Bucket whose client is killed before a request."""

    def __init__(self, contents: Contents, requests: int) -> None:
        super().__init__()
        self.objects = {name: (data, 0) for name, data in contents}
        self.left = requests

    def __getattribute__(self, name: str) -> Any:
        if name in ("put", "create", "delete", "get_ranges", "tail", "info", "list"):
            self.left -= 1
            if self.left < 0:
                raise Killed(name)
        return super().__getattribute__(name)


def test_an_interrupted_replacement_is_ended_by_the_next() -> None:
    """Killed before any request, a repair is ended by the next one, or by a collection once its round has begun."""
    contents, _ = undecided_round()
    for end in (later_repair, collector(0)):
        for requests in range(1, 200):
            bucket = DyingBucket(contents, requests)
            try:
                first_repair(bucket, lambda said: None)
            except Killed:
                bucket.left = 1_000
            else:
                break
            if end is not later_repair and round_name(1) not in bucket.objects:
                continue
            end(bucket, lambda said: None)
            rounds = Rounds(bucket, sealer(Ids("a reader")))
            rounds.refresh()
            assert (rounds.unfinished, rounds.damaged) == (None, {}), requests
            assert round_name(0, "done") in bucket.objects
            bucket.delete([pack_name(SECOND_PACK)])
            assert not BucketJudge(bucket).problem()
        assert 40 < requests < 200


def decides_nothing(patch: pytest.MonkeyPatch) -> None:
    """A repair says that the round deleted nothing."""
    patch.setattr(
        Collector, "_decide_all", lambda self, round_, content: StoredRound(nonce="dd" * 16, whole=True)
    )


def decides_as_usual(patch: pytest.MonkeyPatch) -> None:
    """A repair keeps one of the packs that have a needed chunk, which the unreadable decision may name."""
    patch.setattr(
        Collector,
        "_decide_all",
        lambda self, round_, content: msgspec.structs.replace(self._decide(content), whole=True),
    )


def copies_nothing(patch: pytest.MonkeyPatch) -> None:
    """A repair deletes all that the round began with."""
    patch.setattr(Collector, "_decide_all", lambda self, round_, content: content)


def no_beginning(patch: pytest.MonkeyPatch) -> None:
    """What a round began with counts as stored while its decision cannot be read."""
    real = Rounds._beginning

    def beginning(self: Rounds, round_: int, error: DamagedRemote) -> StoredRound:
        return msgspec.structs.replace(real(self, round_, error), condemned=())

    patch.setattr(Rounds, "_beginning", beginning)


@pytest.mark.parametrize(
    "mutate", [decides_nothing, decides_as_usual, copies_nothing, no_fence, no_beginning]
)
def test_search_finds_a_wrong_replacement(
    monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """A search finds a lost chunk where a round is replaced by one that covers less, or that nobody hears of."""
    mutate(monkeypatch)
    problem, _ = replaced_round(20_000, knowing_writer)
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
    max_examples=by_depth(10, 100),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestStormMachine = StormMachine.TestCase
