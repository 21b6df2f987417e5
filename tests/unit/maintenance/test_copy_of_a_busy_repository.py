"""`ciuic copy`: a copy of a repository in use lists only what it can restore, whenever it ends."""

from __future__ import annotations

import os
import random
import shutil
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.power_disk import PowerCut, PowerDisk
from support.small_repository import BLOCK, make_snapshot, read_files

from ciuic.errors import Busy, DestinationExists, UsageError
from ciuic.maintenance.copying import copy_repository
from ciuic.maintenance.prune import forget, prune
from ciuic.maintenance.verify import verify_snapshots
from ciuic.repository import Repository
from ciuic.system.disk import Disk
from ciuic.types import SnapshotId

OLD = {b"old": os.urandom(20 * BLOCK)}


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """A repository in which a prune has to move the chunks of a held snapshot to another pack."""
    with Repository.create(tmp_path / "r", block_size=BLOCK) as made:
        _take(made, "cs-00000a", OLD)
        with made.writer() as writer:
            writer.set_marks(SnapshotId("cs-00000a"), hold=True, reason="kept")
        _take(made, "cs-00000b", {b"new": os.urandom(60 * BLOCK)}, time_ns=2)
    return Repository.open(tmp_path / "r")


def _take(repository: Repository, name: str, files: dict[bytes, bytes], *, time_ns: int = 1) -> None:
    with repository.writer(pack_bytes=100 * BLOCK) as writer:
        make_snapshot(writer, name, files, time_ns=time_ns)


def _is_sound(target: Path) -> list[str]:
    """Check every byte of what a copy lists, and the hold; return the ids."""
    if not Repository.exists(target):
        return []
    with Repository.open(target) as copy:
        assert not copy.snapshots.unreadable()
        result = verify_snapshots(copy, copy.snapshots.ids(), checksum=True)
        # A copy that was not completed may have one configuration, and an index of packs that are gone.
        damages = [one for one in result.damages if one.kind not in ("config", "index")]
        assert not damages, damages
        assert all(one.held for one in copy.snapshots.list() if one.id == "cs-00000a")
        return sorted(copy.snapshots.ids())


def test_snapshots_are_taken_and_nothing_is_pruned_while_a_copy_is_made(
    repository: Repository, tmp_path: Path
) -> None:
    """The copy is that of its begin: with what was forgotten meanwhile, without what was taken meanwhile."""
    steps: list[int] = []

    def meanwhile(_what: str, done: int, _total: int) -> None:
        if not steps:
            _take(repository, "cs-00000c", {b"later": os.urandom(9 * BLOCK)}, time_ns=3)
            forget(repository, [SnapshotId("cs-00000b")])
            with pytest.raises(Busy, match="ciuic copy"):
                prune(repository)
        steps.append(done)

    made = copy_repository(repository, tmp_path / "c", progress=meanwhile)
    assert steps
    assert (made.snapshots, made.removed, made.kept_packs) == (2, 0, 0)
    assert _is_sound(tmp_path / "c") == ["cs-00000a", "cs-00000b"]
    with Repository.open(tmp_path / "c") as copy:
        assert read_files(copy, "cs-00000a") == OLD
        assert copy.check_index() == []
    # The same copy again, now of a repository that was pruned: the packs of the held snapshot are others.
    prune(repository)
    again = copy_repository(repository, tmp_path / "c")
    assert (again.snapshots, again.removed) == (2, 1)
    assert _is_sound(tmp_path / "c") == ["cs-00000a", "cs-00000c"]
    assert set(os.listdir(tmp_path / "c" / "packs")) == set(os.listdir(tmp_path / "r" / "packs"))
    last = copy_repository(repository, tmp_path / "c")
    assert (last.copied_packs, last.copied_bytes) == (0, 0)


@pytest.mark.parametrize("error", [PowerCut, OSError])
@pytest.mark.parametrize("first", [True, False])
def test_a_copy_that_ends_anywhere_lists_only_what_it_can_restore(
    repository: Repository, tmp_path: Path, error: type[BaseException], first: bool
) -> None:
    """After a power cut or an error at every step of a copy, what it lists can be read; the next one completes it."""
    base, target, left = tmp_path / "base", tmp_path / "c", tmp_path / "left"
    if first:
        for name in ("packs", "snapshots", "marks"):
            (base / name).mkdir(parents=True)
        base.chmod(0o700)
    else:
        copy_repository(repository, base)
        # Moved chunks, a removed snapshot and a new one.
        _take(repository, "cs-00000c", {b"n": os.urandom(50 * BLOCK)}, time_ns=3)
        forget(repository, [SnapshotId("cs-00000b")])
        assert prune(repository).rewritten_packs
    ended = 0
    for step in count(1):
        for place in (target, left):
            shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(base, target)
        disk = PowerDisk(target, stop_at=step, error=error)
        try:
            copy_repository(repository, target, disk=disk)
        except error:
            ended += 1
            if error is PowerCut:
                disk.after_power_cut(left, random.Random(step) if step % 2 else None)
            else:
                shutil.copytree(target, left)
            _is_sound(left)
            if step % 8 == 0:
                left.chmod(0o700)
                copy_repository(repository, left)
                assert len(_is_sound(left)) == 2
            continue
        else:
            disk.after_power_cut(left, None)
        finally:
            disk.dispose()
        break
    assert ended > 10
    assert _is_sound(left) == _is_sound(target) == sorted(repository.snapshots.ids())


def test_the_name_of_a_new_copy_is_durable(repository: Repository, tmp_path: Path) -> None:
    """The directory in which a copy is made is synced, or a power cut would take the copy as a whole."""
    disk = Mock(wraps=Disk())
    copy_repository(repository, tmp_path / "c", disk=disk)
    disk.sync_dir.assert_any_call(str(tmp_path))


def test_only_an_empty_directory_or_a_copy_is_written_to(repository: Repository, tmp_path: Path) -> None:
    """Another repository, a directory with files, and a place within the repository are refused."""
    Repository.create(tmp_path / "other").close()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "f").write_text("mine")
    for name in ("other", "full"):
        with pytest.raises(DestinationExists):
            copy_repository(repository, tmp_path / name)
    assert os.listdir(tmp_path / "full") == ["f"]
    for place in (tmp_path / "r", tmp_path / "r" / "copy", tmp_path):
        with pytest.raises(UsageError, match="in one another"):
            copy_repository(repository, place)


def test_a_pack_that_has_changed_is_copied_again(repository: Repository, tmp_path: Path) -> None:
    """A pack that was not full at the first copy has all chunks in the second; one of the same size is replaced."""
    copy_repository(repository, tmp_path / "c")
    _take(repository, "cs-00000d", {b"more": os.urandom(3 * BLOCK)}, time_ns=4)
    assert copy_repository(repository, tmp_path / "c").copied_packs
    for pack in (tmp_path / "c" / "packs").iterdir():
        pack.write_bytes(bytes(pack.stat().st_size))
    copy_repository(repository, tmp_path / "c")
    assert _is_sound(tmp_path / "c") == ["cs-00000a", "cs-00000b", "cs-00000d"]
