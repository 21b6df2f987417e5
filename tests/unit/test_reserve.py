"""The reserve on the repository's file system: what is refused, and what is given back."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.stored import read_back, store

from ciuic.check import check
from ciuic.disk_space import reserve_of
from ciuic.repository import Disk, Repository, reserved_disk
from ciuic.repository.packing import Content
from ciuic.repository.reserved_disk import ReservedDisk, ReserveReached
from ciuic.retention import MinFree
from ciuic.types import Snapshot, SnapshotDraft

MIB = 1 << 20
BLOCK = 4096


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    with Repository.create(tmp_path / "repo", block_size=BLOCK) as made:
        yield made


def cramped(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, *, capacity: int, reserve: int
) -> Callable[[], Repository]:
    """How to open the repository on a file system of that many bytes, of which so many are to stay free."""
    monkeypatch.setattr(reserved_disk, "available_bytes", lambda path: capacity - repository.stored_bytes())
    monkeypatch.setattr(reserved_disk, "total_bytes", lambda path: capacity)
    return lambda: Repository.open(repository.path, disk=ReservedDisk(str(repository.path), reserve))


def test_nothing_is_written_below_the_reserve(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is stored until the refusal, the reserve stays free; the refusal says how much there was."""
    opened = cramped(repository, monkeypatch, capacity=32 * MIB, reserve=8 * MIB)
    with opened() as small, small.writer() as writer:
        with pytest.raises(OSError, match="No space left") as refused:
            store(writer, {b"file": noise(1, 48 * MIB)}, number=1)
        assert refused.value.errno == errno.ENOSPC
        assert 16 * MIB < repository.stored_bytes() <= 24 * MIB
        assert writer.give_back() > 16 * MIB
        assert repository.stored_bytes() == 0
    assert not check(repository).findings


def test_what_was_there_before_stays(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed capture that went on with a pack of an earlier one leaves that pack as it was, byte for byte."""
    before = {b"kept": noise(1, 6 * MIB)}
    with repository.writer() as writer:
        kept = store(writer, before, number=1).id
    packs = {path: path.read_bytes() for path in (repository.path / "packs").iterdir()}
    opened = cramped(repository, monkeypatch, capacity=32 * MIB, reserve=8 * MIB)
    with opened() as small, small.writer(pack_bytes=12 * MIB) as writer:
        with pytest.raises(OSError, match="No space left"):
            store(writer, {b"new": noise(2, 64 * MIB)}, number=2)
        writer.give_back()
    assert {path: path.read_bytes() for path in (repository.path / "packs").iterdir()} == packs
    assert not check(repository, read_data=True).findings
    with repository.writer() as writer:  # nothing that was given back is taken to be stored
        again = store(writer, {b"new": noise(2, 64 * MIB)}, number=3).id
    assert read_back(repository, again) == {b"new": noise(2, 64 * MIB)}
    assert read_back(repository, kept) == before


def test_what_was_committed_stays(repository: Repository) -> None:
    """Only what came after the last commit is given back."""
    with repository.writer() as writer:
        first = store(writer, {b"a": noise(1, 2 * MIB)}, number=1).id
        writer.put_chunk(noise(2, MIB))
        writer.flush()
        assert writer.give_back() >= MIB
    assert read_back(repository, first) == {b"a": noise(1, 2 * MIB)}
    assert not check(repository, read_data=True).findings


class Killed(BaseException):
    """The process is gone."""


class MortalDisk(Disk):
    """From the moment it is armed on it does so many more operations, and then the process dies in the next."""

    left = -1

    def _step(self) -> None:
        if self.left == 0:
            raise Killed
        self.left -= self.left > 0

    def unlink(self, path: str) -> None:
        self._step()
        super().unlink(path)

    def truncate(self, fd: int, size_bytes: int) -> None:
        self._step()
        super().truncate(fd, size_bytes)

    def sync_dir(self, path: str) -> None:
        self._step()
        super().sync_dir(path)


@pytest.mark.parametrize("operations", range(5))
def test_killed_while_it_gives_back(repository: Repository, operations: int) -> None:
    """What is listed is whole, and what the next capture takes to be stored is stored."""
    with repository.writer(pack_bytes=2 * MIB) as writer:
        kept = store(writer, {b"kept": noise(1, MIB)}, number=1).id
    disk = MortalDisk()
    with Repository.open(repository.path, disk=disk) as dying:
        writer = dying.writer(pack_bytes=2 * MIB)
        for number in range(3):
            writer.put_chunks([Content(noise(10 + number, MIB))])
            writer.flush()  # one segment each, so that a pack is sealed and another is begun
        disk.left = operations
        try:
            writer.give_back()
        except Killed:
            pass
        else:
            assert operations == 4
        disk.left = -1
        writer.close()
    assert not check(repository, read_data=True).damaged
    with repository.writer() as writer:
        ids = [store(writer, {b"f": noise(10 + number, MIB)}, number=5 + number).id for number in range(3)]
    with Repository.open(repository.path) as fresh:
        assert read_back(fresh, kept) == {b"kept": noise(1, MIB)}
        for number, id_ in enumerate(ids):
            assert read_back(fresh, id_) == {b"f": noise(10 + number, MIB)}
        assert not check(fresh, read_data=True).damaged


def test_a_commit_is_never_refused_for_its_own_file(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others took the rest while the last file was stored: the snapshot is made all the same."""
    opened = cramped(repository, monkeypatch, capacity=64 * MIB, reserve=8 * MIB)
    with opened() as small, small.writer() as writer:
        finished = writer._finished

        def on_a_full_disk(draft: SnapshotDraft) -> Snapshot:
            monkeypatch.setattr(reserved_disk, "available_bytes", lambda path: 0)
            return finished(draft)

        monkeypatch.setattr(writer, "_finished", on_a_full_disk)
        id_ = store(writer, {b"a": noise(1, MIB)}, number=1).id
    assert read_back(repository, id_) == {b"a": noise(1, MIB)}


def test_check_counts_what_is_wanted(tmp_path: Path) -> None:
    """A reserve of more than there is refuses everything."""
    disk = ReservedDisk(str(tmp_path), 1 << 62)
    with pytest.raises(ReserveReached):
        disk.check()
    assert disk.refused is not None
    assert disk.room_bytes < 0


@pytest.mark.parametrize(("reserve", "capacity"), [(0, 8 * MIB), (8 * MIB, 0)])
def test_where_there_is_nothing_to_keep(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, reserve: int, capacity: int
) -> None:
    """Without a reserve, and where a file system does not say how large it is, nothing is refused beforehand."""
    opened = cramped(repository, monkeypatch, capacity=capacity, reserve=reserve)
    with opened() as small, small.writer() as writer:
        id_ = store(writer, {b"file": noise(1, 12 * MIB)}, number=1).id
    assert read_back(repository, id_) == {b"file": noise(1, 12 * MIB)}


@pytest.mark.parametrize(
    ("setting", "growth", "expected", "reason"),
    [
        (None, 0, 50, "5% of"),
        (None, 25, 50, "5% of"),
        (None, 26, 52, "twice the"),
        (MinFree(share=0.2), 400, 200, "20% of"),
        (MinFree(size_bytes=7), 400, 7, "[repository] reserve"),
        (MinFree(), 400, 0, "[repository] reserve"),
    ],
)
def test_the_default_is_the_larger_of_a_share_and_twice_the_growth(
    setting: MinFree | None, growth: int, expected: int, reason: str
) -> None:
    reserve = reserve_of(setting, 1000, growth)
    assert reserve.size_bytes == expected
    assert reason in reserve.reason
