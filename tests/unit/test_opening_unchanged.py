"""Who opens the repository for writing looks at all of it only when something came, went or grew."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from support.stored import read_back, store

from ciuic.repository import Repository
from ciuic.repository import seen as seen_module
from ciuic.repository.packs import Packs
from ciuic.repository.snapshots import SnapshotStore
from ciuic.repository.writerindex import WriterIndex
from ciuic.types import SnapshotId

BLOCK = 4096


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Three snapshots in several packs, the last of each kind not sealed, opened until nothing is new."""
    where = tmp_path / "repo"
    with Repository.create(where, block_size=BLOCK) as repository:
        for number in range(3):
            with repository.writer(pack_bytes=8 * BLOCK) as writer:
                store(writer, {b"a": os.urandom(12 * BLOCK)}, number=number)
        settle(repository)
    return where


def settle(repository: Repository) -> None:
    """Until the clock of the file system has moved on, and a writer has seen everything."""
    for name in ("packs", "snapshots", "marks"):
        assert seen_module.settled_ns(f"{repository.path}/{name}", wait=True)
    with repository.writer():
        pass


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was listed as a whole."""
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
    """Neither packs nor snapshots nor marks, be it the first or the hundredth opening; nor to find the newest snapshot."""
    for _ in range(3):
        with Repository.open(path) as repository:
            with repository.writer():
                pass
            newest = repository.snapshots.latest()
            assert newest is not None
            assert newest.id == "cs-000002"
    assert looks == []


def test_a_commit_is_no_reason_to_list_snapshots(path: Path, looks: list[str]) -> None:
    """What a writer did itself it knows; the next one lists nothing, and finds it."""
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
    """A pack that went, came or grew, a copy of the repository, a new index: each is looked at once, and no more after that."""
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
    """Its row goes with the next writer, and nobody builds on it."""
    (path / "snapshots" / "cs-000002").unlink()
    with Repository.open(path) as repository:
        newest = repository.snapshots.latest()
        assert newest is not None
        assert newest.id == "cs-000001"
        with repository.writer():
            pass
        assert "snapshots" in looks
        assert repository.snapshots.vanished() == []


def test_a_full_disk_leaves_no_trust(path: Path, monkeypatch: pytest.MonkeyPatch, looks: list[str]) -> None:
    """What the index could not be told is looked for by the next writer."""

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
    """Within one tick of the clock two changes have the same time: such a time is not relied on."""
    found_ns = seen_module.changed_ns(str(tmp_path))
    monkeypatch.setattr(seen_module.time, "clock_gettime_ns", lambda _clock: found_ns)
    assert seen_module.settled_ns(str(tmp_path), wait=True) == 0
    monkeypatch.setattr(seen_module.time, "clock_gettime_ns", lambda _clock: found_ns + 1)
    assert seen_module.settled_ns(str(tmp_path), wait=False) == found_ns
