"""Snapshots on a real accelerator (skipped without one): exact, no second copy, resumed bit for bit.

CIUIC_TEST_DEVICE=cpu runs all of it on the host, which proves nothing about accelerators, only that these
tests run.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ciuic import SnapshotManager
from ciuic.training import device_copy
from ciuic.training.arena import Arena
from ciuic.training.writer import client

torch = pytest.importorskip("torch", reason="torch is not installed")


def _device() -> str | None:
    if given := os.environ.get("CIUIC_TEST_DEVICE"):
        return given
    find = getattr(getattr(torch, "accelerator", None), "current_accelerator", None)
    found = None if find is None else find(check_available=True)
    return None if found is None else str(found)


DEVICE = _device()
pytestmark = pytest.mark.skipif(DEVICE is None, reason="there is no accelerator that torch can use")
_ON_CUDA = (DEVICE or "").startswith("cuda")


class Training:
    def __init__(self, width: int = 256) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(width, width),
            torch.nn.BatchNorm1d(width),
            torch.nn.Dropout(0.1),
            torch.nn.Linear(width, width),
        ).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.batch = torch.randn(32, width, device=DEVICE)
        self.losses: list[Any] = []

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = (self.model(self.batch) ** 2).mean()
        loss.backward()
        self.losses.append(loss.detach())
        self.optimizer.step()

    def flat(self) -> dict[str, Any]:
        """Return the state as it is when the device's stream comes to it."""
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for number, kept in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{number}.{name}": value for name, value in kept.items()}
        return {name: value.detach().clone() for name, value in found.items()}


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    found = {f"model.{name}": value for name, value in state["model_state_dict"].items()}
    for number, kept in state["optimizer_state_dict"]["state"].items():
        found |= {f"optimizer.{number}.{name}": value for name, value in kept.items()}
    return found


def _check_all(manager: SnapshotManager, states: dict[int, dict[str, Any]]) -> list[int]:
    steps = []
    for saved in manager.list_snapshots():
        assert saved.facts.step is not None
        found, expected = _flat(manager.load_snapshot(saved.id)), states[saved.facts.step]
        assert found.keys() == expected.keys()
        wrong = [name for name, value in found.items() if not value.equal(expected[name].cpu())]
        assert wrong == [], f"the snapshot of step {saved.facts.step}"
        steps.append(saved.facts.step)
    return sorted(steps)


@pytest.mark.parametrize("pinned", [True, False], ids=["page-locked", "not page-locked"])
@pytest.mark.parametrize("clamps", [False, True], ids=["by steps alone", "clamped, too"])
def test_every_snapshot_is_the_state_of_its_step(
    tmp_path: Path, pinned: bool, clamps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every snapshot is the state of its step, whatever device and program do right after."""
    if not pinned:
        monkeypatch.setattr(device_copy, "_register", lambda *arguments: None)
    arenas: list[Arena] = []
    allocate = client.allocate_arena
    monkeypatch.setattr(client, "allocate_arena", lambda size: arenas.append(allocate(size)) or arenas[-1])
    training = Training()
    states: dict[int, dict[str, Any]] = {}
    training.optimizer.register_step_post_hook(lambda *_: states.update({len(states) + 1: training.flat()}))
    with SnapshotManager(tmp_path, every_steps=5) as manager:
        manager.register(model=training.model, optimizer=training.optimizer)
        for _ in range(40):
            training.step()
            if clamps:
                for parameter in training.model.parameters():
                    parameter.data.clamp_(-0.02, 0.02)
        manager.wait()
        if _ON_CUDA:
            assert arenas
            assert all(arena.pinned == pinned for arena in arenas)
        assert len(_check_all(manager, states)) >= 2


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    """A resumed run ends with the same bits, with dropout's generator on the device."""
    if _ON_CUDA:
        torch.backends.cudnn.deterministic = True
    undisturbed = Training()
    for _ in range(12):
        undisturbed.step()
    first = Training()
    with SnapshotManager(tmp_path, every_steps=4) as manager:
        manager.register(model=first.model, optimizer=first.optimizer)
        for _ in range(9):
            first.step()
    second = Training()
    torch.randn(7, device=DEVICE)
    with SnapshotManager(tmp_path) as manager:
        manager.register(model=second.model, optimizer=second.optimizer)
        resumed = manager.resume()
        assert resumed is not None
        for _ in range(12 - resumed.step):
            second.step()
    assert resumed.step == 8
    expected = undisturbed.flat()
    assert [name for name, value in second.flat().items() if not value.equal(expected[name])] == []


def test_an_explicit_save_has_copied_the_state_on_return(tmp_path: Path) -> None:
    """An explicit save has copied the state on return, and the program may change it at once in any way."""
    training = Training()
    training.step()
    with SnapshotManager(tmp_path) as manager:
        expected = training.flat()
        manager.save_snapshot(training.model, training.optimizer, step=1)
        for parameter in training.model.parameters():
            parameter.data.zero_()
        manager.wait()
        assert _check_all(manager, {1: expected}) == [1]


@pytest.mark.skipif(not _ON_CUDA, reason="needs CUDA")
def test_the_device_keeps_no_second_copy(tmp_path: Path) -> None:
    """Saving a state of 400 MB takes at most 100 MB more of the device's memory."""
    training = Training(4096)
    with SnapshotManager(tmp_path, every_steps=4, compression="none") as manager:
        manager.register(model=training.model, optimizer=training.optimizer)
        peaks = []
        for _ in range(5):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            training.step()
            peaks.append(torch.cuda.max_memory_allocated())
        assert max(peaks[3:]) - peaks[2] < 100 << 20
        manager.wait()


@pytest.mark.skipif(not _ON_CUDA, reason="needs CUDA")
def test_steps_that_are_replayed_as_a_graph_tear_no_snapshot(tmp_path: Path) -> None:
    """Steps replayed as a graph tear no snapshot, and saving does not disturb the recording.

    Their optimizer calls no hook, so the device waits for each copy.
    """
    training = Training()
    optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-3, capturable=True)
    training.optimizer = optimizer
    states: dict[int, dict[str, Any]] = {}
    with SnapshotManager(tmp_path, every_steps=3) as manager:
        manager.register(model=training.model, optimizer=optimizer)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                training.step()
        torch.cuda.current_stream().wait_stream(side)
        manager.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            training.step()
        for number in range(1, 20):
            graph.replay()
            manager.step = 1000 + number
            states[manager.step] = training.flat()
            manager.boundary()
        manager.wait()
        steps = [saved.facts.step for saved in manager.list_snapshots()]
        for saved in manager.list_snapshots():
            if (saved.facts.step or 0) >= 1000:
                found, expected = _flat(manager.load_snapshot(saved.id)), states[saved.facts.step or 0]
                assert all(value.equal(expected[name].cpu()) for name, value in found.items())
        assert any((step or 0) >= 1000 for step in steps)
