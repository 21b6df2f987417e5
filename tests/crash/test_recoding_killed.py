"""Recoding, killed or failed by the disk at every operation: every snapshot reads back exactly."""

from __future__ import annotations

import contextlib
import errno
import random
import shutil
from pathlib import Path

import pytest
from support.failing_disk import FailingDisk, Killed
from support.power_disk import PowerCut, PowerDisk
from support.raw_states import BLOCK, chunks_of, content_of, drifting, recode, save_state

from ciuic.maintenance.check import check
from ciuic.maintenance.prune import prune
from ciuic.maintenance.sweep import Thresholds
from ciuic.repository import Repository
from ciuic.repository.index_database import INDEX_NAME, discard
from ciuic.types import SnapshotId

EAGER = Thresholds(unused_share=0.0, pack_dead_share=0.0)
STATES = list(drifting(4, 8 * BLOCK))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[SnapshotId]]:
    """Provide four states, of which the first rests on the second already."""
    path = tmp_path_factory.mktemp("recode-crash") / "repo"
    with Repository.create(path, block_size=BLOCK) as repository:
        ids = [save_state(repository, state, number) for number, state in enumerate(STATES)]
        assert recode(repository, ids[0], ids[1]) == 8
    return path, ids


def recode_two(repository: Repository, ids: list[SnapshotId]) -> None:
    for one, after in ((1, 2), (2, 3)):
        recode(repository, ids[one], ids[after])


def assert_whole(path: Path, ids: list[SnapshotId], *, when: str) -> None:
    with Repository.open(path) as repository:
        assert [content_of(repository, id_) for id_ in ids] == STATES, when


def assert_healthy(path: Path, ids: list[SnapshotId], *, when: str, torn: bool = False) -> None:
    """Assert that all reads back at once, after the same work undisturbed, and after a sweep; and is small.

    ``torn``: the torn end of a pack may be left, and reported.
    """
    assert_whole(path, ids, when=when)
    with Repository.open(path) as repository:
        recode_two(repository, ids)
    assert_whole(path, ids, when=when)
    with Repository.open(path) as repository:
        assert [len(repository.chunks.locate_all(chunks_of(repository, id_)[0])) - 1 for id_ in ids] == [
            3,
            2,
            1,
            0,
        ], when
        prune(repository, None, thresholds=EAGER)
        assert torn or not check(repository, read_data=True).damaged, when
    assert_whole(path, ids, when=when)


@pytest.mark.parametrize(
    "failure",
    [
        Killed(),
        pytest.param(OSError(errno.ENOSPC, "No space left on device"), marks=pytest.mark.full),
        pytest.param(OSError(errno.EIO, "I/O"), marks=pytest.mark.full),
    ],
)
def test_recoding_torn_at_any_operation_damages_no_snapshot(
    tmp_path: Path, original: tuple[Path, list[SnapshotId]], failure: BaseException
) -> None:
    """Recoding with the nth operation torn and all later ones failing, for every n, damages no snapshot."""
    source, ids = original
    operation, finished = 0, False
    while not finished:
        operation += 1
        path = tmp_path / f"repo-{operation}"
        shutil.copytree(source, path)
        disk = FailingDisk(operation, failure)
        # A reader that was open before goes on.
        with Repository.open(path) as reader:
            assert content_of(reader, ids[1]) == STATES[1]
            with Repository.open(path, disk=disk) as repository, contextlib.suppress(type(failure)):
                recode_two(repository, ids)
            assert [content_of(reader, id_) for id_ in ids] == STATES
        finished = disk.operations < operation
        assert_healthy(path, ids, when=f"operation {operation}")
        shutil.rmtree(path)
    assert operation > 12


@pytest.mark.parametrize("index", [pytest.param("kept", marks=pytest.mark.full), "lost"])
def test_power_cut_at_every_operation(
    short_tmp: Path, original: tuple[Path, list[SnapshotId]], index: str
) -> None:
    """A power cut at the nth operation of recoding, for every n, leaves every snapshot whole."""
    source, ids = original
    operation, finished = 0, False
    while not finished:
        operation += 1
        running, after = short_tmp / "running", short_tmp / "after"
        shutil.copytree(source, running)
        disk = PowerDisk(running, stop_at=operation)
        with Repository.open(running, disk=disk) as repository, contextlib.suppress(PowerCut):
            recode_two(repository, ids)
        finished = disk.calls < operation
        disk.after_power_cut(after, random.Random(operation) if operation % 3 else None)
        discard(str(after / INDEX_NAME))
        if index == "kept":
            for file in running.glob(INDEX_NAME + "*"):
                shutil.copy(file, after)
        # Without the index, the torn end of a pack cannot be told from promised data: it stays.
        assert_healthy(after, ids, when=f"operation {operation}", torn=index == "lost")
        shutil.rmtree(after)
        disk.dispose()
        shutil.rmtree(running)
    assert operation > 12
