"""Power cuts at every disk operation in turn: every promised snapshot is there and reads back."""

from __future__ import annotations

import copy
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.power_disk import PowerCut, PowerDisk
from support.small_repository import BLOCK, content, make_snapshot, read_files

from ciuic.repository import Repository, Walker
from ciuic.repository.index_database import INDEX_NAME, discard
from ciuic.types import ChunkId, SnapshotId

VARIANTS = int(os.environ.get("CIUIC_POWER_CUTS", "3"))
"""Disk images tried for each power cut. The first holds nothing that was not synced."""
Files = dict[bytes, bytes]


class Promises:
    """Snapshots and marks that returned calls have promised."""

    def __init__(self) -> None:
        self.snapshots: dict[str, Files] = {}
        self.maybe: dict[str, Files] = {}
        """Asked for (or asked to be removed), and not yet answered."""
        self.held: set[str] = set()


def _commit(promises: Promises, repository: Repository, id_: str, files: Files) -> None:
    with repository.writer(pack_bytes=40_000) as writer:
        promises.maybe[id_] = files
        make_snapshot(writer, id_, files, time_ns=len(promises.snapshots) + 1)
        promises.snapshots[id_] = promises.maybe.pop(id_)


def _live(repository: Repository) -> set[ChunkId]:
    walker = Walker(repository)
    return {
        reached.id
        for id_ in repository.snapshots.ids()
        for reached in walker.walk(repository.snapshots.load(id_))
    }


def _scenario(promises: Promises, repository: Repository) -> None:
    """Take snapshots, set marks, remove one, collect all garbage, and take one more snapshot."""
    _commit(promises, repository, "cs-000001", {b"a": content(2, 5), b"b": content(3, 4)})
    _commit(promises, repository, "cs-000002", {b"a": content(2, 5), b"c": content(4, 9)})
    _commit(promises, repository, "cs-000003", {b"d": content(6, 3)})
    with repository.writer(pack_bytes=40_000) as writer:
        writer.set_marks(SnapshotId("cs-000002"), hold=True, reason="why")
        promises.held.add("cs-000002")
        promises.maybe["cs-000001"] = promises.snapshots.pop("cs-000001")
        writer.remove_snapshots([SnapshotId("cs-000001")])
        del promises.maybe["cs-000001"]
        live = _live(repository)
        for pack in repository.packs():
            writer.rewrite_pack(pack.number, live)
    _commit(promises, repository, "cs-000004", {b"a": content(2, 5), b"e": content(8, 6)})


def _check(promises: Promises, top: Path) -> None:
    with Repository.open(top) as repository:
        listed = {str(id_) for id_ in repository.snapshots.ids()}
        assert promises.snapshots.keys() <= listed <= promises.snapshots.keys() | promises.maybe.keys()
        assert not repository.snapshots.unreadable()
        for id_ in listed:
            expected = promises.snapshots.get(id_) or promises.maybe[id_]
            assert read_files(repository, id_) == expected
        for id_ in promises.held & listed:
            assert repository.snapshots.load(SnapshotId(id_)).held


def _survives(made: Promises, top: Path) -> None:
    """Open as readers, as a writer, and as readers again; each finds what was promised."""
    promises = copy.deepcopy(made)
    _check(promises, top)
    with Repository.open(top) as repository:
        # Store all contents once more: a chunk that the index claims wrongly would be missing afterwards.
        sizes = {2: 5, 3: 4, 4: 9, 6: 3, 8: 6, 10: 4}
        _commit(
            promises, repository, "cs-00000a", {b"%d" % seed: content(seed, n) for seed, n in sizes.items()}
        )
        assert repository.check_index() == []
    _check(promises, top)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Return a directory in memory if there is one: thousands of fsyncs on a disk prove nothing more."""
    where = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(prefix="ciuic-power-", dir=where) as path:
        yield Path(path)


@pytest.fixture
def fresh(place: Path) -> Path:
    path = place / "fresh"
    Repository.create(path, block_size=BLOCK).close()
    return path


def _run(fresh: Path, top: Path, disk_of: type[PowerDisk], **options: object) -> tuple[Promises, PowerDisk]:
    shutil.copytree(fresh, top)
    disk = disk_of(top, **options)  # type: ignore[arg-type]
    promises = Promises()
    try:
        with Repository.open(top, disk=disk) as repository:
            _scenario(promises, repository)
    except (PowerCut, OSError):
        pass
    return promises, disk


def _number_of_calls(fresh: Path, top: Path) -> int:
    promises, disk = _run(fresh, top, PowerDisk)
    disk.dispose()
    assert len(promises.snapshots) == 3, "the scenario itself must succeed"
    return disk.calls


def test_power_cut_at_every_operation(fresh: Path, place: Path) -> None:
    """Each promised snapshot is whole after a power cut at any operation.

    The index is kept, lost or of an earlier state.
    """
    calls = _number_of_calls(fresh, place / "count")
    assert calls > 60
    for stop_at in range(1, calls + 1):
        top = place / "run"
        promises, disk = _run(fresh, top, PowerDisk, stop_at=stop_at)
        for variant in range(VARIANTS):
            after = place / "after"
            disk.after_power_cut(after, random.Random(stop_at * 10 + variant) if variant else None)
            discard(f"{after}/{INDEX_NAME}")
            # The index of the moment of the cut may claim more than the disk holds.
            if (stop_at + variant) % 2:
                for file in top.glob(INDEX_NAME + "*"):
                    shutil.copy(file, after)
            try:
                _survives(promises, after)
            except BaseException as error:
                error.add_note(f"stop_at={stop_at} variant={variant}") if hasattr(error, "add_note") else None
                raise
            shutil.rmtree(after)
        disk.dispose()
        shutil.rmtree(top)


@pytest.mark.parametrize(
    "stay_full",
    [pytest.param(False, id="one-error"), pytest.param(True, id="disk-stays-full", marks=pytest.mark.full)],
)
def test_an_error_at_every_operation(fresh: Path, place: Path, stay_full: bool) -> None:
    """Each promised snapshot is whole after ENOSPC at any operation, once or from then on; work continues."""
    calls = _number_of_calls(fresh, place / "count")
    for stop_at in range(1, calls + 1):
        top = place / "run"
        promises, disk = _run(fresh, top, PowerDisk, stop_at=stop_at, error=OSError, stay_full=stay_full)
        disk.dispose()
        try:
            _survives(promises, top)
        except BaseException as error:
            error.add_note(f"stop_at={stop_at}") if hasattr(error, "add_note") else None
            raise
        shutil.rmtree(top)
