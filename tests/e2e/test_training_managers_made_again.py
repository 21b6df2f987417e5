"""Managers made again in one process: by a notebook whose cell is run again, and out of a pickle."""

from __future__ import annotations

import copy
import pickle  # noqa: TID251
from pathlib import Path

import pytest
from support.tiny_training import Model, Optimizer

from ciuic import SnapshotManager
from ciuic.training import Best


def test_the_later_manager_goes_on_and_the_earlier_one_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The state that the first has saved is resumed, each step is saved once, and the first is closed."""
    model = Model()
    optimizer = Optimizer(model)
    first = SnapshotManager(tmp_path / "snapshots", every_steps=1)
    first.register(model=model, optimizer=optimizer)
    optimizer.step()

    with SnapshotManager(tmp_path / "snapshots", every_steps=1) as second:
        state = second.load_latest_snapshot()
        assert state is not None
        assert state["step"] == 1
        assert not caplog.records  # who only loads closes no other
        second.register(model=model, optimizer=optimizer)
        assert "an earlier SnapshotManager of this process" in caplog.text
        resumed = second.resume()
        assert resumed is not None
        assert resumed.step == 1
        optimizer.step()
        assert second.wait()
        assert [one.facts.step for one in second.list_snapshots()] == [2, 1]
        with pytest.raises(ValueError, match="a later SnapshotManager of this process"):
            first.save_snapshot(model)
        with pytest.raises(ValueError, match="a later SnapshotManager of this process"):
            first.register(other=Model())


def test_managers_of_other_names_and_after_a_close_are_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two trainings in one directory have a manager each, and a closed manager is nobody's."""
    with (
        SnapshotManager(tmp_path / "snapshots", name="a") as one,
        SnapshotManager(tmp_path / "snapshots", name="b") as other,
    ):
        assert one.save_snapshot(Model())
        assert other.save_snapshot(Model())
        assert one.save_snapshot(Model())
    with SnapshotManager(tmp_path / "snapshots", name="a") as again:
        assert again.save_snapshot(Model())
    assert not caplog.records


class Mine(SnapshotManager):
    """Manager of a program's own class."""


def test_it_keeps_its_class_loads_and_says_that_it_cannot_save(tmp_path: Path) -> None:
    """The class and the rules of the best are kept; saving raises with what to do, and nothing is created."""
    with Mine(tmp_path / "snapshots", name="mine", keep=[Best(1, "loss")]) as manager:
        for loss in (1.0, 2.0):
            assert manager.save_snapshot(Model(), metrics={"loss": loss}, wait=True)
        read = pickle.loads(pickle.dumps(manager))
        assert type(read) is Mine
        assert copy.deepcopy(manager) is manager
        assert [one.id for one in read.list_snapshots()] == [one.id for one in manager.list_snapshots()]
        assert read.load_snapshot("best")["metrics"] == {"loss": 1.0}
        latest = read.load_latest_snapshot()
        assert latest is not None
        assert latest["metrics"] == {"loss": 2.0}
        assert read.wait()
        for save in (
            lambda: read.save_snapshot(Model()),
            lambda: read.register(model=Model()),
            read.resume,
            read.boundary,
            lambda: read.step,
            lambda: read.stats,
        ):
            with pytest.raises(AttributeError, match="comes out of a pickle"):
                save()
        with pytest.raises(AttributeError, match="no attribute 'stats_'"):
            manager.stats_  # noqa: B018
        read.close()
        assert pickle.loads(pickle.dumps(read)).save_dir == manager.save_dir
