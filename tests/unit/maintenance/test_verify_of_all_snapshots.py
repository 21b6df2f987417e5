"""Verification of all snapshots: in slices, with the record of where it stopped, and beside a job that removes some of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.cli_repository import CliRepository
from support.small_repository import BLOCK, content, make_snapshot
from support.stored import flip

from ciuic.errors import Busy, NotFound
from ciuic.maintenance import verify
from ciuic.maintenance.prune import forget, prune
from ciuic.maintenance.verify import NAME, ScrubBook, VerifyResult, verify_slice, verify_snapshots
from ciuic.repository import Repository
from ciuic.types import SnapshotId

SNAPSHOTS = 4


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    """Make four snapshots, each with packs of its own."""
    with Repository.create(tmp_path / "repository", block_size=BLOCK) as made:
        for number in range(1, SNAPSHOTS + 1):
            add(made, number)
        yield made


def add(repository: Repository, number: int) -> None:
    with repository.writer(pack_bytes=1) as writer:
        make_snapshot(writer, f"cs-00000{number}", {b"file": content(2 * number, 5)}, time_ns=number)


def packs(repository: Repository) -> list[Path]:
    return sorted((repository.path / "packs").iterdir())


def one_slice(repository: Repository, steps: int) -> tuple[VerifyResult, bool, list[int]]:
    """Run one slice that ends after some steps; return result, whether the pass is complete, packs read."""
    queries = 0

    def time_is_up() -> bool:
        nonlocal queries
        queries += 1
        return queries >= steps

    with ScrubBook(repository.path, repository.id) as book:
        before = book.state.last_pack if book.state.began_ns else -1
        result = verify_slice(repository, book, time_is_up=time_is_up)
        book.save()
        numbers = [int(path.stem, 16) for path in packs(repository)]
        read = [number for number in numbers if before < number <= book.state.last_pack]
        return result, not book.state.began_ns, read


def test_slices_read_every_pack_once_and_every_snapshot(repository: Repository) -> None:
    """Slices read one pack, then one snapshot at a time, each once; the slice after the last starts over."""
    read: list[int] = []
    snapshots: list[SnapshotId] = []
    total = sum(path.stat().st_size for path in packs(repository))
    bytes_read = 0
    for number in range(len(packs(repository)) + SNAPSHOTS):
        result, complete, packs_read = one_slice(repository, 1)
        assert not result.damaged
        assert complete == (number == len(packs(repository)) + SNAPSHOTS)
        read += packs_read
        bytes_read += result.bytes_read
        if not packs_read:
            snapshots.append(result.snapshots[0])
    assert read == [int(path.stem, 16) for path in packs(repository)]
    assert bytes_read == total
    assert sorted(snapshots) == [f"cs-00000{number}" for number in range(1, SNAPSHOTS + 1)]
    _, complete, packs_read = one_slice(repository, 1 << 30)
    assert complete
    assert packs_read == []
    _, _, packs_read = one_slice(repository, 1)
    assert packs_read == read[:1]


def test_packs_that_come_and_go_meanwhile(repository: Repository) -> None:
    """Rewritten packs have new numbers and are read, and removed ones are skipped."""
    one_slice(repository, 2)
    with repository.writer() as writer:
        writer.remove_snapshots([SnapshotId.parse("cs-000003")])
        writer.rewrite_pack(int(packs(repository)[2].stem, 16), lambda chunk: True)
        writer.drop_pack(int(packs(repository)[0].stem, 16))
        writer.rewrite_pack(int(packs(repository)[0].stem, 16), lambda chunk: True)
    add(repository, 5)
    flip(packs(repository)[-1], 4096 + 30)
    result, complete, _ = one_slice(repository, 1 << 30)
    assert complete
    assert str(packs(repository)[-1]) in {damage.file for damage in result.damages}


@pytest.mark.parametrize("kill", [False, True])
def test_damage_is_reported_once_a_pass(repository: Repository, kill: bool) -> None:
    """Damage is reported once a pass, and a slice killed before its report is run again."""
    flip(packs(repository)[1], 4096 + 30)
    if kill:
        with pytest.raises(KeyboardInterrupt), ScrubBook(repository.path, repository.id) as book:
            verify_slice(repository, book, time_is_up=_killed_at(4))
    found = [bool(one_slice(repository, 1)[0].damages) for _ in packs(repository)]
    assert found.count(True) == 1
    with ScrubBook(repository.path, repository.id) as book:
        assert book.state.damages >= 1


def _killed_at(step: int) -> Callable[[], bool]:
    left = iter(range(step))

    def time_is_up() -> bool:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return False

    return time_is_up


@pytest.mark.parametrize(
    "book", [b"", b"{", b"[]", b'{"version": 99}', b"\xff\x00", b'{"version":1,"repository":"x"}']
)
def test_a_book_that_cannot_be_read_begins_a_new_pass(repository: Repository, book: bytes) -> None:
    """A torn, foreign or newer record begins a new pass."""
    one_slice(repository, 3)
    (repository.path / NAME).write_bytes(book)
    _, _, read = one_slice(repository, 1)
    assert read == [int(packs(repository)[0].stem, 16)]


def test_one_scrub_at_a_time(repository: Repository) -> None:
    """A second scrub at the same time is refused, as it would overwrite the record."""
    with ScrubBook(repository.path, repository.id), pytest.raises(Busy):
        ScrubBook(repository.path, repository.id)


def test_the_command_reads_as_much_as_time_allows(tmp_path: Path) -> None:
    """The command runs a whole pass with enough time and one pack with none; --restart starts over.

    Damage exits with 4.
    """
    made = CliRepository(tmp_path / "repo", tmp_path / "root")
    made.snapshot({b"a": content(2, 3), b"b": content(4, 3)})
    full_run = made.run("verify", "--checksum", "--max-duration", "10m")
    assert full_run.exit_code == 0, full_run.output
    assert "completes a pass" in full_run.stdout
    part = made.run("verify", "--checksum", "--max-duration", "0", "--json")
    assert part.exit_code == 0, part.output
    first = json.loads(part.stdout)["scrub"]
    assert not first["complete"]
    assert 0 < first["bytes_done"] <= first["bytes_total"]
    again = made.run("verify", "--all", "--checksum", "--max-duration", "0", "--restart", "--json")
    assert json.loads(again.stdout)["scrub"] == first
    made.run("verify", "--checksum", "--max-duration", "10m")
    for pack in sorted((made.path / "packs").iterdir()):
        flip(pack, 4096 + 30)
    damaged = made.run("verify", "--checksum", "--max-duration", "10m")
    assert damaged.exit_code == 4
    assert "damaged" in damaged.stdout
    assert made.run("check").exit_code == 4, "and the book disturbs nobody"


def test_contradicting_options_are_refused(tmp_path: Path) -> None:
    """Options that contradict a slice, which is of everything by checksum, are refused."""
    made = CliRepository(tmp_path / "repo", tmp_path / "root")
    made.snapshot({b"a": b"1"})
    for arguments in (
        ["latest", "--checksum", "--max-duration", "1m"],
        ["--max-duration", "1m"],
        ["--all", "--restart"],
        ["--checksum", "--max-duration", "soon"],
    ):
        assert made.run("verify", *arguments).exit_code == 2, arguments


def test_a_slice_that_ends_after_a_snapshot_has_reported_what_it_lacks(repository: Repository) -> None:
    """A snapshot counts as verified only after all of its chunks were looked up."""
    for pack in repository.packs():
        if pack.kind == "data":
            Path(repository.pack_path(pack.number)).unlink()
    # The descriptors of the packs are closed, through which their content could still be read.
    repository.close()
    lacking: set[SnapshotId] = set()
    complete = False
    while not complete:
        result, complete, _ = one_slice(repository, 1)
        lacking.update(id_ for damage in result.damages if damage.kind == "data" for id_ in damage.snapshots)
    assert len(lacking) == SNAPSHOTS


GONE = SnapshotId("cs-00000b")


@pytest.fixture
def changing(tmp_path: Path) -> Repository:
    """A changing of three snapshots without a chunk in common."""
    with Repository.create(tmp_path / "r", block_size=BLOCK) as made:
        for number, name in enumerate(("cs-00000a", GONE, "cs-00000c")):
            with made.writer() as writer:
                make_snapshot(writer, name, {b"f": os.urandom(4 * BLOCK)}, time_ns=number + 1)
    return Repository.open(tmp_path / "r")


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("moment", ["listed", "loaded"])
def test_what_is_removed_meanwhile_is_no_damage(
    changing: Repository, monkeypatch: pytest.MonkeyPatch, moment: str, checksum: bool
) -> None:
    """A snapshot that is removed and pruned after it was listed or loaded is no error and no damage."""

    def remove() -> None:
        with Repository.open(changing.path) as other:
            forget(other, [GONE])
            prune(other)

    name = "_load" if moment == "listed" else "_verify_snapshots"
    method = getattr(verify.Verification, name)

    def meanwhile(self: verify.Verification, *args: object, **kwargs: object) -> object:
        remove()
        return method(self, *args, **kwargs)

    monkeypatch.setattr(verify.Verification, name, meanwhile)
    result = verify_snapshots(changing, checksum=checksum)
    assert result.damages == []
    assert (GONE in result.snapshots) is (moment == "loaded")


def test_a_named_snapshot_must_be_there(changing: Repository) -> None:
    """A snapshot that somebody named and that is gone is an error."""
    forget(changing, [GONE])
    with pytest.raises(NotFound):
        verify_snapshots(changing, [GONE])
