"""A training that is killed at any instant, and whose newest snapshots are damaged, goes on bit for bit as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from support.tiny_training import Model

from ciuic import SnapshotManager
from ciuic.repository import Repository, Walker
from ciuic.training import NothingGood
from ciuic.types import ChunkId

PROGRAM = Path(__file__).parents[1] / "support" / "tiny_training.py"
STEPS = 60
KILLS = 10


def _begin(save_dir: Path, result: Path, step_seconds: float = 0.0) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), str(save_dir), str(STEPS), str(result), str(step_seconds)],
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def _finish(process: subprocess.Popen[bytes], result: Path) -> dict[str, Any]:
    _, complaint = process.communicate(timeout=120)
    assert process.returncode == 0, complaint.decode()
    return dict(json.loads(result.read_text()))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What comes out when nothing happens."""
    where = tmp_path_factory.mktemp("whole")
    return _finish(_begin(where / "snapshots", where / "result"), where / "result")


def _wait_for_writer(save_dir: Path) -> None:
    """Until what the killed trainer had handed over is there, and its writer has ended."""
    if Repository.exists(save_dir):
        with Repository.open(save_dir) as repository:
            repository.writer(wait_seconds=60).close()


def _no_matter(*_: object) -> None:
    """It was damaged before."""


def _flip(save_dir: Path, choose: random.Random) -> bool:
    """One bit of what the newest snapshot has and no other; whether there is another."""
    if not Repository.exists(save_dir):
        return False
    with Repository.open(save_dir) as repository:
        ids = repository.snapshots.ids()
        seen: set[ChunkId] = set()
        walker = Walker(repository, seen=seen)
        for id_ in ids[1:]:
            deque(walker.walk(repository.snapshots.load(id_), on_damage=_no_matter), maxlen=0)
        if not seen:
            return False
        own = [one.id for one in walker.walk(repository.snapshots.load(ids[0]), on_damage=_no_matter)]
        if not own:
            return False
        place = repository.chunks.locate(choose.choice(own))
    with open(save_dir / "packs" / f"{place.pack:016x}.pack", "r+b") as file:
        file.seek(place.offset + choose.randrange(place.stored_bytes))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1 << choose.randrange(8)]))
    return True


@pytest.mark.slow
@pytest.mark.parametrize("damage", [False, True])
def test_killed_at_random_instants_it_ends_with_the_same_bits(
    tmp_path: Path, uninterrupted: dict[str, Any], damage: bool
) -> None:
    """SIGKILL to the whole session of the trainer; the writer, in its own, finishes or leaves nothing behind."""
    choose = random.Random(7 + damage)
    save_dir, result = tmp_path / "snapshots", tmp_path / "result"
    damaged = 0
    for _ in range(KILLS):
        process = _begin(save_dir, result, 0.01)
        time.sleep(choose.uniform(0.1, 1.5))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        _wait_for_writer(save_dir)
        damaged += damage and _flip(save_dir, choose)
    found = _finish(_begin(save_dir, result), result)
    assert found["digest"] == uninterrupted["digest"]
    assert found["losses"] == uninterrupted["losses"]
    assert damaged or not damage, "no snapshot was damaged, so this says nothing"


def test_a_save_that_was_staged_is_finished_after_the_trainer_is_killed(tmp_path: Path) -> None:
    """The instant between the return of save_snapshot and the commit."""
    program = (
        "import os, signal, sys; from ciuic import SnapshotManager; from support.tiny_training import Model;"
        "manager = SnapshotManager(sys.argv[1]);"
        "manager.save_snapshot(Model(), epoch=3);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    process = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "snapshots")],
        env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[1])},
        capture_output=True,
        check=False,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    manager = SnapshotManager(tmp_path / "snapshots")
    deadline = time.monotonic() + 60
    while (state := manager.load_latest_snapshot()) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    manager.close()
    assert state is not None
    assert state["epoch"] == 3
    assert all((state["model_state_dict"][name] == value).all() for name, value in Model().weights.items())


def test_a_damaged_snapshot_is_passed_over_for_the_newest_good_one(tmp_path: Path) -> None:
    """With its reason; and when none is good that is said, not a fresh start."""
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
    with pytest.raises(NothingGood, match=str(ids[0])):
        reader.load_latest_snapshot()
    reader.close()
