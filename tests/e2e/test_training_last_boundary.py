"""`SnapshotManager.close` after boundaries that were skipped because the writer was busy."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.late_modules import LateModule, torch
from support.leftovers import training_writer
from support.rank_processes import Ranks

from ciuic import SnapshotManager
from ciuic.training.writer import client

sharded_training: Any = LateModule("support.sharded_training")

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _two_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give small states the room that large ones have."""
    monkeypatch.setattr(client, "_SMALL_ARENAS", 0)


def _train(manager: SnapshotManager, steps: int, *, more_steps: int = 0) -> Any:
    """Take steps while the writer stands still, and let it go on a moment after they are over."""
    torch.manual_seed(3)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    manager.register(model=model, optimizer=optimizer)
    writer = training_writer()
    os.kill(writer, signal.SIGSTOP)
    try:
        for _ in range(steps + more_steps):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            manager.boundary()
    finally:
        threading.Timer(0.2, os.kill, (writer, signal.SIGCONT)).start()
    return model


@pytest.mark.parametrize("more_steps", [0, 2])
def test_closing_saves_the_state_that_was_due_last(more_steps: int, tmp_path: Path) -> None:
    """The newest snapshot has the state at the end, with saves due at 5, 10, 15 and 20 and room for two."""
    with SnapshotManager(tmp_path / "s", every_steps=5) as manager:
        model = _train(manager, 20, more_steps=more_steps)
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        drawn_next = torch.random.get_rng_state()
    assert manager.stats.skipped == 2
    with SnapshotManager(tmp_path / "s") as manager:
        saved = [(one.facts.step, one.facts.reason) for one in manager.list_snapshots()]
        assert [step for step, _ in saved] == [20 + more_steps, 10, 5]
        assert saved[0][1] == "skipped before the end"
        state = manager.load_latest_snapshot()
        assert state is not None
        assert all(torch.equal(value, state["model_state_dict"][name]) for name, value in expected.items())
        fresh = torch.nn.Linear(8, 8)
        manager.framework.set_objects({"model": fresh})
        assert manager.resume() is not None
        assert torch.equal(torch.random.get_rng_state(), drawn_next)


def test_an_error_in_the_training_saves_nothing_more(tmp_path: Path) -> None:
    """A manager that is closed because of an exception does not save the state in which it was raised."""
    manager = SnapshotManager(tmp_path / "s", every_steps=5)
    _train(manager, 20)
    with pytest.raises(ZeroDivisionError), manager:
        raise ZeroDivisionError
    with SnapshotManager(tmp_path / "s") as manager:
        assert [one.facts.step for one in manager.list_snapshots()] == [10, 5]


def test_an_uncaught_error_saves_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manager that is closed at the exit of a program that failed within a step does not save that state."""
    manager = SnapshotManager(tmp_path / "s", every_steps=5)
    _train(manager, 20)
    # What the interpreter leaves for functions that are called at its exit.
    monkeypatch.setattr(sys, "last_value", ZeroDivisionError(), raising=False)
    manager.close()
    with SnapshotManager(tmp_path / "s") as manager:
        assert [one.facts.step for one in manager.list_snapshots()] == [10, 5]


def train_sharded(rank: int, world: int, save_dir: str, result: str) -> None:
    """Take 20 steps of a sharded training whose writer on rank 0 stands still; RESULT gets the digest."""
    client._SMALL_ARENAS = 0  # type: ignore[misc]
    trained = sharded_training.Sharded(world)
    with SnapshotManager(save_dir, every_steps=5) as manager:
        manager.register(model=trained.model, optimizer=trained.optimizer)
        writer = training_writer() if rank == 0 else 0
        if writer:
            os.kill(writer, signal.SIGSTOP)
        for number in range(20):
            trained.step(number)
            manager.boundary()
        if writer:
            threading.Timer(0.2, os.kill, (writer, signal.SIGCONT)).start()
        time.sleep(0.1)
    digest = trained.digest()
    if rank == 0:
        Path(result).write_text(json.dumps({"digest": digest, "skipped": manager.stats.skipped}))


def resume_sharded(rank: int, world: int, save_dir: str, result: str) -> None:
    """Resume it on the same number of ranks; RESULT gets step and digest."""
    fresh = sharded_training.Sharded(world)
    with SnapshotManager(save_dir) as manager:
        manager.register(model=fresh.model, optimizer=fresh.optimizer)
        resumed = manager.resume()
    digest = fresh.digest()
    if rank == 0:
        assert resumed is not None
        Path(result).write_text(json.dumps({"digest": digest, "step": resumed.step}))


def test_closing_saves_what_was_due_last_of_a_sharded_state(tmp_path: Path) -> None:
    """FSDP2 on two ranks whose saves at 15 and 20 were skipped has the state of step 20 after `close`."""
    save_dir, result = str(tmp_path / "s"), tmp_path / "result"
    Ranks(tmp_path / "save", 2, train_sharded, save_dir, str(result)).check()
    trained = json.loads(result.read_text())
    assert trained["skipped"] > 0
    Ranks(tmp_path / "by", 2, resume_sharded, save_dir, str(result)).check()
    found = json.loads(result.read_text())
    assert (found["step"], found["digest"]) == (20, trained["digest"])
