"""Tests that check names what is wrong with a repository, and that repair deletes nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from support.small_repository import noise
from support.stored import IDENTITIES, flip, flip_stored, put_file, read_back, store

from ciuic.errors import Busy
from ciuic.maintenance.check import CheckReport, add_damage, check, summary
from ciuic.maintenance.prune import prune
from ciuic.maintenance.verify import Damage, verify_snapshots
from ciuic.repository import Repository
from ciuic.repository.locks import Claim
from ciuic.types import ChunkId, RootRecord, Snapshot, SnapshotDraft, SnapshotId

BLOCK = 4096


CONTENT = noise(1, 40 * BLOCK + 17)


@pytest.fixture(params=IDENTITIES)
def repository(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Repository]:
    with Repository.create(tmp_path / "repo", block_size=BLOCK, identity=request.param) as made:
        yield made


@pytest.fixture
def live(tmp_path: Path) -> Path:
    """Make a protected directory with the file that the snapshot holds."""
    directory = tmp_path / "live"
    directory.mkdir()
    (directory / "model.bin").write_bytes(CONTENT)
    return directory


@pytest.fixture
def snapshot(repository: Repository, live: Path) -> Snapshot:
    with repository.writer() as writer:
        return store(
            writer, {b"model.bin": CONTENT, b"d": {b"x": b"small"}}, number=1, root=os.fsencode(live)
        )


def pack_path(repository: Repository, number: int) -> Path:
    return next(Path(repository.path).rglob(f"{number:016x}*"))


def block_of(repository: Repository, snapshot: Snapshot, name: bytes, number: int) -> ChunkId:
    entry = repository.trees.entry(snapshot.roots[0].entry.content, name)
    assert entry is not None
    blocks = -(-entry.size_bytes // BLOCK)
    return repository.block_maps.get(entry.content, entry.map_height, blocks, number)


def kinds(report: CheckReport) -> list[tuple[str, str, bool]]:
    return sorted({(f.severity, f.kind, f.repaired) for f in report.findings})


def looked(repository: Repository, *, repair: bool = False, read_data: bool = False) -> CheckReport:
    """Check through a newly opened repository, as the command does."""
    with Repository.open(repository.path) as fresh:
        return check(fresh, repair=repair, read_data=read_data)


def test_a_sound_repository_has_no_findings(repository: Repository, snapshot: Snapshot) -> None:
    """A sound repository has no findings, and the figures say what was read."""
    for read_data in (False, True):
        report = looked(repository, read_data=read_data)
        assert report.findings == []
        assert report.snapshots == 1
        assert report.packs == len(repository.packs())
        assert report.stored_bytes > len(CONTENT)
        assert "in order" in summary(report)
        assert ("was not read" in summary(report)) is not read_data
        assert not report.damaged


def test_a_sound_block_that_does_not_fit_its_file_stays_an_error(
    repository: Repository, snapshot: Snapshot
) -> None:
    """A file with another size than its block has is damage, which repair does not call mended by a good copy."""
    with repository.writer() as writer:
        crafted = msgspec.structs.replace(put_file(writer, b"short", noise(5, 100)), size_bytes=99)
        ref = writer.update_tree(b"", {b"short": crafted})
        entry = msgspec.structs.replace(snapshot.roots[0].entry, content=ref.id)
        writer.commit(
            SnapshotDraft(
                id=SnapshotId("cs-000002"),
                time_ns=3 * 10**9,
                host="test",
                roots=(RootRecord(path=b"/root", entry=entry),),
            )
        )
    for repair in (False, True):
        report = looked(repository, repair=repair, read_data=repair)
        assert kinds(report) == [("error", "damaged chunk", False)]
        message = report.findings[0].message
        assert message.startswith("/root/short, block 0: ")
        assert message.endswith("a block of 99 bytes has 100; in cs-000002")


def test_an_empty_repository_is_sound(repository: Repository) -> None:
    """A repository without snapshots is sound."""
    assert looked(repository, read_data=True).findings == []


@pytest.mark.parametrize("rubbish", [b"", b"rubbish" * 1000])
def test_an_index_that_is_lost_or_rubbish_is_rebuilt(
    repository: Repository, snapshot: Snapshot, rubbish: bytes
) -> None:
    """A repository without its index, or with one that is no database, is sound, and repair writes a new one."""
    repository.close()
    for path in Path(repository.path).glob("index.sqlite*"):
        path.write_bytes(rubbish) if rubbish else path.unlink()
    report = looked(repository)
    assert kinds(report) == [("warning", "index", False)]
    assert not report.damaged
    assert not looked(repository, repair=True).damaged
    assert looked(repository).findings == []
    assert read_back(repository, snapshot.id)[b"model.bin"] == CONTENT


def test_an_unreadable_snapshot_is_named_and_stays(repository: Repository, snapshot: Snapshot) -> None:
    """An unreadable snapshot is an error, repair does not delete it, and the others are checked."""
    with repository.writer() as writer:
        store(writer, {b"other": noise(2, BLOCK)}, number=2)
    (path,) = [p for p in (Path(repository.path) / "snapshots").iterdir() if p.name.startswith(snapshot.id)]
    path.write_bytes(path.read_bytes()[:-1])
    for repair in (False, True):
        report = looked(repository, repair=repair)
        assert ("error", "snapshot", False) in kinds(report)
        assert sum(snapshot.id in finding.message for finding in report.findings) == 1
        assert report.damaged
        # What an unreadable snapshot needs is not known.
        assert report.orphaned_bytes == report.garbage_bytes == 0
        assert path.exists()
    assert report.damaged


def test_damaged_marks_cost_no_snapshot(repository: Repository, snapshot: Snapshot) -> None:
    """A snapshot of which the marks alone are damaged is whole: what is advised writes them anew, and forgets nothing."""
    with repository.writer() as writer:
        writer.set_marks(snapshot.id, tags=["good"])
    flip(Path(repository.snapshots.marks_path(snapshot.id)), 10)
    report = looked(repository, repair=True, read_data=True)
    assert kinds(report) == [("error", "snapshot", False)]
    assert f"ciuic release {snapshot.id}" in report.findings[0].hint
    assert "forget" not in report.findings[0].hint
    with repository.writer() as writer:
        writer.set_marks(snapshot.id, hold=False)
    assert looked(repository).findings == []


@pytest.mark.parametrize("put", [None, os.mkfifo, os.mkdir], ids=["nothing", "pipe", "directory"])
def test_a_missing_pack_is_reported_with_paths_and_snapshots(
    repository: Repository, snapshot: Snapshot, put: Callable[[Path], None] | None
) -> None:
    """A missing pack is reported as missing blocks with path and snapshot, whatever has its place."""
    where = repository.chunks.locate(block_of(repository, snapshot, b"model.bin", 0))
    path = pack_path(repository, where.pack)
    path.unlink()
    if put is not None:
        put(path)
        # Its descriptor is open, through which the content could still be read.
        repository = Repository.open(repository.path)
    report = looked(repository)
    repository.close()
    assert report.damaged
    missing = [finding for finding in report.findings if finding.kind == "missing chunk"]
    # A pack may hold blocks of several files, and blocks are checked in the order of their ids.
    assert any("model.bin" in finding.message for finding in missing)
    assert {one for finding in missing for one in finding.snapshots} == {snapshot.id}


def test_a_damaged_tree_is_named_and_makes_no_garbage(repository: Repository, snapshot: Snapshot) -> None:
    """A tree that cannot be read is named with its snapshot, and nothing counts as garbage for it."""
    flip_stored(repository, ChunkId(snapshot.roots[0].entry.content))
    report = looked(repository)
    assert ("error", "structure", False) in kinds(report)
    assert report.orphaned_bytes == 0


def test_a_damaged_block_without_the_live_file(
    repository: Repository, snapshot: Snapshot, live: Path
) -> None:
    """A damaged block without another copy is found by reading everything, and stays an error."""
    flip_stored(repository, block_of(repository, snapshot, b"model.bin", 7))
    (live / "model.bin").unlink()
    # Its bytes were not read.
    assert looked(repository).findings == []
    assert kinds(looked(repository, read_data=True)) == [("error", "damaged chunk", False)]
    report = looked(repository, read_data=True, repair=True)
    assert report.damaged
    assert kinds(report) == [("error", "damaged chunk", False)]


def test_a_damaged_block_is_healed_from_the_live_file(
    repository: Repository, snapshot: Snapshot, live: Path
) -> None:
    """Repair restores a damaged block from the live file, and the snapshot reads as it was stored."""
    flip_stored(repository, block_of(repository, snapshot, b"model.bin", 7))
    flip_stored(repository, block_of(repository, snapshot, b"model.bin", 40))
    report = looked(repository, read_data=True, repair=True)
    assert not report.damaged
    assert ("error", "damaged chunk", True) in kinds(report)
    with Repository.open(repository.path) as fresh:
        assert read_back(fresh, snapshot.id)[b"model.bin"] == CONTENT
    # The pack with the bad copies is gone: the next scrub finds nothing.
    assert looked(repository, read_data=True).findings == []
    with Repository.open(repository.path) as fresh:
        assert verify_snapshots(fresh, checksum=True).damages == []


def test_a_healed_copy_that_stays_is_no_damage(
    repository: Repository, snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad copy that stays for want of room after repair is known and raises no error."""
    flip_stored(repository, block_of(repository, snapshot, b"model.bin", 7))

    def no_room(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as cramped:
        cramped.setattr("ciuic.repository.writing.writer.Writer.rewrite_pack", no_room)
        assert not looked(repository, read_data=True, repair=True).damaged
    with Repository.open(repository.path) as fresh:
        assert verify_snapshots(fresh, checksum=True).damages == []
    assert kinds(looked(repository, read_data=True)) == [("info", "damaged chunk", False)]
    looked(repository, read_data=True, repair=True)
    assert looked(repository, read_data=True).findings == []


def test_damage_in_unused_data_is_removed_with_its_pack(repository: Repository, snapshot: Snapshot) -> None:
    """Repair replaces a pack with damage in an unused chunk or padding, but not while several processes store a snapshot."""
    with repository.writer(pack_bytes=1 << 30) as writer:
        unneeded = writer.put_chunk(noise(9, 10 * BLOCK))
    flip_stored(repository, unneeded)
    claim = Claim.acquire(repository.path)
    assert looked(repository, read_data=True, repair=True).damaged
    claim.release()
    assert looked(repository, read_data=True).damaged
    assert not looked(repository, read_data=True, repair=True).damaged
    assert looked(repository, read_data=True).findings == []
    assert read_back(repository, snapshot.id)[b"model.bin"] == CONTENT


def test_a_rewrite_believes_no_other_copy_unread(repository: Repository, snapshot: Snapshot) -> None:
    """A pack that is rewritten loses no chunk whose copy in another pack has decayed."""
    block = block_of(repository, snapshot, b"model.bin", 7)
    number = repository.chunks.locate(block).pack
    path = pack_path(repository, number)
    with repository.writer(pack_bytes=1) as writer:
        writer.put_chunk(noise(3, BLOCK))  # the last one of its pack
    sound = path.read_bytes()
    flip_stored(repository, block)
    with repository.writer() as writer:
        assert writer.mark_damaged([block]) == [block]
        assert writer.put_chunk(CONTENT[7 * BLOCK : 8 * BLOCK]) == block
    path.write_bytes(sound)
    flip_stored(repository, block)
    with repository.writer() as writer:
        writer.rewrite_pack(number, lambda _: True)
    assert read_back(repository, snapshot.id)[b"model.bin"] == CONTENT


def test_a_pack_that_was_cut_short_is_found_without_reading(
    repository: Repository, snapshot: Snapshot
) -> None:
    """A pack cut between two segments is found by its size, without reading."""
    with repository.writer(pack_bytes=1) as writer:
        store(writer, {b"more": noise(6, 2000 * BLOCK)}, number=2)
    with repository.writer() as writer:
        large = store(writer, {b"large": noise(7, 3000 * BLOCK)}, number=3)
    where = repository.chunks.locate(block_of(repository, large, b"large", 2999))
    segments = list(repository._pack_files().scan(where.pack))
    assert len(segments) > 1
    os.truncate(pack_path(repository, where.pack), segments[-2].end)
    report = looked(repository)
    assert report.damaged
    assert any("are missing" in finding.message for finding in report.findings if finding.kind == "pack")


@pytest.mark.parametrize("sealed", [False, True])
def test_a_damaged_header_is_found_without_reading(
    repository: Repository, snapshot: Snapshot, sealed: bool
) -> None:
    """A damaged pack header is found without reading, and the hint names a command that finds it, too."""
    with repository.writer(pack_bytes=1 if sealed else None) as writer:
        store(writer, {b"filler": noise(4, BLOCK)}, number=2)
    where = repository.chunks.locate(block_of(repository, snapshot, b"model.bin", 0))
    with pack_path(repository, where.pack).open("r+b") as stream:
        stream.write(b"rubbish!")
    report = looked(repository)
    assert report.damaged
    (hint,) = {finding.hint for finding in report.findings if finding.kind == "pack"}
    assert "--checksum" in hint
    with Repository.open(repository.path) as fresh:
        assert verify_snapshots(fresh, checksum=True).damaged


def test_a_missing_block_is_healed_from_the_live_file(
    repository: Repository, snapshot: Snapshot, live: Path
) -> None:
    """A lost pack of data is restored as far as the live files hold it."""
    where = repository.chunks.locate(block_of(repository, snapshot, b"model.bin", 0))
    pack_path(repository, where.pack).unlink()
    report = looked(repository, repair=True)
    with Repository.open(repository.path) as fresh:
        content = read_back(fresh, snapshot.id) if not report.damaged else None
    assert content is None or content[b"model.bin"] == CONTENT
    lost = {
        finding.chunk
        for finding in report.findings
        if not finding.repaired and finding.kind == "missing chunk"
    }
    # The small file's block has no live file.
    assert len(lost) <= 1


def test_a_live_path_with_something_else_heals_nothing(
    repository: Repository, snapshot: Snapshot, live: Path
) -> None:
    """A file that changed, a fifo or a link at the path of a lost file neither blocks nor misleads the repair."""
    flip_stored(repository, block_of(repository, snapshot, b"model.bin", 7))
    flip(live / "model.bin", 7 * BLOCK + 5)
    assert looked(repository, read_data=True, repair=True).damaged
    (live / "model.bin").unlink()
    os.mkfifo(live / "model.bin")
    assert looked(repository, read_data=True, repair=True).damaged
    (live / "model.bin").unlink()
    (live / "elsewhere").write_bytes(CONTENT)
    (live / "model.bin").symlink_to("elsewhere")
    assert looked(repository, read_data=True, repair=True).damaged


def test_orphaned_packs_are_reported(repository: Repository, snapshot: Snapshot) -> None:
    """Unused packs are reported with their size, are no error, and stay after repair."""
    # This fills up the existing packs.
    with repository.writer(pack_bytes=1) as writer:
        store(writer, {b"filler": noise(4, BLOCK)}, number=2)
    with repository.writer() as writer:
        other = store(writer, {b"other": noise(3, 100 * BLOCK)}, number=3)
    with repository.writer() as writer:
        writer.remove_snapshots([other.id])
    stored = repository.stored_bytes()
    report = looked(repository, repair=True)
    assert ("info", "orphaned pack", False) in kinds(report)
    assert report.orphaned_bytes > 80 * BLOCK
    assert report.garbage_bytes >= 100 * BLOCK
    assert not report.damaged
    assert repository.stored_bytes() == stored


def test_repair_needs_the_lock(repository: Repository, snapshot: Snapshot) -> None:
    """Check without repair works while a writer holds the lock, and repair is busy."""
    with repository.writer():
        assert looked(repository).findings == []
        with pytest.raises(Busy):
            looked(repository, repair=True)


def test_a_damaged_copy_of_the_configuration(repository: Repository, snapshot: Snapshot) -> None:
    """A damaged copy of the configuration is an error, and repair writes it from the other."""
    path = Path(repository.path) / "config"
    path.write_bytes(path.read_bytes()[:-3] + b"xyz")
    assert kinds(looked(repository)) == [("error", "configuration", False)]
    report = looked(repository, repair=True)
    assert kinds(report) == [("error", "configuration", True)]
    # The repair has just been done.
    assert "--repair" not in report.findings[0].hint
    assert looked(repository).findings == []


def test_torn_unused_pack_is_no_damage(repository: Repository, snapshot: Snapshot) -> None:
    """A torn pack is a warning and removed by prune if nothing needs it, and otherwise damage."""
    with repository.writer(pack_bytes=1) as writer:
        store(writer, {b"filler": noise(4, BLOCK)}, number=2)
    with repository.writer() as writer:
        torn = store(writer, {b"torn": noise(5, 30 * BLOCK)}, number=3)
    where = repository.chunks.locate(block_of(repository, torn, b"torn", 0))
    path = pack_path(repository, where.pack)
    os.truncate(path, path.stat().st_size - 10 * BLOCK)
    for index in Path(repository.path).glob("index.sqlite*"):
        index.unlink()
    assert looked(repository, read_data=True).damaged

    with repository.writer() as writer:
        writer.remove_snapshots([torn.id])
    report = looked(repository, read_data=True)
    assert not report.damaged
    assert ("warning", "pack", False) in kinds(report)

    with Repository.open(repository.path) as fresh:
        prune(fresh)
    assert not path.exists()
    assert looked(repository, read_data=True).findings == []


def test_wrong_catalogue_is_found_and_rebuilt(repository: Repository, snapshot: Snapshot) -> None:
    """A catalogue that differs from a snapshot's file is found, and rebuilt by repair."""
    with contextlib.closing(sqlite3.connect(Path(repository.path) / "index.sqlite")) as index, index:
        index.execute("UPDATE snapshots SET time_ns = time_ns + 1")
    report = looked(repository)
    assert kinds(report) == [("warning", "index", False)]
    assert snapshot.id in report.findings[0].message
    assert kinds(looked(repository, repair=True)) == [("warning", "index", True)]
    assert looked(repository).findings == []


def test_a_place_is_the_same_however_many_snapshots_share_it() -> None:
    """A check after another snapshot finds no further place, and the sentence stays one."""
    found = []
    for count in (1, 5, 5000):
        damage = Damage(
            "data", "its block is bad", path=b"/r/f", block=3, chunk=ChunkId(b"x" * 16),
            snapshots=tuple(SnapshotId(f"cs-{number:06x}") for number in range(count)),
        )  # fmt: skip
        found.append(add_damage(CheckReport(), damage, "", in_pack=True))
    assert {finding.place for finding in found} == {"/r/f, block 3: its block is bad"}
    assert [len(finding.snapshots) for finding in found] == [1, 5, 5000]
    assert found[1].message.endswith("; in cs-000000, cs-000001, cs-000002, cs-000003, cs-000004")
    assert found[2].message.endswith("cs-000004 and 4995 more")
