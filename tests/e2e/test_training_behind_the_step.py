"""Programs that change what is registered behind `optimizer.step()`, where no loader tells when a step is over."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.late_modules import torch

from ciuic import SnapshotManager
from ciuic.training import OnImprovement, logs


def _run(directory: Path, upto: int, *, boundary: bool) -> Any:
    """Train up to a step, from the newest snapshot on; return all that was trained, and what is drawn next."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    average = copy.deepcopy(model)
    with SnapshotManager(directory, every_steps=2) as manager:
        manager.register(model=model, optimizer=optimizer, average=average)
        manager.resume()
        while manager.step < upto:
            batch = torch.randn(8, 4)
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            optimizer.step()
            with torch.no_grad():
                for mine, new in zip(average.parameters(), model.parameters(), strict=True):
                    mine.lerp_(new, 0.1)
            if boundary:
                manager.boundary()
    return [one.state_dict() for one in (model, optimizer, average)], torch.rand(1)


@pytest.mark.parametrize("boundary", [False, True])
def test_an_average_behind_the_step_resumes_exactly(boundary: bool, tmp_path: Path) -> None:
    """A run whose last snapshot came in its middle or at its end resumes to the bits of one that was not interrupted."""
    whole = _run(tmp_path / "whole", 5, boundary=boundary)
    _run(tmp_path / "parts", 3, boundary=boundary)
    _run(tmp_path / "parts", 4, boundary=boundary)
    resumed = _run(tmp_path / "parts", 5, boundary=boundary)
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


def _losses(tmp_path: Path, registered: dict[str, Any], behind: Callable[[], object]) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with SnapshotManager(tmp_path, every_steps=1) as manager:
        manager.register(model=model, optimizer=optimizer, **registered)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            behind()


def test_a_value_that_changes_behind_the_step_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dict that changes behind the step is named in one warning; a generator that is drawn from there is not."""
    monkeypatch.setattr(logs, "_warned", set())
    progress, drawn = {"done": 0}, torch.Generator()

    def behind() -> None:
        progress["done"] += 1
        torch.randn(1, generator=drawn)

    with caplog.at_level(logging.WARNING):
        _losses(tmp_path, {"progress": progress, "drawn": drawn}, behind)
    (told,) = [one for one in caplog.messages if "optimizer.step()" in one]
    assert told.startswith("ciuic: progress: changed")


def test_copies_of_a_model_between_two_steps_have_no_part_in_the_training(tmp_path: Path) -> None:
    """A model that is copied or pickled behind a step is one without hooks that do anything."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with SnapshotManager(tmp_path / "snapshots", every_steps=1) as manager:
        manager.register(model=model, optimizer=optimizer, average=copy.deepcopy(model))
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        torch.save(model, tmp_path / "model.pt")
        for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
            assert torch.equal(other(torch.ones(1, 2)), model(torch.ones(1, 2)).detach())
            assert manager.stats.saved + manager.stats.failed == 0


def test_the_first_save_counts_the_steps_before_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that only calls `save_snapshot` behind its steps has its own count of them, and no warning of lost gradients."""
    monkeypatch.setattr(logs, "_warned", set())
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(manager: SnapshotManager, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        manager.save_snapshot(model, optimizer, wait=True)

    with SnapshotManager(tmp_path / "a") as manager:
        train(manager, 3)
        train(manager, 3)
        assert [one.facts.step for one in manager.list_snapshots()] == [6, 3]
        # The optimizer of another stage goes on with the count.
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        train(manager, 2)
        assert manager.step == 8
    assert not [one for one in caplog.messages if "backward()" in one]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with SnapshotManager(tmp_path / "b") as manager:
        optimizer.step()
        manager.step = 100
        train(manager, 1)
        assert manager.step == 101
        model(torch.ones(1, 2)).sum().backward()
        manager.save_snapshot(model, optimizer, wait=True)
    assert len([one for one in caplog.messages if "backward()" in one]) == 1


def test_metrics_behind_the_step_save_the_state_that_was_measured(tmp_path: Path) -> None:
    """A snapshot that `report` makes due is of that step, also where its boundary is the beginning of the next."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    average = copy.deepcopy(model)
    with SnapshotManager(tmp_path, save_when=OnImprovement("loss")) as manager:
        manager.register(model=model, optimizer=optimizer, average=average)
        for step in range(1, 7):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            if step == 5:
                manager.report(loss=1.0)
                average.load_state_dict(model.state_dict())
                measured = copy.deepcopy(average.state_dict())
        assert manager.wait()
        state = manager.load_latest_snapshot()
    assert state is not None
    assert state["step"] == 5
    assert torch.equal(state["average_state_dict"]["weight"], measured["weight"])
