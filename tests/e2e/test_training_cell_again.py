"""Several managers of one training in one process, as a notebook makes them whose cell is run again."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny_training import Model, Optimizer

from ciuic import SnapshotManager


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
