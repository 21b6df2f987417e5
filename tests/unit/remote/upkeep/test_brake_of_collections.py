"""Brake of collections: what somebody with a host's key gives up at once stays until a person approves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from support.remote_host import RemoteHost, new_remote, reading
from support.restoring import write

from ciuic.errors import Damaged, NotFound
from ciuic.maintenance.verify import verify_snapshots
from ciuic.remote.access import Remote
from ciuic.remote.documents import (
    LiveManifest,
    LogFence,
    LogRemove,
    LogState,
    StoredRound,
    create_round,
    decode_manifest,
    encode_manifest,
    read_entry,
)
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.log_reader import LogReader
from ciuic.remote.object_names import (
    MANIFESTS_PREFIX,
    PACKS_PREFIX,
    RoundPart,
    log_entry_name,
    manifest_name,
    new_hex_id,
    parse_pack,
    round_name,
)
from ciuic.remote.objects.memory_objects import MemoryObjects, forget_bucket
from ciuic.remote.objects.model import ObjectInfo, Objects
from ciuic.remote.sealing.sealer import Sealer
from ciuic.remote.upkeep import collection_round
from ciuic.remote.upkeep.brake import Brake
from ciuic.remote.upkeep.check import mend_rounds
from ciuic.remote.upkeep.collect import (
    CollectedSpace,
    collect_remote,
    give_up_snapshots,
    preview_collection,
    resolve_snapshots,
)
from ciuic.remote.upkeep.collection_round import CollectionPolicy
from ciuic.remote.writer_log import append_to_log
from ciuic.types import SnapshotId, order_of

AT_ONCE = CollectionPolicy(young_ns=0, repack_share=0.6)


HOUR_NS = 3600 * 10**9


class AgedObjects(MemoryObjects):
    """Objects in memory whose store says that some were stored earlier."""

    def __init__(self, bucket: str) -> None:
        super().__init__(bucket)
        self.aged_ns: dict[str, int] = {}

    def info(self, name: str) -> ObjectInfo | None:
        found = super().info(name)
        return found and self._aged(found)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        return map(self._aged, super().list(prefix, after=after))

    def _aged(self, info: ObjectInfo) -> ObjectInfo:
        return info._replace(modified_ns=info.modified_ns - self.aged_ns.get(info.name, 0))


@pytest.fixture
def objects() -> Iterator[AgedObjects]:
    name = f"brake-{os.urandom(6).hex()}"
    yield AgedObjects(name)
    forget_bucket(name)


@pytest.fixture
def remote(objects: AgedObjects) -> Remote:
    return new_remote(objects)


def uploaded(place: Path, remote: Remote, count: int) -> RemoteHost:
    """Upload so many snapshots of a new host."""
    host = RemoteHost(place, remote, name=place.name)
    for number in range(count):
        write(host.root / f"{number}", os.urandom(20_000))
        host.snapshot()
        host.upload()
    return host


def attack(remote: Remote, *spared: str, by_sum: bool = False) -> None:
    """Give up all snapshots but those, by entries that anybody with a host's key can append to any log."""
    logs = LogReader(remote.objects, remote.sealer)
    logs.refresh()
    for writer, summary in logs.logs.items():
        given_up = tuple(name for name, one in summary.committed.items() if one.snapshot not in spared)
        left = tuple(one for one in summary.committed.values() if one.snapshot in spared)
        entry = (
            LogState(nonce=new_hex_id(), live=left, removed=())
            if by_sum
            else LogRemove(nonce=new_hex_id(), manifests=given_up)
        )
        assert append_to_log(remote.objects, remote.sealer, writer, summary, entry)


def collect(remote: Remote, cache: Path, *approved: str) -> CollectedSpace:
    with reading(remote, cache) as opened:
        (space,) = collect_remote(opened, host="operator", policy=AT_ONCE, approved=approved)
    return space


def age(objects: AgedObjects, remote: Remote, host: RemoteHost, ages_ns: list[int]) -> None:
    """Let the store say that a host's snapshots, the oldest first, were stored so long ago."""
    logs = LogReader(remote.objects, remote.sealer)
    logs.refresh()
    names = {one.snapshot: name for name, one in logs.live().items()}
    objects.aged_ns |= {names[id_]: ns for id_, ns in zip(ids(host), ages_ns, strict=True)}


def ids(host: RemoteHost) -> list[str]:
    """Return the snapshots of a host, the newest last."""
    return [one.id for one in sorted(host.repository.snapshots.list(), key=order_of)]


def stored(remote: Remote, prefix: str = "") -> set[str]:
    return {info.name for info in remote.objects.list(prefix)}


