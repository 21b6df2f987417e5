"""Old names of the public interface: each works for one version, and says what replaced it."""

from __future__ import annotations

import operator
from pathlib import Path

import pytest

from ciuic import SnapshotManager

torch = pytest.importorskip("torch", reason="no CPU build of PyTorch is offered here")


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
