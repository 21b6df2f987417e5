"""Mistakes that programs make with SnapshotManager: each is answered by one sentence, before anything is saved that would be wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ciuic import SnapshotManager
from ciuic.errors import UsageError
from ciuic.training import Latest, Steps

torch = pytest.importorskip("torch", reason="no CPU build of PyTorch is offered here")


def _model() -> tuple[Any, Any]:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"interval": "1 lightyear"}, ValueError, "not a duration: '1 lightyear'"),
        ({"max_snapshots": "10"}, TypeError, "max_snapshots is a whole number, not '10'"),
        ({"max_snapshots": 0}, ValueError, "max_snapshots is from 1 on"),
        ({"every_steps": 2.5}, TypeError, "a number of steps is a whole number, not 2.5"),
        ({"save_when": 5}, TypeError, "save_when are rules"),
        ({"save_dir": None}, TypeError, "save_dir is the path of a directory"),
    ],
)
def test_options_that_cannot_be_meant(
    options: dict[str, Any], kind: type[Exception], said: str, tmp_path: Path
) -> None:
    """Named as the program has written them."""
    with pytest.raises(kind, match=said):
        SnapshotManager(**{"save_dir": tmp_path / "snapshots", **options})


def test_a_single_rule_stands_for_itself(tmp_path: Path) -> None:
    """Where several may be given."""
    SnapshotManager(tmp_path / "snapshots", save_when=Steps(5), keep=Latest(2)).close()


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    """And a file, too."""
    (tmp_path / "data.txt").write_text("mine")
    for place in (tmp_path, tmp_path / "data.txt"):
        with pytest.raises(UsageError, match="give save_dir a directory that is empty, or is not there yet"):
            SnapshotManager(place)


@pytest.mark.parametrize(
    ("save", "kind", "said"),
    [
        (lambda manager, model, optimizer: manager.save_snapshot(), ValueError, "there is nothing to save"),
        (
            lambda manager, model, optimizer: manager.save_snapshot(torch.nn.Linear),
            TypeError,
            "model is the class Linear; an object of it is wanted",
        ),
        (
            lambda manager, model, optimizer: manager.save_snapshot(5),
            TypeError,
            "model is of type int, which has no state_dict",
        ),
        (
            lambda manager, model, optimizer: manager.save_snapshot(optimizer, model),
            TypeError,
            "the other way round",
        ),
        (
            lambda manager, model, optimizer: manager.save_snapshot([model, model], optimizer),
            TypeError,
            "model.0 is a .*Linear within a list or a dict: give it by a name of its own",
        ),
        (
            lambda manager, model, optimizer: manager.save_snapshot(model, optimizer, "3"),
            TypeError,
            "epoch is a whole number, not '3'",
        ),
        (
            lambda manager, model, optimizer: manager.save_snapshot(model, metrics={"loss": "low"}),
            TypeError,
            "the metric loss is a number, not 'low'",
        ),
        (
            lambda manager, model, optimizer: manager.register(model=None),
            TypeError,
            "model is of type NoneType",
        ),
    ],
)
def test_saves_that_cannot_be_meant(
    save: Callable[[SnapshotManager, Any, Any], object], kind: type[Exception], said: str, tmp_path: Path
) -> None:
    """Raised, and nothing is stored."""
    with SnapshotManager(tmp_path / "snapshots") as manager:
        with pytest.raises(kind, match=said):
            save(manager, *_model())
        assert manager.list_snapshots() == []


def test_a_model_may_be_given_by_its_state(tmp_path: Path) -> None:
    """As it is with torch.save; it comes back as that of the object, into which resume puts it as well. The other words of one save may be
    NumPy's or torch's numbers and single texts."""
    model, optimizer = _model()
    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.save_snapshot(
            model.state_dict(),
            optimizer.state_dict(),
            torch.tensor(3),
            metrics={"loss": torch.tensor(0.5)},
            tags="best",
            hold=True,
            wait=True,
        )
        state = manager.load_latest_snapshot()
        assert state is not None
        assert (state["epoch"], state["metrics"]) == (3, {"loss": 0.5})
        assert manager.list_snapshots()[0].held
        other, its_optimizer = _model()
        manager.register(model=other, optimizer=its_optimizer)
        assert manager.resume() is not None
    for mine in (state["model_state_dict"]["weight"], other.weight):
        assert torch.equal(mine, model.weight)
    assert its_optimizer.state_dict()["state"][0]["exp_avg"].equal(optimizer.state[model.weight]["exp_avg"])


def test_a_resume_into_something_else_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model of another shape is an error; an optimizer of another kind, which torch would take, is warned of."""
    model, optimizer = _model()
    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.save_snapshot(model, optimizer, wait=True)
    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.register(model=torch.nn.Linear(4, 5))
        with pytest.raises(ValueError, match=r"model does not take what cs-.* has for it: is it the same"):
            manager.resume()
    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.register(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
        with caplog.at_level(logging.WARNING):
            manager.resume()
    assert "optimizer is a SGD, with dampening, momentum, nesterov; what was saved has amsgrad" in caplog.text