def test_what_is_given_up_at_once_stays_until_a_person_approves(remote: Remote, tmp_path: Path) -> None:
    """A collection on a new machine deletes none of it, says so each time, and deletes it when told to; other hosts' are collected as ever."""
    host = uploaded(tmp_path / "h1", remote, 4)
    other = uploaded(tmp_path / "h2", remote, 4)
    newest = ids(other)[-1]
    packs = stored(remote, PACKS_PREFIX)
    attack(remote, newest)
    for _ in range(2):
        space = collect(remote, tmp_path / "cache")
        assert [(one.repository, one.hosts, one.snapshots) for one in space.held] == [
            (host.repository.id, ("h1",), 4)
        ]
        assert not {name for name in space.manifests if "/h1-" in name}
    assert len(stored(remote, MANIFESTS_PREFIX)) == 5
    assert len(packs & stored(remote, PACKS_PREFIX)) >= len(packs) // 2
    with reading(remote, tmp_path / "cache") as opened:
        (said,) = preview_collection(opened, now_ns=2**62, policy=AT_ONCE, approved=["h1"])
    assert (len(said.manifests), said.held) == (4, ())
    space = collect(remote, tmp_path / "cache", host.repository.id)
    assert (len(space.manifests), space.held) == (4, ())
    assert len(stored(remote, MANIFESTS_PREFIX)) == 1
    with reading(remote, tmp_path / "other cache") as opened:
        assert opened.snapshots.ids() == [newest]
        assert verify_snapshots(opened.repositories[0], checksum=True).damages == []


def test_a_collector_that_saw_the_snapshots_notices_what_a_new_one_cannot(
    objects: AgedObjects, remote: Remote, tmp_path: Path
) -> None:
    """Where the newest is spared, what was live at an earlier collection says that the others were given up at once; they are held for good."""
    host = uploaded(tmp_path / "h1", remote, 8)
    age(objects, remote, host, [(2 << (7 - at)) * HOUR_NS for at in range(8)])
    assert not collect(remote, tmp_path / "cache").held
    attack(remote, ids(host)[-1])
    with reading(remote, tmp_path / "new cache") as opened:
        (said,) = preview_collection(opened, now_ns=time.time_ns(), policy=AT_ONCE)
    assert not said.held
    for _ in range(2):
        assert [one.snapshots for one in collect(remote, tmp_path / "cache").held] == [7]
    assert len(stored(remote, MANIFESTS_PREFIX)) == 8
    # What retention gives up later is collected meanwhile.
    write(host.root / "later", b"later")
    host.snapshot()
    host.upload()
    space = collect(remote, tmp_path / "cache", "h1")
    assert (len(space.manifests), space.held) == (7, ())


def manifests_of(repository: str, count: int) -> dict[str, LiveManifest]:
    names = [manifest_name(job="j", epoch=0, step=0, host="h", random=f"{at:032x}") for at in range(count)]
    return {name: LiveManifest(repository, SnapshotId(f"cs-{name[-8:]}"), name, "0" * 64) for name in names}


def test_snapshots_that_are_not_stored_take_no_place_in_the_memory(tmp_path: Path) -> None:
    """Repositories that a log names without a manifest in the store do not fill up what a collector remembers."""
    live = manifests_of("a" * 32, 1000)
    brake = Brake(tmp_path / "levels")
    brake.hold(
        2**60,
        {},
        {name: msgspec.structs.replace(one, repository=name[-32:]) for name, one in live.items()},
        {},
    )
    brake.note()
    assert (tmp_path / "levels").stat().st_size < 1000


def test_a_person_gives_up_beside_a_collection(tmp_path: Path) -> None:
    """What a person gives up while a collection runs is remembered beside what that holds, whichever is written last."""
    manifests = manifests_of("a" * 32, 8)
    times = dict.fromkeys(manifests, 2**60)
    forgotten, *others = manifests
    person, collection = Brake(tmp_path / "levels"), Brake(tmp_path / "levels")
    assert collection.hold(2**60, times, {}, manifests) == manifests
    person.give_up([forgotten])
    again = Brake(tmp_path / "levels")
    assert again.hold(2**60, times, {}, manifests).keys() == set(others)
    person.give_up(others[:1])
    again.note()
    assert Brake(tmp_path / "levels").hold(2**60, times, {}, manifests).keys() == set(others[1:])


def test_a_sum_that_leaves_commits_out_is_no_way_round(
    objects: AgedObjects, remote: Remote, tmp_path: Path
) -> None:
    """Snapshots that a planted sum of their log leaves out are held like those that an entry removes."""
    host = uploaded(tmp_path / "h1", remote, 4)
    age(objects, remote, host, [(50 - at) * HOUR_NS for at in range(4)])
    attack(remote, by_sum=True)
    # What nobody committed may be uploaded again only then: no log says that there was a snapshot.
    uploaded(tmp_path / "h2", remote, 1)
    assert [one.snapshots for one in collect(remote, tmp_path / "cache").held] == [4]
    assert len(stored(remote, MANIFESTS_PREFIX)) == 5


