"""A scrub in slices: `verify --checksum --max-duration`, and the book that says where it stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.cli_repository import CliRepository
from support.small_repository import BLOCK, content, make_snapshot

from ciuic.errors import Busy
from ciuic.repository import Repository
from ciuic.scrub_book import NAME, ScrubBook
from ciuic.types import SnapshotId
from ciuic.verify import VerifyResult
from ciuic.verify_slice import verify_slice

SNAPSHOTS = 4


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    """Four snapshots, each with packs of its own."""
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
    """One slice whose time is up after so many packs or snapshots; whether the pass is complete, what was read."""
    asked = 0

    def time_is_up() -> bool:
        nonlocal asked
        asked += 1
        return asked >= steps

    with ScrubBook(repository.path, repository.id) as book:
        before = book.state.last_pack if book.state.began_ns else -1
        result = verify_slice(repository, book, time_is_up=time_is_up)
        book.save()
        numbers = [int(path.stem, 16) for path in packs(repository)]
        read = [number for number in numbers if before < number <= book.state.last_pack]
        return result, not book.state.began_ns, read


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096 + 30] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


def test_slices_read_every_pack_once_and_every_snapshot(repository: Repository) -> None:
    """One pack at a time, and then one snapshot at a time; the slice after the last begins anew."""
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
    """What was rewritten has new numbers and is read; what is gone is missed by nobody."""
    one_slice(repository, 2)
    with repository.writer() as writer:
        writer.remove_snapshots([SnapshotId.parse("cs-000003")])
        writer.rewrite_pack(int(packs(repository)[2].stem, 16), lambda chunk: True)
        writer.drop_pack(int(packs(repository)[0].stem, 16))
        writer.rewrite_pack(int(packs(repository)[0].stem, 16), lambda chunk: True)
    add(repository, 5)
    flip(packs(repository)[-1])
    result, complete, _ = one_slice(repository, 1 << 30)
    assert complete
    assert str(packs(repository)[-1]) in {damage.file for damage in result.damages}


@pytest.mark.parametrize("kill", [False, True])
def test_damage_is_told_once_a_pass_and_not_hidden_by_a_kill(repository: Repository, kill: bool) -> None:
    """The slice that finds it says so; one that is killed before it could is done again."""
    flip(packs(repository)[1])
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
    """Torn, foreign, of another version: a pass too many does no harm."""
    one_slice(repository, 3)
    (repository.path / NAME).write_bytes(book)
    _, _, read = one_slice(repository, 1)
    assert read == [int(packs(repository)[0].stem, 16)]


def test_one_scrub_at_a_time(repository: Repository) -> None:
    """Two would tell each other's progress."""
    with ScrubBook(repository.path, repository.id), pytest.raises(Busy):
        ScrubBook(repository.path, repository.id)


def test_the_command(tmp_path: Path) -> None:
    """With plenty of time one run is a pass; with none it reads a pack; --restart begins anew; damage is 4."""
    made = CliRepository(tmp_path / "repo", tmp_path / "root")
    made.snapshot({b"a": content(2, 3), b"b": content(4, 3)})
    whole = made.run("verify", "--checksum", "--max-duration", "10m")
    assert whole.exit_code == 0, whole.output
    assert "completes a pass" in whole.stdout
    part = made.run("verify", "--checksum", "--max-duration", "0", "--json")
    assert part.exit_code == 0, part.output
    first = json.loads(part.stdout)["scrub"]
    assert not first["complete"]
    assert 0 < first["bytes_done"] <= first["bytes_total"]
    again = made.run("verify", "--all", "--checksum", "--max-duration", "0", "--restart", "--json")
    assert json.loads(again.stdout)["scrub"] == first
    made.run("verify", "--checksum", "--max-duration", "10m")
    for pack in sorted((made.path / "packs").iterdir()):
        flip(pack)
    damaged = made.run("verify", "--checksum", "--max-duration", "10m")
    assert damaged.exit_code == 4
    assert "damaged" in damaged.stdout
    assert made.run("check").exit_code == 4, "and the book disturbs nobody"


def test_what_does_not_go_together(tmp_path: Path) -> None:
    """A slice is of everything, by checksum."""
    made = CliRepository(tmp_path / "repo", tmp_path / "root")
    made.snapshot({b"a": b"1"})
    for arguments in (
        ["latest", "--checksum", "--max-duration", "1m"],
        ["--max-duration", "1m"],
        ["--all", "--restart"],
        ["--checksum", "--max-duration", "soon"],
    ):
        assert made.run("verify", *arguments).exit_code == 2, arguments
