"""Saves that a signal handler asks for while an optimizer changes the weights one after the other."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ciuic import SnapshotManager

torch = pytest.importorskip("torch", reason="no CPU build of PyTorch is offered here")


class Interrupted(torch.optim.Optimizer):  # type: ignore[misc, name-defined]
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
    optimizer = Interrupted(model.parameters())
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
