"""Trainings killed at any instant, with their newest snapshots damaged, end as an uninterrupted run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import training_trials as trials
from support.tiny_training import Model
from support.until import until

from ciuic import SnapshotManager
from ciuic.repository import Repository
from ciuic.training import NoUsableSnapshot

KILLS = 10


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trials.uninterrupted(tmp_path_factory.mktemp("whole"))


@pytest.mark.slow
@pytest.mark.parametrize("damage", [False, pytest.param(True, marks=pytest.mark.full)])
def test_killed_at_random_instants_it_ends_with_the_same_bits(
    tmp_path: Path, reference: dict[str, Any], damage: bool
) -> None:
    """SIGKILL to the trainer's whole session at random instants leaves a run that ends with the same bits.

    The writer, in a session of its own, finishes or leaves nothing behind.
    """
    choose = random.Random(7 + damage)
    save_dir, result = tmp_path / "snapshots", tmp_path / "result"
    damaged = 0
    if damage:
        # On a busy machine all random instants may come before the second save, and a lone snapshot is not damaged.
        trials.kill_one(save_dir, result, choose, snapshots=2)
        damaged += trials.flip(save_dir, choose)
    for _ in range(KILLS):
        trials.kill_one(save_dir, result, choose)
        damaged += damage and trials.flip(save_dir, choose)
    found = trials.finish(trials.begin(save_dir, result), result)
    assert found["digest"] == reference["digest"]
    assert found["losses"] == reference["losses"]
    assert damaged or not damage, "no snapshot was damaged, so this says nothing"


def test_a_save_that_was_staged_is_finished_after_the_trainer_is_killed(tmp_path: Path) -> None:
    """A staged save is committed although the trainer is killed before the commit."""
    program = (
        "import os, signal, sys; from ciuic import SnapshotManager; from support.tiny_training import Model;"
        "manager = SnapshotManager(sys.argv[1]);"
        "manager.save_snapshot(Model(), epoch=3);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    process = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "snapshots")],
        env={**os.environ, "PYTHONPATH": str(trials.PROGRAM.parents[1])},
        capture_output=True,
        check=False,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    manager = SnapshotManager(tmp_path / "snapshots")
    state = until("a snapshot", manager.load_latest_snapshot)
    manager.close()
    assert state["epoch"] == 3
    assert all((state["model_state_dict"][name] == value).all() for name, value in Model().weights.items())


def test_a_damaged_snapshot_is_passed_over_for_the_newest_good_one(tmp_path: Path) -> None:
    """Loading skips damaged snapshots for the newest good one; with none it fails and never starts afresh."""
    manager = SnapshotManager(tmp_path / "snapshots")
    model = Model()
    ids = []
    for epoch in range(2):
        model.weights["layer.weight"] += 1
        save = manager.save_snapshot(model, epoch=epoch, wait=True)
        assert save is not None
        ids.append(save.id)
    manager.close()
    with Repository.open(tmp_path / "snapshots") as repository:
        newest = repository.snapshots.path(str(ids[1]))
    Path(newest).write_bytes(b"torn")
    reader = SnapshotManager(tmp_path / "snapshots")
    state = reader.load_latest_snapshot()
    assert state is not None
    assert state.id == ids[0]
    assert state["epoch"] == 0
    assert [one.id for one in state.passed_over] == [ids[1]]
    for pack in (tmp_path / "snapshots" / "packs").iterdir():
        data = bytearray(pack.read_bytes())
        data[4096 + 100 :: 5000] = bytes(byte ^ 255 for byte in data[4096 + 100 :: 5000])
        pack.write_bytes(data)
    with pytest.raises(NoUsableSnapshot, match=str(ids[0])):
        reader.load_latest_snapshot()
    reader.close()
