"""Old names of the public interface: each works for one version, and says what replaced it."""

from __future__ import annotations

import operator
import os
from pathlib import Path
from typing import Any

import pytest
from support.late_modules import torch
from support.leftovers import training_writer

import ciuic.training
from ciuic import SnapshotManager
from ciuic.training import ManagerOptions
from ciuic.training.arguments import OldKeywords
from ciuic.training.ranks import Ranks


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("take", "framework.set_objects"),
        ("load_to_resume", "framework.load_state"),
        ("put_back", "framework.restore"),
        ("goes_on_from", "framework.continue_from"),
        ("hand_over", "framework.gather_states"),
        ("save_handed", "framework.save_gathered"),
        ("join_ranks", "framework.join_ranks"),
    ],
)
def test_old_methods_are_the_new_ones_and_warn(tmp_path: Path, old: str, new: str) -> None:
    """A method under its old name is the new one; the warning names that, at the line of the program."""
    with SnapshotManager(tmp_path / "snapshots") as manager:
        expected = operator.attrgetter(new)(manager)
        with pytest.warns(
            DeprecationWarning, match=rf"SnapshotManager\.{old} .* use SnapshotManager\.{new}$"
        ) as warned:
            found = getattr(manager, old)
        assert found == expected
        assert [one.filename for one in warned] == [__file__]


def test_the_table_has_an_old_name_that_warns(tmp_path: Path) -> None:
    """`snapshots()`, which readers have too, is `list_snapshots()`."""
    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.save_snapshot({"weight": torch.ones(2)}, wait=True)
        with pytest.warns(DeprecationWarning, match=r"use SnapshotManager\.list_snapshots$"):
            found = manager.snapshots()
        assert found == manager.list_snapshots()
        assert len(found) == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("NothingGood", "NoUsableSnapshot"),
        ("again", "requeue_submitit"),
        ("Figures", "ChangeFigures"),
        ("Metadata", "MetadataService"),
    ],
)
def test_old_names_of_the_package_are_the_new_ones_and_warn(old: str, new: str) -> None:
    """A function or class under its old name is the new one; the warning names that, at the line of the program."""
    with pytest.warns(DeprecationWarning, match=rf"training\.{old} .* use ciuic\.training\.{new}$") as warned:
        assert getattr(ciuic.training, old) is getattr(ciuic.training, new)
    assert [one.filename for one in warned] == [__file__]
    assert old not in ciuic.training.__all__
    assert not hasattr(ciuic.training, old + "_")


def _niceness_of_writer(manager: SnapshotManager) -> int:
    """Return the niceness that the writer adds, once it has stored something."""
    assert manager.save_snapshot({"weight": torch.ones(2)}, wait=True) is not None
    return os.getpriority(os.PRIO_PROCESS, training_writer()) - os.getpriority(os.PRIO_PROCESS, 0)


def test_old_keywords_are_fields_of_the_options_and_warn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A keyword that is a field of `ManagerOptions` still has its effect, and is refused beside the object."""
    met: list[str] = []
    monkeypatch.setattr(Ranks, "meet", met.append)
    with (
        pytest.warns(
            DeprecationWarning,
            match=r"^nice=…, distributed= of .*use options=.*ManagerOptions\(nice=…, distributed=…\)$",
        ) as warned,
        SnapshotManager(tmp_path / "snapshots", nice=7, distributed=False) as manager,
    ):
        assert (_niceness_of_writer(manager), met) == (7, [])
    assert [one.filename for one in warned] == [__file__]
    old = {name: getattr(ManagerOptions(), name) for name in OldKeywords.__annotations__}
    with (
        pytest.warns(
            DeprecationWarning, match="nice=…, distributed=…, agree=…, heartbeat_seconds=…, overlap="
        ),
        SnapshotManager(tmp_path / "snapshots", **old) as manager,
    ):
        assert (_niceness_of_writer(manager), met) == (ManagerOptions().nice, ["training"])
    with (
        pytest.warns(DeprecationWarning, match="heartbeat_seconds="),
        pytest.raises(ValueError, match="heartbeat_seconds must be a positive number of seconds, got -1"),
    ):
        SnapshotManager(tmp_path / "snapshots", heartbeat_seconds=-1.0)
    with pytest.raises(TypeError, match="nice= must be given in options= alone"):
        SnapshotManager(tmp_path / "snapshots", options=ManagerOptions(), nice=3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"nise": 3}, r"SnapshotManager\(\) got an unexpected keyword argument 'nise'"),
        ({"options": {"nice": 3}}, r"options must be ciuic\.training\.ManagerOptions, got \{'nice': 3\}"),
    ],
)
def test_options_that_are_not_there_are_refused(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    """A keyword that never was, and options that are no `ManagerOptions`, are a TypeError; nothing is created."""
    with pytest.raises(TypeError, match=message):
        SnapshotManager(tmp_path / "snapshots", **wrong)
    assert not (tmp_path / "snapshots").exists()


def test_a_closed_manager_gathers_and_saves_nothing(tmp_path: Path) -> None:
    """A framework that saves through a manager that is closed is told so, as by save_snapshot."""
    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.framework.set_objects({"model": torch.nn.Linear(2, 2)})
        save = manager.framework.save_gathered(manager.framework.gather_states(), step=3)
        assert save is not None
        assert save.wait() is not None
        assert manager.list_snapshots()[0].facts.step == 3
    with pytest.raises(ValueError, match="the manager is closed"):
        manager.framework.gather_states()
    with pytest.raises(ValueError, match="the manager is closed"):
        manager.framework.save_gathered(None)
