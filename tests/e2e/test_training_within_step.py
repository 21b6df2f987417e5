"""Saves that a signal handler asks for while an optimizer changes the weights one after the other."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.late_modules import torch

from ciuic import SnapshotManager


def interrupted(parameters: Any) -> Any:
    """Return an optimizer of these parameters that a signal can interrupt."""

    class Interrupted(torch.optim.Optimizer):
        """Optimizer that adds one to each parameter in turn, and is interrupted by a signal between two of them."""

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 1.0})
            self.interrupts = False
            self.fails = False

        def step(self, closure: Any = None) -> None:
            with torch.no_grad():
                for number, parameter in enumerate(self.param_groups[0]["params"]):
                    parameter += 1
                    if number == 1 and self.interrupts:
                        os.kill(os.getpid(), signal.SIGUSR1)
                    if number == 1 and self.fails:
                        raise RuntimeError("out of memory")

    return Interrupted(parameters)


@pytest.fixture
def signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("signals")
def test_a_save_within_a_step_is_taken_at_its_boundary(tmp_path: Path) -> None:
    """No snapshot has parameters of two steps, and none is lost; after a step that failed saves are taken at once again."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = interrupted(model.parameters())
    asked: list[object] = []
    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.register(model=model, optimizer=optimizer)
        signal.signal(signal.SIGUSR1, lambda *_: asked.append(manager.save_snapshot(metrics={"asked": 1.0})))
        for step in range(4):
            optimizer.interrupts = step == 2
            optimizer.step()
        assert asked == [None]
        assert manager.wait()
        (saved,) = [one for one in manager.list_snapshots() if one.facts.metrics.get("asked")]
        assert saved.facts.step == 3
        state = manager.load_snapshot(saved.id)
        assert state is not None
        assert {
            float(value) for tensor in state["model_state_dict"].values() for value in tensor.flatten()
        } == {3.0}

        optimizer.fails, optimizer.interrupts = True, False
        with pytest.raises(RuntimeError):
            optimizer.step()
        # The state is the program's affair now, and the save is taken.
        assert manager.save_snapshot(wait=True) is not None


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("given", ["objects", "states", "model"])
def test_a_first_save_within_a_step_is_whole(tmp_path: Path, given: str) -> None:
    """A handler that is the first to save, in mid-step and with whatever it names, gets the state after the step."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = interrupted(model.parameters())
    saves = {
        "objects": lambda manager: manager.save_snapshot(model, optimizer),
        "states": lambda manager: manager.save_snapshot(model.state_dict(), optimizer.state_dict()),
        "model": lambda manager: manager.save_snapshot(model),
    }
    with SnapshotManager(tmp_path / "snapshots") as manager:
        signal.signal(signal.SIGUSR1, lambda *_: saves[given](manager))
        for step in range(3):
            optimizer.interrupts = step == 1
            optimizer.step()
            if step == 1:
                assert manager.wait()
        (saved,) = manager.list_snapshots()
        state = manager.load_snapshot(saved.id)
        assert state is not None
        found = {float(value) for tensor in state["model_state_dict"].values() for value in tensor.flatten()}
        assert found == {2.0}


@pytest.mark.usefixtures("signals")
def test_a_save_within_a_step_that_never_ends_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A handler that ends the program after its save gets a line at close that says that there is no snapshot."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = interrupted(model.parameters())
    optimizer.interrupts = True

    def handler(*_: object) -> None:
        manager.save_snapshot(model, optimizer)
        raise SystemExit(3)

    manager = SnapshotManager(tmp_path / "snapshots")
    signal.signal(signal.SIGUSR1, handler)
    with pytest.raises(SystemExit), manager:
        optimizer.step()
    assert "the step never ended" in caplog.text
    assert SnapshotManager(tmp_path / "snapshots").load_latest_snapshot() is None