def test_what_a_person_gave_up_on_this_host_is_not_held(remote: Remote, tmp_path: Path) -> None:
    """`forget --remote` of everything, then a collection on the same host: it goes at once."""
    uploaded(tmp_path / "h1", remote, 4)
    with reading(remote, tmp_path / "cache") as opened:
        give_up_snapshots(opened, resolve_snapshots(opened, opened.snapshots.ids()), host="operator")
    space = collect(remote, tmp_path / "cache")
    assert (len(space.manifests), space.held) == (4, ())


@pytest.mark.parametrize("part", ["begun", "final"])
def test_a_forged_round_takes_nothing_that_is_needed_or_held(
    remote: Remote, tmp_path: Path, part: str
) -> None:
    """Whoever may create objects of rounds has no collector delete what is live or held: a beginning is decided anew, a decision refused."""
    host = uploaded(tmp_path / "h1", remote, 4)
    kept = uploaded(tmp_path / "h2", remote, 2)
    attack(remote, *ids(kept))
    before = stored(remote)
    everything = StoredRound(
        nonce=new_hex_id(),
        condemned=tuple(ref for name in sorted(before) if (ref := parse_pack(name))),
        manifests=tuple(sorted(name for name in before if name.startswith(MANIFESTS_PREFIX))),
    )
    create_round(remote.objects, remote.sealer, 0, "begun", everything)
    if part == "final":
        create_round(remote.objects, remote.sealer, 0, "final", everything)
        with pytest.raises(DamagedRemote, match="deletes what snapshots need"):
            collect(remote, tmp_path / "cache")
        assert before <= stored(remote)
        remote.objects.delete([round_name(0, "final")])
    (held,) = collect(remote, tmp_path / "cache").held
    assert (held.repository, held.snapshots) == (host.repository.id, 4)
    assert stored(remote, MANIFESTS_PREFIX) == set(everything.manifests)
    with reading(remote, tmp_path / "cache") as opened:
        assert len(opened.snapshots.ids()) == 2
        assert verify_snapshots(opened.repositories[0], checksum=True).damages == []


class Killed(BaseException):
    """Death of a collector."""


def killed_when_decided(
    monkeypatch: pytest.MonkeyPatch, collect: Callable[[], object], before: Callable[[], None] = lambda: None
) -> None:
    """Kill a collector when its decision stands; ``before`` is called before that."""

    def decide(
        objects: Objects, sealer: Sealer, round_: int, part: RoundPart, content: StoredRound
    ) -> StoredRound:
        if part != "final":
            return create_round(objects, sealer, round_, part, content)
        before()
        create_round(objects, sealer, round_, part, content)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(collection_round, "create_round", decide)
        with pytest.raises(Killed):
            collect()


