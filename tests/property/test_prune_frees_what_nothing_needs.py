"""Tests that prune frees what no snapshot needs, nothing else, and stops where it cannot be sure."""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_repository import noise
from support.stored import IDENTITIES, Tree, flip_stored, read_back, store

from ciuic.errors import Busy, CiuicError, NotFound
from ciuic.maintenance import prune as gc
from ciuic.maintenance.check import check
from ciuic.maintenance.prune import CollectionRefused, forget, prune
from ciuic.maintenance.sweep import HURRIED, Thresholds
from ciuic.repository import Identity, Repository, Writer
from ciuic.repository.chunk_reader import ChunkReader
from ciuic.retention import MinFree, RetentionPolicy
from ciuic.types import ChunkId, SnapshotId

BLOCK = 4096
EAGER = Thresholds(unused_share=0.0, pack_dead_share=0.0)
LAST = RetentionPolicy(keep_within_seconds=0, keep_last=1)
NONE_BY_TIME = RetentionPolicy(keep_within_seconds=0, keep_last=0)
PACK = 32 * BLOCK
"""Small packs, so that there are many of them."""


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    """Make an empty repository."""
    with Repository.create(tmp_path / "repo", block_size=BLOCK) as made:
        yield made


def commit(repository: Repository, *trees: Tree) -> list[SnapshotId]:
    """Commit one snapshot of each content, each with a new writer, as captures do."""
    ids = []
    for number, tree in enumerate(trees, start=len(repository.snapshots.ids())):
        with repository.writer(pack_bytes=PACK) as writer:
            ids.append(store(writer, tree, number=number).id)
    return ids


def policy(keep: int) -> RetentionPolicy:
    return RetentionPolicy(keep_within_seconds=0, keep_last=keep)


contents = st.builds(noise, st.integers(0, 12), st.sampled_from([0, 1, 100, BLOCK, BLOCK + 1, 5 * BLOCK]))
names = st.sampled_from([b"a", b"b", b"c", b"d", b"\xff"])
trees = st.recursive(
    st.dictionaries(names, contents, max_size=4),
    lambda t: st.dictionaries(names, contents | t, max_size=4),
    max_leaves=6,
)


@pytest.mark.parametrize("identity", IDENTITIES)
@settings(max_examples=20)
@given(history=st.lists(trees, min_size=1, max_size=6), keep=st.integers(1, 4), data=st.data())
def test_kept_snapshots_read_back_exactly(
    tmp_path_factory: pytest.TempPathFactory,
    history: list[dict[bytes, Any]],
    keep: int,
    data: st.DataObject,
    identity: Identity | None,
) -> None:
    """Each kept snapshot reads back as stored after prune, and a second prune finds nothing to do.

    This holds for any history, policy and set of held snapshots; the others are gone.
    """
    path = tmp_path_factory.mktemp("gc") / "repo"
    with Repository.create(path, block_size=BLOCK, identity=identity) as repository:
        ids = commit(repository, *history)
        held = data.draw(st.sets(st.sampled_from(ids)))
        with repository.writer() as writer:
            for id_ in held:
                writer.set_marks(id_, hold=True)
        expected = {id_ for id_ in ids if id_ in held} | set(ids[-keep:])

        foreseen = prune(repository, policy(keep), thresholds=EAGER, dry_run=True)
        assert set(repository.snapshots.ids()) == set(ids)
        report = prune(repository, policy(keep), thresholds=EAGER)

        assert set(report.removed) == set(foreseen.removed) == set(ids) - expected
        assert set(repository.snapshots.ids()) == expected
        by_id = dict(zip(ids, history, strict=True))
        for id_ in expected:
            assert read_back(repository, id_) == by_id[id_]
        again = prune(repository, policy(keep))
        assert (again.removed, again.dropped_packs) == ([], 0)
    with Repository.open(path) as reopened:
        assert all(read_back(reopened, id_) == by_id[id_] for id_ in expected)
        assert reopened.check_index() == []


def test_the_space_comes_back(repository: Repository) -> None:
    """Chunks needed by removed snapshots alone are freed; shared ones stay and are stored once."""
    shared, own = noise(1, 200 * BLOCK), noise(2, 400 * BLOCK)
    ids = commit(repository, {b"shared": shared, b"own": own}, {b"shared": shared})
    before = repository.stored_bytes()
    report = prune(repository, LAST)
    after = repository.stored_bytes()
    assert report.removed == ids[:1]
    assert before - after == report.freed_bytes
    assert after < len(shared) * 1.2
    assert read_back(repository, ids[1]) == {b"shared": shared}


