"""Tests that a writer scans the whole repository only after files came, went or grew."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from support.stored import read_back, store

from ciuic.repository import Repository
from ciuic.repository import index_database as seen_module
from ciuic.repository.pack_directory import Packs
from ciuic.repository.snapshots import SnapshotStore
from ciuic.repository.writer_index import WriterIndex
from ciuic.types import SnapshotId

BLOCK = 4096


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Make three snapshots in several packs, the last of each kind unsealed, opened until nothing is new."""
    where = tmp_path / "repo"
    with Repository.create(where, block_size=BLOCK) as repository:
        for number in range(3):
            with repository.writer(pack_bytes=8 * BLOCK) as writer:
                store(writer, {b"a": os.urandom(12 * BLOCK)}, number=number)
        settle(repository)
    return where


def settle(repository: Repository) -> None:
    """Wait until the clock of the file system has moved on, and a writer has scanned everything."""
    for name in ("packs", "snapshots", "marks"):
        assert seen_module.settled_ns(f"{repository.path}/{name}", wait=True)
    with repository.writer():
        pass


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the directories that were listed as a whole."""
    found: list[str] = []

    def watched(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            found.append(name)
            return real(*arguments)

        return call

    monkeypatch.setattr(Packs, "sizes", watched("packs", Packs.sizes))
    monkeypatch.setattr(Packs, "numbers", watched("packs", Packs.numbers))
    monkeypatch.setattr(SnapshotStore, "names", watched("snapshots", SnapshotStore.names))
    monkeypatch.setattr(SnapshotStore, "signatures", watched("marks", SnapshotStore.signatures))
    return found


def test_nothing_is_listed_when_nothing_changed(path: Path, looks: list[str]) -> None:
    """Directories are not listed while nothing changes, at any opening, nor for the newest snapshot."""
    for _ in range(3):
        with Repository.open(path) as repository:
            with repository.writer():
                pass
            newest = repository.snapshots.latest()
            assert newest is not None
            assert newest.id == "cs-000002"
    assert looks == []


def test_a_commit_is_no_reason_to_list_snapshots(path: Path, looks: list[str]) -> None:
    """A writer's own commit makes the next writer list nothing, and find the snapshot."""
    with Repository.open(path) as repository:
        with repository.writer() as writer:
            store(writer, {b"a": b"small"}, number=7)
            writer.set_marks(SnapshotId("cs-000001"), hold=True)
        looks.clear()
        with repository.writer():
            pass
        newest = repository.snapshots.latest()
        assert newest is not None
        assert newest.id == "cs-000007"
        assert not {"snapshots", "marks"} & set(looks)


def lose_a_pack(path: Path) -> None:
    sorted((path / "packs").iterdir())[0].unlink()


def add_a_pack(path: Path) -> None:
    packs = sorted((path / "packs").iterdir())
    shutil.copy(packs[0], path / "packs" / f"{999:016x}.pack")


def let_a_pack_grow(path: Path) -> None:
    with Repository.open(path) as repository:
        number = [pack.number for pack in repository.packs() if not pack.sealed][-1]
    with (path / "packs" / f"{number:016x}.pack").open("ab") as stream:
        stream.write(b"torn")


def copy_it(path: Path) -> None:
    shutil.copytree(path / "packs", path / "copied")
    shutil.rmtree(path / "packs")
    (path / "copied").rename(path / "packs")


def lose_the_index(path: Path) -> None:
    for file in path.glob("index.sqlite*"):
        file.unlink()


@pytest.mark.parametrize("change", [lose_a_pack, add_a_pack, let_a_pack_grow, copy_it, lose_the_index])
def test_all_packs_are_looked_at_when_something_may_be_other(
    path: Path, looks: list[str], change: Callable[[Path], None]
) -> None:
    """A pack removed, added or grown, a copied repository and a new index cause one scan each."""
    change(path)
    looks.clear()
    with Repository.open(path) as repository:
        with repository.writer():
            pass
        assert "packs" in looks
        assert not [line for line in repository.check_index() if "cover" in line]
        settle(repository)
        looks.clear()
        with repository.writer():
            pass
        assert looks == []


def test_a_snapshot_that_went_by_itself_is_noticed(path: Path, looks: list[str]) -> None:
    """A snapshot file removed by others is noticed by the next writer, and is no base any more."""
    (path / "snapshots" / "cs-000002").unlink()
    with Repository.open(path) as repository:
        newest = repository.snapshots.latest()
        assert newest is not None
        assert newest.id == "cs-000001"
        with repository.writer():
            pass
        assert "snapshots" in looks
        assert repository.snapshots.vanished() == []


def test_index_kept_incomplete_by_a_full_disk_is_completed(
    path: Path, monkeypatch: pytest.MonkeyPatch, looks: list[str]
) -> None:
    """The next writer looks for what a full disk kept out of the index."""

    def full(index: WriterIndex, event: str, _change: object) -> bool:
        index._failed(event, sqlite3.OperationalError("database or disk is full"))
        return False

    content = os.urandom(20 * BLOCK)
    with Repository.open(path) as repository:
        with monkeypatch.context() as patch:
            patch.setattr(WriterIndex, "_try", full)
            with repository.writer() as writer:
                snapshot = store(writer, {b"b": content}, number=8)
        looks.clear()
        with repository.writer() as writer:
            assert "packs" in looks
            assert store(writer, {b"b": content}, number=9).new_bytes < BLOCK
        assert read_back(repository, snapshot.id) == {b"b": content}
        assert repository.check_index() == []


def test_a_time_counts_only_when_later_changes_must_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory time is trusted only if later changes must have another one, a clock tick apart."""
    found_ns = seen_module.changed_ns(str(tmp_path))
    monkeypatch.setattr(seen_module.time, "clock_gettime_ns", lambda _clock: found_ns)
    assert seen_module.settled_ns(str(tmp_path), wait=True) == 0
    monkeypatch.setattr(seen_module.time, "clock_gettime_ns", lambda _clock: found_ns + 1)
    assert seen_module.settled_ns(str(tmp_path), wait=False) == found_ns
