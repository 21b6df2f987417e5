"""Tests of the index of a remote and its file of packs: what may be relied on, and how it follows the bucket."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.remote_world import Bucket, Ids, chunk, record, sealer, store_pack

from ciuic.remote.documents import StoredRound, create_round
from ciuic.remote.log_reader import Rounds
from ciuic.remote.object_names import PackRef, pack_name
from ciuic.remote.remote_index import RemoteIndex, RemotePack
from ciuic.remote.stored_facts import add_known_pack, read_known_packs, write_known_packs
from ciuic.repository.chunk_reader import MAX_READ_BASE_DEPTH
from ciuic.types import ChunkId

IDS = Ids("index")
SEALER = sealer(IDS)
A, B, C = (PackRef("d" + letter * 32) for letter in "abc")
X, Y, Z = chunk(1), chunk(2), chunk(3)


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


@pytest.fixture
def index() -> Iterator[RemoteIndex]:
    made = RemoteIndex.open(None)
    yield made
    made.close()


def store(bucket: Bucket, ref: PackRef, *chunks: ChunkId, base: ChunkId | None = None) -> None:
    store_pack(bucket, SEALER, ref, [record(id_, base) for id_ in chunks])


def condemn(bucket: Bucket, round_: int, *refs: str, ended: bool = False) -> Rounds:
    content = StoredRound(nonce=IDS.hex(), condemned=refs)
    create_round(bucket, SEALER, round_, "begun", content)
    if ended:
        create_round(bucket, SEALER, round_, "final", content)
        bucket.delete(map(pack_name, refs))
        create_round(bucket, SEALER, round_, "done", StoredRound(nonce=IDS.hex()))
    rounds = Rounds(bucket, SEALER)
    rounds.refresh()
    return rounds


@pytest.mark.parametrize("many", [False, True])
def test_refresh_follows_the_bucket(
    bucket: Bucket, index: RemoteIndex, monkeypatch: pytest.MonkeyPatch, many: bool
) -> None:
    """New packs are read once, packs that are gone are forgotten; alike for few and for many packs."""
    if many:
        monkeypatch.setattr("ciuic.remote.remote_index._MANY_NEW_PACKS", 0)
    store(bucket, A, X)
    store(bucket, B, X, Y)
    assert index.refresh(bucket, SEALER) == (2, 0, {})
    assert index.has_many([X, Y, Z]) == {X, Y}
    bucket.delete([pack_name(B)])
    store(bucket, C, Z)
    before = bucket.requests
    assert index.refresh(bucket, SEALER) == (1, 1, {})
    assert bucket.requests - before == 2
    assert index.has_many([X, Y, Z]) == {X, Z}
    assert index.find(Y) == []
    assert {pack.ref for pack in index.packs()} == {A, C}
    assert [index.ref(copy.pack) for copy in index.copies()] == [
        {X: A, Z: C}[ChunkId(copy.id)] for copy in index.copies()
    ]


def test_location_is_where_the_record_lies(bucket: Bucket, index: RemoteIndex) -> None:
    """A location names pack, offset and lengths of the stored record."""
    store(bucket, A, X, Y)
    index.refresh(bucket, SEALER)
    found = index.find_many([X, Y, Z])
    assert set(found) == {X, Y}
    for id_, location in found.items():
        data = bucket.objects[pack_name(index.ref(location.pack))][0]
        assert data[location.offset : location.offset + location.stored_bytes] == id_
        assert index.find(id_) == [location]


def test_condemned_pack_counts_as_not_stored(bucket: Bucket, index: RemoteIndex) -> None:
    """What only a condemned pack has may not be relied on, but is found, after every other copy."""
    store(bucket, A, X, Y)
    index.refresh(bucket, SEALER)
    store(bucket, B, Y)
    index.learn(bucket, SEALER, [B])
    index.follow(condemn(bucket, 0, B))
    assert index.has_many([X, Y]) == {X, Y}
    assert index.ref(index.find_many([Y])[Y].pack) == A
    assert [index.ref(place.pack) for place in index.find(Y)] == [A, B]


def test_difference_counts_only_with_its_base(bucket: Bucket, index: RemoteIndex) -> None:
    """A difference in a good pack may not be relied on while its base is in a condemned one."""
    store(bucket, A, X)
    store(bucket, B, Y, base=X)
    store(bucket, C, Z, base=Y)
    index.refresh(bucket, SEALER)
    assert index.has_many([Z, Y]) == {Y, Z}
    assert index.find(Z)[0].base == Y
    index.follow(condemn(bucket, 0, A))
    assert index.has_many([X, Y, Z]) == set()


def test_cycle_of_bases_ends(bucket: Bucket, index: RemoteIndex) -> None:
    """Crafted tables whose differences refer to each other do not keep a lookup busy, and store nothing."""
    store(bucket, A, X, base=Y)
    store(bucket, B, Y, base=X)
    index.refresh(bucket, SEALER)
    assert index.has_many([X, Y]) == set()


def test_chain_of_the_longest_length_counts(bucket: Bucket, index: RemoteIndex) -> None:
    """A chunk with as many bases as a reader follows may be relied on; with one more it may not."""
    ids = [chunk(number) for number in range(MAX_READ_BASE_DEPTH + 2)]
    store(bucket, A, ids[0])
    for base, id_ in itertools.pairwise(ids):
        store(bucket, PackRef("d" + IDS.hex()), id_, base=base)
    index.refresh(bucket, SEALER)
    assert index.has_many(ids) == set(ids[:-1])


def test_cached_index_drops_what_was_deleted(bucket: Bucket, tmp_path: Path) -> None:
    """A process that opens an older index relies on nothing that rounds deleted since, without a listing of packs."""
    path = str(tmp_path / "index")
    store(bucket, A, X)
    store(bucket, B, Y)
    first = RemoteIndex.open(path)
    assert first.rounds_finished is None
    first.refresh(bucket, SEALER)
    assert first.rounds_finished == -1
    first.close()
    condemn(bucket, 0, A, ended=True)
    second = RemoteIndex.open(path)
    rounds = Rounds(bucket, SEALER, known=second.rounds_finished)
    rounds.refresh()
    second.follow(rounds)
    assert second.has_many([X, Y]) == {Y}
    assert second.rounds_finished == 0
    assert not rounds.condemned
    second.close()
    third = RemoteIndex.open(path)
    assert third.has_many([X, Y]) == {Y}
    third.close()


def test_number_of_a_dropped_pack_is_not_used_again(bucket: Bucket, index: RemoteIndex) -> None:
    """Rows that a dropped pack leaves behind are not taken for rows of a later pack."""
    store(bucket, A, X)
    store(bucket, B, *(chunk(number) for number in range(10, 30)))
    index.refresh(bucket, SEALER)
    bucket.delete([pack_name(A)])
    index.refresh(bucket, SEALER)
    store(bucket, C, Z)
    index.refresh(bucket, SEALER)
    assert index.has_many([X, Z]) == {Z}
    assert index.find(X) == []


def test_rows_of_dropped_packs_are_deleted_in_the_end(bucket: Bucket, index: RemoteIndex) -> None:
    """Rows that dropped packs leave behind do not grow without limit."""
    for _ in range(20):
        ref = PackRef("d" + IDS.hex())
        store(bucket, ref, X, Y, Z)
        index.refresh(bucket, SEALER)
        bucket.delete([pack_name(ref)])
    index.refresh(bucket, SEALER)
    (rows,) = index._database.db.execute("SELECT COUNT(*) FROM chunks").fetchone()
    assert rows == 0


def test_unreadable_pack_is_told_and_tried_again(bucket: Bucket, index: RemoteIndex) -> None:
    """A pack with a damaged table stores nothing, until it can be read."""
    store(bucket, A, X)
    data, modified_ns = bucket.objects[pack_name(A)]
    bucket.objects[pack_name(A)] = (data[:-1] + b"\0", modified_ns)
    assert set(index.refresh(bucket, SEALER).unreadable) == {A}
    assert index.has_many([X]) == set()
    bucket.objects[pack_name(A)] = (data, modified_ns)
    assert index.refresh(bucket, SEALER) == (1, 0, {})
    assert index.has_many([X]) == {X}


def test_a_damaged_pack_is_read_again_only_when_it_changes(bucket: Bucket, tmp_path: Path) -> None:
    """With ``believes`` a damaged table is read once, across processes, until its pack changes; without it, at each refresh."""
    path = str(tmp_path / "index")
    for ref in (A, B, C):
        store(bucket, ref, X)
    whole, modified_ns = bucket.objects[pack_name(A)]
    for ref in (A, B):
        bucket.objects[pack_name(ref)] = (whole[:-1] + b"\0", modified_ns)

    def requests(*, believes: bool) -> tuple[int, set[str]]:
        index, before = RemoteIndex.open(path), bucket.requests
        try:
            found = index.refresh(bucket, SEALER, believes=believes)
            return bucket.requests - before, set(found.unreadable)
        finally:
            index.close()

    # The listing is one.
    assert requests(believes=True)[1] == {A, B}
    assert requests(believes=True) == (1, {A, B})
    read, found = requests(believes=False)
    assert (read > 1, found) == (True, {A, B})
    bucket.objects[pack_name(A)] = (whole, modified_ns + 1)
    read, found = requests(believes=True)
    assert (read > 1, found) == (True, {B})
    bucket.delete([pack_name(B)])
    assert requests(believes=True) == (1, set())


def test_learned_pack_that_is_gone_is_left_out(bucket: Bucket, index: RemoteIndex) -> None:
    """A log may name packs that were deleted since."""
    store(bucket, A, X)
    assert index.learn(bucket, SEALER, [A, B, A]) == (1, 0, {})
    assert index.has_many([X]) == {X}


def test_index_that_was_being_filled_is_completed(bucket: Bucket, tmp_path: Path) -> None:
    """What a killed process had read is found by the next one."""
    path = str(tmp_path / "index")
    store(bucket, A, X)
    first = RemoteIndex.open(path)
    pack = RemotePack(A, 100, 0, 1)
    first._packs.add([(pack, [record(X)[0]])], unsorted=True)
    assert first.has_many([X]) == set()
    first.close()
    second = RemoteIndex.open(path)
    assert second.has_many([X]) == {X}
    second.close()


@pytest.mark.parametrize("change", ["no database", "another version"])
def test_foreign_file_is_replaced(bucket: Bucket, tmp_path: Path, change: str) -> None:
    """A cache that is none, or of another version, is made again."""
    path = tmp_path / "index"
    store(bucket, A, X)
    first = RemoteIndex.open(str(path))
    first.refresh(bucket, SEALER)
    first.close()
    if change == "no database":
        path.write_bytes(b"nothing of ours" * 100)
    else:
        with sqlite3.connect(path) as db:
            db.execute("PRAGMA user_version=99")
        db.close()
    second = RemoteIndex.open(str(path))
    assert second.rounds_finished is None
    assert second.packs() == []
    second.refresh(bucket, SEALER)
    assert second.has_many([X]) == {X}
    second.close()


@pytest.mark.parametrize("kept", range(45))
def test_a_line_that_was_torn_is_none(tmp_path: Path, kept: int) -> None:
    """A line cut at any byte names no pack, and spoils neither those before nor those after it."""
    write_known_packs(str(tmp_path), 3, {A: 16_777_216})
    before = (tmp_path / "packs").stat().st_size
    add_known_pack(str(tmp_path), B, 16_777_216)
    whole = (tmp_path / "packs").read_bytes()
    assert len(whole) - before >= kept
    (tmp_path / "packs").write_bytes(whole[: before + kept])
    sizes = {A: 16_777_216} | (
        {B: 16_777_216} if whole[before : before + kept].strip().endswith(B.encode()) else {}
    )
    for more in ({}, {C: 5}):
        for ref, size_bytes in more.items():
            add_known_pack(str(tmp_path), ref, size_bytes)
        found = read_known_packs(str(tmp_path))
        assert found is not None
        assert (found.rounds_finished, found.sizes) == (3, sizes | more)
