"""A manager out of a pickle, as frameworks make one that pickle what holds it."""

from __future__ import annotations

import copy
import pickle  # noqa: TID251
from pathlib import Path

import pytest
from support.tiny_training import Model

from ciuic import SnapshotManager
from ciuic.training import Best


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
