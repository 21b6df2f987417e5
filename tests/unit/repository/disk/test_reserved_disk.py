"""Tests of the reserve on the repository's file system: what is refused, and what is given back."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.small_repository import noise
from support.stored import read_back, store

from ciuic.daemon.capture import space
from ciuic.daemon.capture.space import ReservedDisk, ReserveReached
from ciuic.maintenance.check import check
from ciuic.repository import Repository
from ciuic.repository.compression import Content
from ciuic.retention import MinFree
from ciuic.system.disk import Disk
from ciuic.system.disk_space import reserve_of
from ciuic.types import Snapshot, SnapshotDraft

MIB = 1 << 20
BLOCK = 4096


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    with Repository.create(tmp_path / "repo", block_size=BLOCK) as made:
        yield made


def on_small_disk(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, *, capacity: int, reserve: int
) -> Callable[[], Repository]:
    """Return how to open the repository on a file system of a size in bytes, and the reserve."""
    monkeypatch.setattr(space, "available_bytes", lambda path: capacity - repository.stored_bytes())
    monkeypatch.setattr(space, "total_bytes", lambda path: capacity)
    return lambda: Repository.open(repository.path, disk=ReservedDisk(str(repository.path), reserve))


def test_nothing_is_written_below_the_reserve(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reserve stays free whatever is stored, and the refusal says how much space there was."""
    opened = on_small_disk(repository, monkeypatch, capacity=32 * MIB, reserve=8 * MIB)
    with opened() as small, small.writer() as writer:
        with pytest.raises(OSError, match="No space left") as refused:
            store(writer, {b"file": noise(1, 48 * MIB)}, number=1)
        assert refused.value.errno == errno.ENOSPC
        assert 16 * MIB < repository.stored_bytes() <= 24 * MIB
        assert writer.give_back() > 16 * MIB
        assert repository.stored_bytes() == 0
    assert not check(repository).findings


def test_failed_capture_leaves_earlier_packs_unchanged(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed capture that appended to an earlier pack leaves that pack as it was, byte for byte."""
    before = {b"kept": noise(1, 6 * MIB)}
    with repository.writer() as writer:
        kept = store(writer, before, number=1).id
    packs = {path: path.read_bytes() for path in (repository.path / "packs").iterdir()}
    opened = on_small_disk(repository, monkeypatch, capacity=32 * MIB, reserve=8 * MIB)
    with opened() as small, small.writer(pack_bytes=12 * MIB) as writer:
        with pytest.raises(OSError, match="No space left"):
            store(writer, {b"new": noise(2, 64 * MIB)}, number=2)
        writer.give_back()
    assert {path: path.read_bytes() for path in (repository.path / "packs").iterdir()} == packs
    assert not check(repository, read_data=True).findings
    # Nothing that was given back counts as stored.
    with repository.writer() as writer:
        again = store(writer, {b"new": noise(2, 64 * MIB)}, number=3).id
    assert read_back(repository, again) == {b"new": noise(2, 64 * MIB)}
    assert read_back(repository, kept) == before


def test_committed_chunks_stay_after_a_refusal(repository: Repository) -> None:
    """Only chunks stored after the last commit are given back by a refusal."""
    with repository.writer() as writer:
        first = store(writer, {b"a": noise(1, 2 * MIB)}, number=1).id
        writer.put_chunk(noise(2, MIB))
        writer.flush()
        assert writer.give_back() >= MIB
    assert read_back(repository, first) == {b"a": noise(1, 2 * MIB)}
    assert not check(repository, read_data=True).findings


class Killed(BaseException):
    """The simulated death of the process."""


class MortalDisk(Disk):
    """Disk that, once armed, allows some operations and lets the process die in the next."""

    left = -1

    def _step(self) -> None:
        if self.left == 0:
            raise Killed
        self.left -= self.left > 0

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        self._step()
        super().unlink(path, dir_fd=dir_fd)

    def truncate(self, fd: int, size_bytes: int) -> None:
        self._step()
        super().truncate(fd, size_bytes)

    def sync_dir(self, path: str) -> None:
        self._step()
        super().sync_dir(path)


@pytest.mark.parametrize("operations", range(5))
def test_killed_while_it_gives_back(repository: Repository, operations: int) -> None:
    """Listed chunks are whole after a kill while giving back, and so is what the next capture reuses."""
    with repository.writer(pack_bytes=2 * MIB) as writer:
        kept = store(writer, {b"kept": noise(1, MIB)}, number=1).id
    disk = MortalDisk()
    with Repository.open(repository.path, disk=disk) as dying:
        writer = dying.writer(pack_bytes=2 * MIB)
        for number in range(3):
            writer.put_chunks([Content(noise(10 + number, MIB))])
            # One segment each, so that a pack is sealed and another is begun.
            writer.flush()
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
    """A commit is not refused for its own file, although others took the rest of the space."""
    opened = on_small_disk(repository, monkeypatch, capacity=64 * MIB, reserve=8 * MIB)
    with opened() as small, small.writer() as writer:
        finished = writer._snapshot_of

        def on_a_full_disk(draft: SnapshotDraft) -> Snapshot:
            monkeypatch.setattr(space, "available_bytes", lambda path: 0)
            return finished(draft)

        monkeypatch.setattr(writer, "_snapshot_of", on_a_full_disk)
        id_ = store(writer, {b"a": noise(1, MIB)}, number=1).id
    assert read_back(repository, id_) == {b"a": noise(1, MIB)}


def test_every_write_is_refused_with_a_reserve_larger_than_the_disk(tmp_path: Path) -> None:
    """Every write is refused with a reserve larger than the disk."""
    disk = ReservedDisk(str(tmp_path), 1 << 62)
    with pytest.raises(ReserveReached):
        disk.check()
    assert disk.refused is not None
    assert disk.room_bytes < 0


@pytest.mark.parametrize(("reserve", "capacity"), [(0, 8 * MIB), (8 * MIB, 0)])
def test_writes_without_a_reserve_are_not_refused(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, reserve: int, capacity: int
) -> None:
    """Writes are not refused beforehand without a reserve, or a known size of the file system."""
    opened = on_small_disk(repository, monkeypatch, capacity=capacity, reserve=reserve)
    with opened() as small, small.writer() as writer:
        id_ = store(writer, {b"file": noise(1, 12 * MIB)}, number=1).id
    assert read_back(repository, id_) == {b"file": noise(1, 12 * MIB)}


@pytest.mark.parametrize(
    ("setting", "swing", "expected", "reason"),
    [
        (None, 0, 50, "5% of"),
        (None, 50, 50, "5% of"),
        (None, 51, 51, "took and gave back"),
        (None, 250, 250, "took and gave back during the last interval"),
        (
            None,
            900,
            250,
            "900 B that others took and gave back during the last interval, at most 25% of 1000 B",
        ),
        (MinFree(share=0.2), 400, 200, "20% of"),
        (MinFree(size_bytes=7), 400, 7, "[repository] reserve"),
        (MinFree(), 400, 0, "[repository] reserve"),
    ],
)
def test_the_default_is_a_share_or_a_larger_swing_up_to_a_limit(
    setting: MinFree | None, swing: int, expected: int, reason: str
) -> None:
    """The default reserve is the larger of a share of the disk and a swing up to a quarter of it, and says which."""
    reserve = reserve_of(setting, 1000, swing)
    assert reserve.size_bytes == expected
    assert reason in reserve.reason