def test_marking_reads_each_distinct_node_once(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marking reads each distinct node once, not snapshots times directories.

    The test has twenty snapshots of the same thirty directories, of which one changes each time.
    """
    folders = {b"d%d" % n: {b"f": noise(n, BLOCK)} for n in range(30)}
    commit(repository, *({**folders, b"d%d" % n: {b"f": noise(100 + n, BLOCK)}} for n in range(20)))
    read: list[bytes] = []
    get = ChunkReader.get

    def counted(reader: ChunkReader, chunk: ChunkId) -> bytes:
        read.append(chunk)
        return get(reader, chunk)

    monkeypatch.setattr(ChunkReader, "get", counted)
    report = prune(repository)
    assert report.removed == []
    assert len(read) == len(set(read))
    assert len(read) < 20 * 31 // 4


def test_never_more_than_a_pack_is_stored_twice(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copying never needs more extra space than one pack: the old one is deleted before the next copy."""
    commit(
        repository,
        *({b"own": noise(n, 60 * BLOCK), b"keep": noise(50 + n // 3, 20 * BLOCK)} for n in range(9)),
    )
    before, most = repository.stored_bytes(), [0]
    rewrite = Writer.rewrite_pack

    def watched(writer: Writer, *arguments: Any, **more: Any) -> int:
        freed = rewrite(writer, *arguments, **more)
        most[0] = max(most[0], writer.repository.stored_bytes())
        return freed

    monkeypatch.setattr(Writer, "rewrite_pack", watched)
    report = prune(repository, LAST, thresholds=Thresholds(unused_share=0.0, pack_dead_share=0.0))
    assert report.rewritten_packs
    assert most[0] <= before


def test_prune_without_garbage_touches_no_pack(repository: Repository) -> None:
    """A prune without garbage touches no pack."""
    commit(repository, {b"a": noise(1, 50 * BLOCK)}, {b"a": noise(1, 50 * BLOCK), b"b": noise(2, 50 * BLOCK)})
    packs = repository.packs()
    report = prune(repository, policy(5))
    assert (report.removed, report.dropped_packs, report.rewritten_packs, report.freed_bytes) == ([], 0, 0, 0)
    assert repository.packs() == packs


def test_without_a_policy_no_snapshot_goes(repository: Repository) -> None:
    """A prune without a policy removes no snapshot, and frees what forget left."""
    ids = commit(repository, {b"a": noise(1, 300 * BLOCK)}, {b"b": noise(2, 10 * BLOCK)})
    forget(repository, ids[:1])
    report = prune(repository)
    assert report.removed == []
    assert report.freed_bytes > 250 * BLOCK
    assert repository.snapshots.ids() == ids[1:]


def test_an_unreadable_snapshot_stops_everything(repository: Repository) -> None:
    """Prune deletes nothing with one damaged snapshot file; the message names it, and forgetting it helps."""
    ids = commit(repository, *({b"a": noise(n, 40 * BLOCK)} for n in range(4)))
    (path,) = [
        p for p in Path(repository.path).rglob(f"*{ids[1]}*") if p.is_file() and "snapshots" in p.parts
    ]
    path.write_bytes(path.read_bytes()[:-7] + b"garbage")
    packs = repository.packs()
    with pytest.raises(CollectionRefused, match=str(ids[1])) as caught:
        prune(repository, LAST)
    assert ids[1] in caught.value.hint
    assert caught.value.exit_code == 4
    assert repository.packs() == packs
    assert {ids[0], ids[2], ids[3]} <= set(repository.snapshots.ids())

    forget(repository, [ids[1]])
    prune(repository, LAST)
    assert repository.snapshots.ids() == [ids[3]]
    assert read_back(repository, ids[3]) == {b"a": noise(3, 40 * BLOCK)}


def test_an_unreadable_tree_stops_everything(repository: Repository) -> None:
    """A kept snapshot with an unreadable tree might need anything, so nothing at all is deleted."""
    ids = commit(repository, *({b"d": {b"x": noise(n, 40 * BLOCK)}} for n in range(3)))
    flip_stored(repository, ChunkId(repository.snapshots.load(ids[2]).roots[0].entry.content))
    with Repository.open(repository.path) as fresh:
        sizes = {pack.number: pack.size_bytes for pack in fresh.packs()}
        with pytest.raises(CollectionRefused, match=str(ids[2])):
            prune(fresh, LAST)
        assert set(fresh.snapshots.ids()) == set(ids)
        assert sizes == {pack.number: pack.size_bytes for pack in fresh.packs()}
        assert read_back(fresh, ids[0]) == {b"d": {b"x": noise(0, 40 * BLOCK)}}


def test_packs_without_any_snapshot_are_left_alone(repository: Repository) -> None:
    """A repository that has lost its snapshots directory keeps its packs."""
    (id_,) = commit(repository, {b"a": noise(1, 40 * BLOCK)})
    for path in Path(repository.path).rglob(f"*{id_}*"):
        path.unlink()
    with Repository.open(repository.path) as fresh:
        with pytest.raises(CollectionRefused, match="no record that none is missing"):
            prune(fresh, LAST)
        assert fresh.stored_bytes() > 40 * BLOCK


def test_packs_of_a_first_snapshot_that_failed_are_freed(repository: Repository) -> None:
    """Packs of a failed first snapshot are freed, also after the index was rebuilt.

    No snapshot was ever made, so none is missing, and what the attempt left is garbage.
    """
    with repository.writer() as writer:
        writer.put_chunk(noise(1, 40 * BLOCK))
    with repository.writer() as writer:
        writer.rebuild_index()
    assert repository.stored_bytes() > 40 * BLOCK
    (finding,) = check(repository).findings
    assert "ciuic prune" in finding.hint
    assert prune(repository, LAST).freed_bytes > 40 * BLOCK
    assert repository.stored_bytes() == 0


def test_packs_of_forgotten_snapshots_are_freed(repository: Repository) -> None:
    """Packs are freed after the last snapshot was forgotten; snapshots that come later are missed again."""
    ids = commit(repository, {b"a": noise(1, 40 * BLOCK)}, {b"a": noise(2, 40 * BLOCK)})
    forget(repository, ids[:1])
    forget(repository, ids[1:])
    assert prune(repository, LAST).freed_bytes > 80 * BLOCK
    (id_,) = commit(repository, {b"a": noise(3, 40 * BLOCK)})
    Path(repository.snapshots.path(id_)).unlink()
    with pytest.raises(CollectionRefused):
        prune(repository, LAST)


def test_check_recommends_no_prune_that_would_refuse(repository: Repository) -> None:
    """Check does not hint at a prune that would refuse, for packs whose snapshots are lost."""
    (id_,) = commit(repository, {b"a": noise(1, 40 * BLOCK)})
    Path(repository.snapshots.path(id_)).unlink()
    with Repository.open(repository.path) as fresh:
        (hint,) = [found.hint for found in check(fresh).findings if found.kind == "orphaned pack"]
    assert "snapshots/" in hint


def test_prune_of_an_empty_repository_does_nothing(repository: Repository) -> None:
    """Prune before the first snapshot does nothing and reports nothing."""
    report = prune(repository, LAST)
    assert (report.removed, report.freed_bytes, report.notes) == ([], 0, [])


def test_a_snapshot_committed_while_marking_stays(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture that reuses garbage and commits between unlocked marking and the lock loses nothing."""
    old = {b"a": noise(1, 60 * BLOCK)}
    ids = commit(repository, old, {b"b": noise(2, 3 * BLOCK)})
    mark_ahead = gc._Run.mark_ahead

    def mark_then_commit(run: gc._Run, wanted: list[SnapshotId]) -> None:
        mark_ahead(run, wanted)
        with Repository.open(repository.path) as other, other.writer() as writer:
            store(writer, {b"again": noise(1, 60 * BLOCK)}, number=77)

    monkeypatch.setattr(gc._Run, "mark_ahead", mark_then_commit)
    prune(repository, LAST, thresholds=EAGER)
    new = SnapshotId("cs-00004d")
    assert new in repository.snapshots.ids()
    assert read_back(repository, new) == {b"again": noise(1, 60 * BLOCK)}
    assert ids[0] not in repository.snapshots.ids()


def test_a_failed_early_marking_is_thrown_away(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marks of a walk that did not finish are not used, as they would hide what lies below."""
    tree = {b"d": {b"e": {b"x": noise(1, 60 * BLOCK), b"y": noise(2, 60 * BLOCK)}}}
    ids = commit(repository, {b"old": noise(3, 60 * BLOCK)}, tree)
    mark = gc.LiveChunks.mark
    failures = iter([True])

    def fail_half_way(marks: gc.LiveChunks, id_: SnapshotId, *rest: Any, **named: Any) -> int:
        if next(failures, False):
            marks.nodes.add(repository.snapshots.load(id_).roots[0].entry.content)  # type: ignore[arg-type]
            raise NotFound("gone meanwhile")
        return mark(marks, id_, *rest, **named)

    monkeypatch.setattr(gc.LiveChunks, "mark", fail_half_way)
    prune(repository, LAST, thresholds=EAGER)
    assert read_back(repository, ids[1]) == tree


@pytest.mark.parametrize("asked_before", [0, 1, 2, 3, 4, 6, 9, 14])
def test_stopped_at_any_time(repository: Repository, asked_before: int) -> None:
    """Prune stopped after any number of steps leaves kept snapshots whole, and the next run does the rest."""
    ids = commit(repository, *({b"a": noise(n, 60 * BLOCK), b"b": noise(99, 30 * BLOCK)} for n in range(5)))
    counter = itertools.count()
    report = prune(repository, LAST, thresholds=EAGER, should_stop=lambda: next(counter) >= asked_before)
    assert report.stopped == (next(counter) > asked_before)
    last = {b"a": noise(4, 60 * BLOCK), b"b": noise(99, 30 * BLOCK)}
    assert read_back(repository, ids[4]) == last
    for id_ in repository.snapshots.ids():
        number = ids.index(id_)
        assert read_back(repository, id_) == {b"a": noise(number, 60 * BLOCK), b"b": noise(99, 30 * BLOCK)}
    prune(repository, LAST, thresholds=EAGER)
    assert repository.snapshots.ids() == [ids[4]]
    assert repository.stored_bytes() < 110 * BLOCK
    assert read_back(repository, ids[4]) == last


def test_prune_names_the_writer_that_holds_the_repository(repository: Repository) -> None:
    """Prune names the writer that holds the repository, and a dry run works all the same."""
    commit(repository, {b"a": noise(1, 10 * BLOCK)})
    with Repository.open(repository.path) as other, other.writer():
        with pytest.raises(Busy):
            prune(repository, LAST)
        assert prune(repository, LAST, dry_run=True).plan.kept


def test_forget_refuses_the_held(repository: Repository) -> None:
    """A held snapshot is not forgotten, nor is any other of the same request."""
    ids = commit(repository, {b"a": b"1"}, {b"a": b"2"})
    with repository.writer() as writer:
        writer.set_marks(ids[0], hold=True)
    with pytest.raises(CiuicError, match="held"):
        forget(repository, [ids[1], ids[0]])
    with pytest.raises(NotFound):
        forget(repository, [ids[1], SnapshotId("cs-ffffff")])
    assert set(repository.snapshots.ids()) == set(ids)


def test_the_floor_takes_the_oldest(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below min_free the oldest snapshots go, as many as needed, and never the newest, held or tagged."""
    ids = []
    for number in range(6):
        with repository.writer(pack_bytes=PACK) as writer:
            tags = ("good",) if number == 1 else ()
            tree = {b"own": noise(number, 100 * BLOCK), b"shared": noise(50, 20 * BLOCK)}
            ids.append(store(writer, tree, number=number, tags=tags).id)
    with repository.writer() as writer:
        writer.set_marks(ids[0], hold=True)
    capacity = repository.stored_bytes() + 10 * BLOCK
    monkeypatch.setattr(gc, "available_bytes", lambda path: capacity - repository.stored_bytes())
    rules = RetentionPolicy(keep_within_seconds=0, keep_last=100, keep_tags=("good",))

    report = prune(repository, rules, min_free=MinFree(size_bytes=150 * BLOCK))
    assert report.removed == report.removed_for_space == ids[2:4]
    assert capacity - repository.stored_bytes() >= 150 * BLOCK
    assert report.notes == []

    report = prune(repository, rules, min_free=MinFree(size_bytes=10_000 * BLOCK))
    assert report.removed == ids[4:5]
    assert "min_free" in report.notes[0]
    for number in (0, 1, 5):
        expected = {b"own": noise(number, 100 * BLOCK), b"shared": noise(50, 20 * BLOCK)}
        assert read_back(repository, ids[number]) == expected


def test_holds_of_ordinary_users_yield_to_the_floor_and_to_root(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below min_free, snapshots held only by ordinary users are removed after all that no rule keeps.

    The oldest of them goes first; a hold of the repository's owner stays, also on what a user held before.
    `forget` takes a user's hold, and refuses the owner's.
    """
    ids = []
    for number in range(7):
        with repository.writer(pack_bytes=PACK) as writer:
            ids.append(store(writer, {b"own": noise(number, 100 * BLOCK)}, number=number).id)
    with repository.writer() as writer:
        for number in (0, 1, 2, 5):
            writer.set_marks(ids[number], hold=True, reason="a user's", hold_uid=4321)
        writer.set_marks(ids[0], hold=True)
        # The user's request leaves the owner's hold as it is.
        writer.set_marks(ids[1], tags=("looked at",))
    assert [repository.snapshots.load(id_).hold_uid for id_ in ids] == [
        None,
        4321,
        4321,
        None,
        None,
        4321,
        None,
    ]
    # The policy keeps snapshots 3 to 6.
    rules = RetentionPolicy(keep_within_seconds=0, keep_last=4)

    assert prune(repository, rules).removed == []
    capacity = repository.stored_bytes() + 10 * BLOCK
    monkeypatch.setattr(gc, "available_bytes", lambda path: capacity - repository.stored_bytes())
    report = prune(repository, rules, min_free=MinFree(size_bytes=150 * BLOCK))
    assert report.removed == report.removed_for_space == ids[1:3]
    assert [note for note in report.notes if "user 4321" in note] == report.notes != []
    report = prune(repository, rules, min_free=MinFree(size_bytes=10_000 * BLOCK))
    assert report.removed == ids[3:6]

    with pytest.raises(CiuicError, match="is held"):
        forget(repository, [ids[0]])
    with repository.writer() as writer:
        writer.set_marks(ids[6], hold=True, hold_uid=4321)
    forget(repository, [ids[6]])


def test_a_full_disk_drops_and_does_not_copy(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots and dead packs are removed without room for copies, and what was not done is reported."""
    from ciuic.maintenance import sweep

    mixed = {b"keep": noise(1, 50 * BLOCK), b"lose": noise(2, 200 * BLOCK)}
    ids = commit(repository, mixed, {b"keep": noise(1, 50 * BLOCK), b"dead": noise(3, 300 * BLOCK)})
    ids += commit(repository, {b"keep": noise(1, 50 * BLOCK)})
    monkeypatch.setattr(sweep, "available_bytes", lambda path: 0)
    monkeypatch.setattr(sweep, "writable_bytes", lambda path: 0)
    report = prune(repository, LAST)
    assert report.removed == ids[:2]
    assert report.rewritten_packs == 0
    assert report.freed_bytes > 250 * BLOCK
    assert any("no room" in note for note in report.notes)
    assert read_back(repository, ids[2]) == {b"keep": noise(1, 50 * BLOCK)}


def test_the_defaults_are_milder_than_a_hurry() -> None:
    """A prune in a hurry rewrites at least as many packs as one with the defaults."""
    assert HURRIED.unused_share <= Thresholds().unused_share
    assert HURRIED.pack_dead_share <= Thresholds().pack_dead_share


def test_dry_run_changes_no_byte(repository: Repository) -> None:
    """A dry run leaves every file of the repository unchanged, and predicts what prune then does."""
    commit(repository, *({b"a": noise(n, 100 * BLOCK)} for n in range(4)))

    def files() -> dict[str, bytes]:
        found = {}
        for directory, _, names_ in os.walk(repository.path):
            for name in names_:
                if not name.startswith("index.sqlite"):
                    path = os.path.join(directory, name)
                    found[path] = Path(path).read_bytes()
        return found

    before = files()
    foreseen = prune(repository, LAST, dry_run=True)
    assert files() == before
    done = prune(repository, LAST)
    assert (foreseen.removed, foreseen.dropped_packs) == (done.removed, done.dropped_packs)
    assert foreseen.freed_bytes == pytest.approx(done.freed_bytes, rel=0.1)


def test_wrong_catalogue_deletes_nothing(repository: Repository) -> None:
    """A catalogue with wrong times and holds changes nothing: the snapshot files decide what is removed."""
    ids = commit(repository, *({b"a": noise(n, 9 * BLOCK)} for n in range(4)))
    with repository.writer() as writer:
        writer.set_marks(ids[0], hold=True)
    with contextlib.closing(sqlite3.connect(Path(repository.path) / "index.sqlite")) as index, index:
        index.execute("UPDATE snapshots SET time_ns = 10000000000 - time_ns, held = 0")
    assert prune(repository, LAST).removed == [ids[1], ids[2]]
    assert set(repository.snapshots.ids()) == {ids[0], ids[3]}