def test_a_decision_is_carried_out_beside_a_manifest_that_came_after_it(
    objects: AgedObjects, remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that dies before it has committed what it relied on does not keep the round of a dead collector from being ended."""
    host = uploaded(tmp_path / "h1", remote, 2)
    with reading(remote, tmp_path / "cache") as opened:
        given_up = opened.snapshots.entries[SnapshotId(ids(host)[1])].live.manifest
        give_up_snapshots(opened, [SnapshotId(ids(host)[1])], host="operator")
    objects.aged_ns = dict.fromkeys(stored(remote), 48 * HOUR_NS)

    def store_manifest() -> None:
        late = manifest_name(job="j", epoch=0, step=0, host="h1", random=new_hex_id())
        content = decode_manifest(remote.sealer, given_up, objects.get(given_up))
        objects.put(late, [encode_manifest(remote.sealer, late, content)])

    def collect_old(cache: str) -> CollectedSpace:
        with reading(remote, tmp_path / cache) as opened:
            (space,) = collect_remote(opened, host="operator")
        return space

    killed_when_decided(monkeypatch, lambda: collect_old("cache"), store_manifest)
    space = collect_old("other cache")
    assert space.packs
    assert space.manifests == (given_up,)


def test_an_approved_decision_is_carried_out_when_it_is_approved_again(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a collector that died after its approved decision the next one says what to do, and does it."""
    host = uploaded(tmp_path / "h1", remote, 4)
    attack(remote)
    repository = host.repository.id
    killed_when_decided(monkeypatch, lambda: collect(remote, tmp_path / "cache", repository))
    with pytest.raises(DamagedRemote) as refused:
        collect(remote, tmp_path / "other cache")
    assert f"--approve {repository}" in refused.value.hint
    assert len(collect(remote, tmp_path / "other cache", repository).manifests) == 4


def test_an_approval_is_remembered_until_what_it_is_for_is_deleted(
    objects: AgedObjects, remote: Remote, tmp_path: Path
) -> None:
    """What was approved while it was too young to be deleted goes at a later collection, without another word."""
    host = uploaded(tmp_path / "h1", remote, 4)
    attack(remote)

    def collect_old(*approved: str) -> CollectedSpace:
        with reading(remote, tmp_path / "cache") as opened:
            (space,) = collect_remote(opened, host="operator", approved=approved)
        return space

    first = collect_old(host.repository.id)
    assert (first.manifests, first.held, first.approved) == ((), (), (host.repository.id,))
    objects.aged_ns = dict.fromkeys(stored(remote), 48 * HOUR_NS)
    later = collect_old()
    assert (len(later.manifests), later.held) == (4, ())


def test_an_approved_host_takes_no_snapshots_of_others_along(tmp_path: Path) -> None:
    """A manifest that somebody has stored under the name of an approved host lets nothing else of its repository go."""
    manifests = manifests_of("a" * 32, 8)
    planted = manifest_name(job="j", epoch=0, step=0, host="retired", random="f" * 32)
    forged = {planted: LiveManifest("a" * 32, SnapshotId("cs-ffffffff"), planted, "0" * 64)}
    times = dict.fromkeys([*manifests, planted], 2**60)
    brake = Brake(tmp_path / "levels", approved=["retired"])
    assert brake.hold(2**60, times, {}, manifests | forged) == manifests
    assert brake.met == {"retired"}


@pytest.mark.parametrize("round_", [0, 10**9])
def test_a_fence_that_stood_before_the_round_counts_for_nothing(
    remote: Remote, tmp_path: Path, round_: int
) -> None:
    """A planted fence does not keep a collector from putting its own into the log, which alone its writer is bound to see."""
    uploaded(tmp_path / "h1", remote, 2)
    logs = LogReader(remote.objects, remote.sealer)
    logs.refresh()
    for writer, summary in logs.logs.items():
        planted = LogFence(nonce=new_hex_id(), round=round_)
        assert append_to_log(remote.objects, remote.sealer, writer, summary, planted)
    logs.refresh()
    ends = {writer: summary.next for writer, summary in logs.logs.items()}
    with reading(remote, tmp_path / "cache") as opened:
        give_up_snapshots(opened, opened.snapshots.ids()[:1], host="operator")
    assert collect(remote, tmp_path / "cache").manifests
    for writer, end in ends.items():
        fences = [
            entry
            for number in range(end, end + 8)
            if remote.objects.info(log_entry_name(writer, number)) is not None
            and isinstance(entry := read_entry(remote.objects, remote.sealer, writer, number), LogFence)
        ]
        assert fences[0].round == 0


@pytest.mark.parametrize("done", [b"junk", None])
def test_a_repair_carries_out_no_decision(remote: Remote, tmp_path: Path, done: bytes | None) -> None:
    """A planted round whose end cannot be read makes `check --repair` delete nothing that is needed, and collections refuse it."""
    uploaded(tmp_path / "h1", remote, 3)
    before = stored(remote)
    everything = StoredRound(
        nonce=new_hex_id(), condemned=tuple(ref for name in sorted(before) if (ref := parse_pack(name)))
    )
    create_round(remote.objects, remote.sealer, 0, "begun", everything)
    create_round(remote.objects, remote.sealer, 0, "final", everything)
    if done is not None:
        remote.objects.put(round_name(0, "done"), [done])
    mend_rounds(remote.objects, remote.sealer)
    assert before <= stored(remote)
    with pytest.raises(DamagedRemote, match="deletes what snapshots need"):
        collect(remote, tmp_path / "cache")
    assert before <= stored(remote)


def test_an_unreadable_memory_stops_collections(remote: Remote, tmp_path: Path) -> None:
    """What is held is not known without it: nothing is deleted until a person has looked."""
    uploaded(tmp_path / "h1", remote, 4)
    attack(remote)
    assert collect(remote, tmp_path / "cache").held
    (levels,) = (tmp_path / "cache").rglob("levels")
    levels.write_bytes(b"junk")
    before = stored(remote)
    with pytest.raises(Damaged, match="what collections of this host hold"):
        collect(remote, tmp_path / "cache")
    assert stored(remote) == before


def test_a_held_snapshot_that_cannot_be_read_stops_collections(remote: Remote, tmp_path: Path) -> None:
    """What belongs to it is not deleted because a part of it is damaged; an approval lets it go."""
    host = uploaded(tmp_path / "h1", remote, 4)
    damaged = stored(remote, f"{PACKS_PREFIX}meta/")
    attack(remote, *ids(uploaded(tmp_path / "h2", remote, 1)))
    for name in damaged:
        remote.objects.put(name, [b"junk"])
    before = stored(remote)
    with pytest.raises((Damaged, NotFound)):
        collect(remote, tmp_path / "cache")
    assert before <= stored(remote)
    assert collect(remote, tmp_path / "cache", host.repository.id).manifests
