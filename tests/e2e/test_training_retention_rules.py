"""Rules of when to save and what to keep, with a real writer and NumPy alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.tiny_training import Model, Optimizer

from ciuic import SnapshotManager
from ciuic.training import AfterIf, Best, EverySteps, Latest, OnImprovement


class Loader:
    """Loader of five batches a pass."""

    dataset = range(5)

    def __iter__(self) -> Iterator[int]:
        return iter(self.dataset)


def _manager(save_dir: Path, **settings: Any) -> tuple[SnapshotManager, Optimizer]:
    model = Model()
    optimizer = Optimizer(model)
    manager = SnapshotManager(save_dir, **settings)
    manager.register(model=model, optimizer=optimizer)
    return manager, optimizer


def test_a_reported_improvement_is_saved_with_its_metric_and_the_best_stays(tmp_path: Path) -> None:
    """A reported improvement is saved at once, in the measured state, also after a resume."""
    rules: dict[str, Any] = {"save_when": [OnImprovement("loss")], "keep": [Best(1, "loss"), Latest(1)]}
    manager, optimizer = _manager(tmp_path / "snapshots", **rules)
    for loss in (3.0, math.nan, 1.0, 2.0):
        optimizer.step()
        manager.report(loss=loss)
        manager.wait()
    optimizer.step()
    manager.save_snapshot(metrics={"loss": math.inf}, wait=True)
    manager.close()
    assert manager.stats.saved == 3

    manager, optimizer = _manager(tmp_path / "snapshots", **rules)
    assert manager.resume() is not None
    optimizer.step()
    manager.report({"loss": 1.5})
    assert not manager.stats.stall_seconds, "1.0 was better"
    optimizer.step()
    manager.report({"loss": 0.5})
    manager.close()
    saved = [(one.facts.step, one.facts.metrics) for one in manager.list_snapshots()]
    assert saved == [(7, {"loss": 0.5})]


def test_the_first_of_each_so_many_steps_stays(tmp_path: Path) -> None:
    """EverySteps keeps the first of each stretch beside the newest that `max_snapshots` keeps."""
    manager, optimizer = _manager(
        tmp_path / "snapshots", save_when=[AfterIf(1e-9, changes=2)], keep=[EverySteps(6)], max_snapshots=2
    )
    for _ in range(20):
        optimizer.step()
        manager.wait()
    manager.close()
    assert [one.facts.step for one in manager.list_snapshots()] == [20, 18, 12, 6, 2]


def test_a_report_within_a_step_is_saved_at_its_boundary(tmp_path: Path) -> None:
    """A report within a step is saved at its boundary: a resume would lose the batch otherwise."""
    manager, optimizer = _manager(tmp_path / "snapshots", save_when=[OnImprovement("loss")])
    loader = Loader()
    manager.register(loader=loader)
    for batch in loader:
        if batch == 3:
            break
        manager.report(loss=-float(batch))
        manager.wait()
        assert manager.stats.saved == batch
        optimizer.step()
    manager.close()
    assert [one.facts.step for one in manager.list_snapshots()] == [3, 2, 1]


def test_a_pass_that_was_over_is_not_repeated(tmp_path: Path) -> None:
    """A run saved after the last batch of a pass resumes with the next epoch, otherwise within the epoch."""
    for stop_in_pass, expected in ((False, (1, 0)), (True, (0, 4))):
        save_dir = tmp_path / str(stop_in_pass)
        manager, optimizer = _manager(save_dir)
        loader = Loader()
        manager.register(loader=loader)
        for batch in loader:
            optimizer.step()
            if stop_in_pass and batch == 3:
                break
        manager.save_snapshot()
        manager.close()
        manager, optimizer = _manager(save_dir)
        loader = Loader()
        manager.register(loader=loader)
        resumed = manager.resume()
        assert resumed is not None
        assert (resumed.epoch, resumed.batch) == expected
        for _ in range(resumed.epoch or 0, 2):
            for _ in loader:
                optimizer.step()
        manager.close()
        assert optimizer.steps == 10
