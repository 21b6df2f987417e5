"""Tests of damage anywhere in a repository: found, named, and never a wrong byte or a foreign exception."""

from __future__ import annotations

import os
import random
import sqlite3
from pathlib import Path

import pytest
from support.small_repository import BLOCK, content, make_snapshot, read_files
from support.stored import IDENTITIES, flip

from ciuic.errors import CiuicError, Damaged
from ciuic.maintenance.prune import prune
from ciuic.repository import DamagedChunk, MissingChunk, Repository, UnsupportedFormat
from ciuic.repository import pack_format as pf
from ciuic.repository.index_database import INDEX_NAME, discard
from ciuic.retention import RetentionPolicy
from ciuic.types import ChunkId, SnapshotId

FILES = {b"a": content(2, 5), b"b": content(3, 40), b"empty": b"", b"c": content(4, 17)}


@pytest.fixture(params=IDENTITIES)
def top(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Make a repository with a snapshot, a marked one, sealed packs and unsealed ones."""
    path = tmp_path / "r"
    with Repository.create(path, block_size=BLOCK, identity=request.param) as repository:
        with repository.writer(pack_bytes=60_000) as writer:
            make_snapshot(writer, "cs-000001", FILES)
        with repository.writer() as writer:
            make_snapshot(writer, "cs-000002", {b"x": content(6, 3)}, time_ns=2)
            writer.set_marks(SnapshotId("cs-000002"), hold=True, reason="good one")
        assert any(pack.sealed for pack in repository.packs())
        assert not all(pack.sealed for pack in repository.packs())
    return path


def _found(top: Path) -> bool:
    """Return whether a full check finds an error."""
    try:
        with Repository.open(top) as repository:
            problems: list[object] = [*repository.config_damage(), *repository.scrub()]
            problems += repository.snapshots.unreadable()
            problems += [info.id for info in repository.snapshots.list() if "marks file" in info.hold_reason]
            return bool(problems)
    except (Damaged, UnsupportedFormat):
        return True


def _durable_files(top: Path) -> list[Path]:
    return sorted(
        path for path in top.rglob("*") if path.is_file() and not path.name.startswith((INDEX_NAME, "lock"))
    )


# Half a minute with one identity; tests/property/test_verify_flips.py flips bytes of both in seconds.
@pytest.mark.full
@pytest.mark.parametrize("top", [None], indirect=True)
def test_every_flipped_byte_is_found(top: Path) -> None:
    """A flipped bit in any file but the index is found, and no read gives wrong bytes or a crash."""
    assert not _found(top)
    dice = random.Random(1)
    for path in _durable_files(top):
        size = path.stat().st_size
        places = (
            range(size)
            if size < 1500
            else [*range(64), *dice.sample(range(size), 60), *range(size - 60, size)]
        )
        for at in places:
            bit = 1 << dice.randrange(8)
            flip(path, at, bit)
            assert _found(top), f"{path.name}: a flipped bit at {at} was not found"
            flip(path, at, bit)


def test_reads_of_a_damaged_repository_are_right_or_damaged(top: Path) -> None:
    """Each read gives the right bytes or a CiuicError with rubbish written anywhere, index included."""
    dice = random.Random(2)
    originals = {path: path.read_bytes() for path in top.rglob("*") if path.is_file() and path.name != "lock"}
    for _ in range(150):
        path = dice.choice(sorted(originals))
        original = originals[path]
        at = dice.randrange(len(original) + 1)
        body = bytearray(original)
        body[at : at + dice.choice([1, 8, 500])] = dice.randbytes(dice.choice([0, 1, 8, 500]))
        path.write_bytes(body)
        try:
            with Repository.open(top) as repository:
                assert read_files(repository, "cs-000001") == FILES
        except CiuicError:
            # The damage was reported; which error it is, another test checks.
            pass
        for other, data in originals.items():
            if not other.exists() or other.read_bytes() != data:
                other.write_bytes(data)


def test_damage_in_a_chunk_names_pack_and_offset(top: Path) -> None:
    """A damaged chunk is named with its id and its place, and only its readers are affected."""
    with Repository.open(top) as repository:
        entry = repository.trees.entry(
            repository.snapshots.load(SnapshotId("cs-000001")).roots[0].entry.content, b"a"
        )
        assert entry is not None
        chunk = dict(repository.block_maps.ids(entry.content, entry.map_height, 5))[3]
        place = repository.chunks.locate(chunk)
        flip(top / "packs" / f"{place.pack:016x}.pack", place.offset + 5)
        with pytest.raises(DamagedChunk) as caught:
            repository.chunks.get(chunk)
        assert (caught.value.chunk, caught.value.pack, caught.value.offset) == (
            chunk,
            place.pack,
            place.offset,
        )
        assert caught.value.exit_code == 4
        assert [damage.chunk for damage in repository.scrub()] == [chunk]
        with pytest.raises(MissingChunk):
            repository.chunks.get(ChunkId(b"0123456789abcdef"))


def test_a_chunk_marked_as_damaged_is_stored_again(top: Path) -> None:
    """Content put again after mark_damaged is stored as a fresh copy, which all snapshots then read."""
    block = FILES[b"a"][:BLOCK]
    with Repository.open(top) as repository:
        with repository.writer() as writer:
            chunk = writer.put_chunk(block)
            assert writer.new_bytes == 0, "stored already"
            place = repository.chunks.locate(chunk)
            flip(top / "packs" / f"{place.pack:016x}.pack", place.offset)
            assert writer.mark_damaged([chunk]) == [chunk]
            assert writer.put_chunk(block) == chunk
            writer.flush()
            assert writer.new_bytes > BLOCK
            assert writer.mark_damaged([chunk]) == []
        assert repository.chunks.get(chunk) == block
        assert read_files(repository, "cs-000001") == FILES
        with repository.writer() as writer:
            writer.rebuild_index()
        assert repository.chunks.get(chunk) == block


@pytest.mark.parametrize("loss", ["missing", "rubbish", "empty", "stale", "lying", "other version"])
def test_the_index_may_be_lost(top: Path, loss: str) -> None:
    """Readers without a usable index scan the packs, and the next writer restores it."""
    path = top / INDEX_NAME
    if loss == "missing":
        discard(str(path))
    elif loss in ("rubbish", "empty"):
        discard(str(path))
        path.write_bytes(b"not a database, but long enough to look at" * 100 if loss == "rubbish" else b"")
    else:
        with sqlite3.connect(path) as db:
            if loss == "stale":
                db.execute("DELETE FROM chunks WHERE pack >= 2")
                db.execute("DELETE FROM packs WHERE number >= 2")
                db.execute("DELETE FROM snapshots")
            elif loss == "lying":
                db.execute("UPDATE chunks SET offset = offset + 8")
            else:
                db.execute("PRAGMA user_version = 99")
        db.close()
    with Repository.open(top) as repository:
        assert read_files(repository, "cs-000001") == FILES
        assert repository.snapshots.ids() == ["cs-000002", "cs-000001"]
        with repository.writer() as writer:
            if loss == "lying":
                assert repository.check_index() != []
                writer.rebuild_index()
        assert repository.check_index() == []
    with Repository.open(top) as repository:
        assert read_files(repository, "cs-000001") == FILES


def test_no_pack_is_cut_without_an_index(top: Path) -> None:
    """Where no index says how long an unsealed pack was, nothing is cut off: records may lie behind damage."""
    with Repository.open(top) as repository:
        number = next(pack.number for pack in repository.packs() if not pack.sealed)
    path = top / "packs" / f"{number:016x}.pack"
    damaged = path.read_bytes() + bytes(9000)
    path.write_bytes(damaged)
    discard(str(top / INDEX_NAME))
    with Repository.open(top) as repository:
        repository.writer().close()
    assert path.read_bytes() == damaged


def test_either_copy_of_the_configuration_will_do(top: Path) -> None:
    """A damaged copy of the configuration is reported and repaired; without both, DamagedRepository."""
    flip(top / "config", 30)
    with Repository.open(top) as repository:
        assert len(repository.config_damage()) == 1
        with repository.writer() as writer:
            assert writer.repair_config() == ["config"]
        assert repository.config_damage() == []
    flip(top / "config", 30)
    flip(top / "config.copy", 31)
    with pytest.raises(Damaged):
        Repository.open(top)


def test_damaged_marks_hold_the_snapshot(top: Path) -> None:
    """A snapshot whose marks file cannot be read counts as held, also when another mark of it is changed."""
    with Repository.open(top) as repository:
        with repository.writer() as writer:
            writer.set_marks(SnapshotId("cs-000001"), tags=["t"])
        flip(top / "marks" / "cs-000001", 40)
        assert repository.snapshots.load(SnapshotId("cs-000001")).held
        assert {info.id: info.held for info in repository.snapshots.list()} == {
            "cs-000001": True,
            "cs-000002": True,
        }
        with repository.writer() as writer:
            assert writer.set_marks(SnapshotId("cs-000001"), tags=["t"]).held


def test_lost_marks_come_back_from_the_catalogue(top: Path) -> None:
    """A missing marks file is written again by the next writer, so a hold is kept."""
    id_ = SnapshotId("cs-000001")
    with Repository.open(top) as repository:
        with repository.writer() as writer:
            writer.set_marks(id_, hold=True, reason="why", tags=["t"])
        (top / "marks" / id_).unlink()
        prune(repository, RetentionPolicy(keep_within_seconds=0, keep_last=1))
        found = repository.snapshots.load(id_)
        assert (found.held, found.hold_reason, found.tags) == (True, "why", ("t",))
        with repository.writer() as writer:
            writer.remove_snapshots([id_])
        with repository.writer():
            pass
        assert not (top / "marks" / id_).exists(), "marks of a removed snapshot are not brought back"


def test_a_compressed_frame_cannot_claim_more_than_its_record(top: Path, tmp_path: Path) -> None:
    """A crafted frame that claims gigabytes is refused before anything is allocated."""
    import zstandard

    from ciuic.repository.chunk_reader import BadCopyError, unpack

    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    with pytest.raises(BadCopyError):
        unpack(bomb, 4096, pf.FLAG_ZSTD)
    with pytest.raises(BadCopyError):
        unpack(bomb, 1 << 40, pf.FLAG_ZSTD)


def test_a_pack_that_is_damaged_is_never_collected(top: Path) -> None:
    """Rewriting a pack with a damaged live chunk or structure is refused, and nothing is deleted."""
    with Repository.open(top) as repository:
        packs = repository.packs()
        data = next(pack for pack in packs if pack.kind == "data" and pack.sealed)
        record = next(repository.pack_records(data.number))
        path = top / "packs" / f"{data.number:016x}.pack"
        flip(path, record.offset)
        with repository.writer() as writer, pytest.raises(DamagedChunk):
            writer.rewrite_pack(data.number, lambda chunk: True)
        assert path.exists()
        flip(path, record.offset)
        unsealed = next(pack for pack in packs if not pack.sealed)
        path = top / "packs" / f"{unsealed.number:016x}.pack"
        flip(path, pf.ALIGN_BYTES)
        with pytest.raises(Damaged):
            repository.pack_records(unsealed.number)
        with repository.writer() as writer, pytest.raises(Damaged):
            writer.rewrite_pack(unsealed.number, lambda chunk: True)
        assert path.exists()
        assert os.path.getsize(path) == unsealed.size_bytes


def _damage_every_pack(top: Path) -> list[int]:
    """Flip a bit in the first payload of every pack; return the packs' numbers."""
    with Repository.open(top) as repository:
        numbers = [pack.number for pack in repository.packs()]
        firsts = [next(iter(repository.pack_records(number))) for number in numbers]
        for number, record in zip(numbers, firsts, strict=True):
            flip(Path(repository.pack_path(number)), record.offset)
    return numbers


@pytest.mark.parametrize("top", [None], indirect=True)
def test_a_scrub_reports_packs_in_order_and_ends_where_it_is_told(top: Path) -> None:
    """Packs are read at once: damage comes in the order of packs, and none of a pack after the last one asked for."""
    numbers = _damage_every_pack(top)
    assert len(numbers) > 2
    with Repository.open(top) as repository:
        assert list(dict.fromkeys(found.pack for found in repository.scrub())) == numbers
        asked: list[int] = []

        def goes_on(number: int) -> bool:
            asked.append(number)
            return False

        found = list(repository.scrub(after=numbers[0], goes_on=goes_on))
    assert asked == numbers[1:2]
    assert {damage.pack for damage in found} == set(asked)


@pytest.mark.parametrize("top", [None], indirect=True)
def test_a_scrub_pauses_between_segments_and_may_be_stopped_there(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's function is called for segments; where it raises, the scrub ends, whatever threads wait for."""
    # So that a thread waits for its turn when the scrub ends.
    monkeypatch.setattr("ciuic.repository.scrub._AHEAD_SEGMENTS", 1)

    class Stop(Exception):
        pass

    pauses = 0

    def between() -> None:
        nonlocal pauses
        pauses += 1
        if pauses > 2:
            raise Stop

    with Repository.open(top) as repository:
        with pytest.raises(Stop):
            list(repository.scrub(between=between))
        assert pauses == 3
        # The repository can be used afterwards.
        assert list(repository.scrub()) == []
