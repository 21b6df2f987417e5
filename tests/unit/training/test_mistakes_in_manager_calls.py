"""Mistakes in calls of SnapshotManager: each raises one sentence, before anything wrong is saved."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import leftovers
from support.late_modules import torch
from support.until import until

from ciuic import SnapshotManager
from ciuic.errors import UsageError
from ciuic.training import Latest, Steps
from ciuic.training.format.reading import encode_facts
from ciuic.training.loading import check_fits
from ciuic.training.logs import log, quietly
from ciuic.training.state.stateful import optimizer_class, problem_of


def _model() -> tuple[Any, Any]:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


class _Own:
    """Object of a program whose state has a value that cannot be stored."""

    def state_dict(self) -> dict[str, Any]:
        return {"path": Path("a"), "made_by": _model}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"interval": "1 lightyear"}, ValueError, "not a duration: '1 lightyear'"),
        ({"max_snapshots": "10"}, TypeError, "max_snapshots must be an integer, got '10'"),
        ({"max_snapshots": 0}, ValueError, "max_snapshots must be at least 1, got 0"),
        ({"every_steps": 2.5}, TypeError, "the number of steps must be an integer, got 2.5"),
        ({"save_when": 5}, TypeError, "save_when must be rules"),
        ({"save_dir": None}, TypeError, "save_dir must be the path of a directory"),
    ],
)
def test_options_that_cannot_be_meant(
    options: dict[str, Any], kind: type[Exception], message: str, tmp_path: Path
) -> None:
    """Impossible options raise an error that names them as the program wrote them."""
    with pytest.raises(kind, match=message):
        SnapshotManager(**{"save_dir": tmp_path / "snapshots", **options})


def test_a_single_rule_stands_for_itself(tmp_path: Path) -> None:
    """A single rule is accepted where several are."""
    SnapshotManager(tmp_path / "snapshots", save_when=Steps(5), keep=Latest(2)).close()


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    """A directory with other files is refused and left alone, and so is a file."""
    (tmp_path / "data.txt").write_text("mine")
    for place in (tmp_path, tmp_path / "data.txt"):
        with pytest.raises(UsageError, match="give save_dir a directory that is empty, or is not there yet"):
            SnapshotManager(place)


def test_a_text_of_another_rank_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Line breaks and escape sequences are shown, not carried out; a percent sign stays."""
    log.warning("ciuic: %s", "gone\nciuic: 100 %s is saved\x1b[2J")
    assert caplog.messages == [r"ciuic: gone\nciuic: 100 %s is saved\x1b[2J"]


def test_an_error_that_cannot_be_shown_does_not_end_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one whose text fails."""
    monkeypatch.setattr(logging, "raiseExceptions", False)

    class Unshown(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    monkeypatch.setattr(log, "propagate", False)
    with quietly("saving"):
        raise Unshown


def test_a_directory_that_was_wiped_during_an_upload_is_used_anew(tmp_path: Path) -> None:
    """A run starts in a directory that was removed and to which the ending upload added its own again."""
    save_dir, others = tmp_path / "snapshots", leftovers.living_children()
    (tmp_path / "remote").mkdir()
    remote = {"url": f"file://{tmp_path}/remote", "encryption": False}
    with SnapshotManager(save_dir, remote=remote) as manager:
        before = manager.save_snapshot(epoch=1, state={"a": 1}, wait=True)
        assert before is not None
        assert before.wait(60, remote=True)
    for one in save_dir.iterdir():
        if one.name != "remotes":
            shutil.rmtree(one) if one.is_dir() else one.unlink()
    with SnapshotManager(save_dir, remote=remote) as manager:
        after = manager.save_snapshot(epoch=2, state={"a": 2}, wait=True)
        assert after is not None
        assert after.wait(60, remote=True)
    # It outlives the training, with which it has nothing to do any more.
    until("the end of the upload", lambda: leftovers.living_children() == others)


@pytest.mark.parametrize(
    ("save", "kind", "message"),
    [
        (lambda manager, model, optimizer: manager.save_snapshot(), ValueError, "there is nothing to save"),
        (
            lambda manager, model, optimizer: manager.save_snapshot(torch.nn.Linear),
            TypeError,
            "model must be an object, got the class Linear",
        ),
        (
            lambda manager, model, optimizer: manager.save_snapshot(5),
            TypeError,
            r"model must have state_dict\(\) and load_state_dict\(\), got an object of type int",
        ),
        (
            lambda manager, model, optimizer: manager.save_snapshot("hello"),
            TypeError,
            r"model must have .* got an object of type str: .* such as save_snapshot\(note='hello'\)",
        ),
        (
            lambda manager, model, optimizer: manager.register(settings={"a": [object()]}),
            TypeError,
            r"settings\.a\.0 is a builtins\.object, which only pickle could store",
        ),
        (
            lambda manager, model, optimizer: manager.register(own=_Own()),
            TypeError,
            r"own\.made_by is a builtins\.function, which only pickle could store",
        ),
        (
            lambda manager, model, optimizer: manager.save_snapshot(optimizer, model),
            TypeError,
            "model and optimizer are swapped",
        ),
        (
            lambda manager, model, optimizer: manager.save_snapshot([model, model], optimizer),
            TypeError,
            "model.0 is a .*Linear inside of a list or dict: give it a name of its own",
        ),
        (
            lambda manager, model, optimizer: manager.save_snapshot(model, optimizer, "3"),
            TypeError,
            "epoch must be an integer, got '3'",
        ),
        (
            lambda manager, model, optimizer: manager.save_snapshot(model, metrics={"loss": "low"}),
            TypeError,
            "the metric loss must be a number, got 'low'",
        ),
        (
            lambda manager, model, optimizer: manager.register(model=None),
            TypeError,
            r"model must have state_dict\(\) and load_state_dict\(\), got an object of type NoneType",
        ),
    ],
)
def test_saves_that_cannot_be_meant(
    save: Callable[[SnapshotManager, Any, Any], object], kind: type[Exception], message: str, tmp_path: Path
) -> None:
    """Impossible arguments of save_snapshot raise, and nothing is stored."""
    with SnapshotManager(tmp_path / "snapshots") as manager:
        with pytest.raises(kind, match=message):
            save(manager, *_model())
        assert manager.list_snapshots() == []


def test_a_model_may_be_given_by_its_state(tmp_path: Path) -> None:
    """A state_dict may be saved in place of its object, and resume loads it into the object.

    The other arguments of a save may be numbers of NumPy or torch, and single strings.
    """
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


def test_a_resume_into_another_model_or_optimizer_is_reported(
    tmp_path: Path,
) -> None:
    """A model of another shape is an error, and so is an optimizer of another kind, which torch would take."""
    model, optimizer = _model()
    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.save_snapshot(model, optimizer, wait=True)
    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.register(model=torch.nn.Linear(4, 5))
        with pytest.raises(ValueError, match=r"model cannot load its state from snapshot cs-"):
            manager.resume()
    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.register(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
        kind = r"it is a torch\.optim\.sgd\.SGD, and a torch\.optim\.adam\.Adam was saved"
        with pytest.raises(ValueError, match=kind):
            manager.resume()


def test_a_resume_that_an_object_refuses_changes_no_other(tmp_path: Path) -> None:
    """Where an object cannot load its state, those that have loaded theirs are what they were before."""

    class Refusing(_Own):
        def state_dict(self) -> dict[str, Any]:
            return {"rate": 1.0}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise ValueError("another kind")

    history = {"steps": 1}
    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.register(history=history, own=Refusing())
        manager.save_snapshot(wait=True)
        history["steps"] = 2
        with pytest.raises(ValueError, match="own cannot load its state"):
            manager.resume()
    assert history == {"steps": 2}


def _kept(parameters: Any) -> Any:
    class Kept(torch.optim.Optimizer):  # type: ignore[misc, name-defined, unused-ignore]
        """Optimizer with a float32 master, integers and nested lists for each parameter, as fused and 8-bit optimizers have them."""

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state.setdefault(
                        "master", parameter.detach().float() + 1e-4 * torch.rand(parameter.shape)
                    )
                    state.setdefault("codes", torch.randint(-128, 127, parameter.shape, dtype=torch.int8))
                    state.setdefault("own", torch.nn.Parameter(torch.rand(2) + 1e-4, requires_grad=False))
                    state.setdefault("nested", [torch.rand(3, dtype=torch.float64), {"scale": torch.rand(2)}])

    return Kept(parameters)


def test_states_of_optimizers_keep_their_dtypes(tmp_path: Path) -> None:
    """Masters, integers and nested tensors come back to the bit, although torch would cast them to the weights' dtype."""
    model = torch.nn.Linear(4, 3).to(torch.bfloat16)
    optimizer = _kept(model.parameters())
    optimizer.step()
    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.save_snapshot(model, optimizer, wait=True)
    again = torch.nn.Linear(4, 3).to(torch.bfloat16)
    resumed = _kept(again.parameters())
    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.register(model=again, optimizer=resumed)
        assert manager.resume() is not None
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        had, has = optimizer.state[one], resumed.state[other]
        assert has["codes"].dtype == torch.int8
        assert torch.equal(has["codes"], had["codes"])
        assert has["nested"][0].dtype == torch.float64
        assert torch.equal(has["nested"][0], had["nested"][0])
        assert torch.equal(has["nested"][1]["scale"], had["nested"][1]["scale"])
        assert torch.equal(has["master"], had["master"])
        assert type(has["own"]) is torch.nn.Parameter
        assert torch.equal(has["own"], had["own"])


def test_objects_whose_state_is_not_there_yet_are_registered(tmp_path: Path) -> None:
    """A lazy module, one on the meta device, and an object that has no state before its first step."""

    class Later:
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("not yet")

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.register(lazy=torch.nn.LazyLinear(2), later=Later())
        manager.register(meta=torch.nn.Linear(2, 2, device="meta"))


def test_metrics_that_are_not_finite_are_kept(tmp_path: Path) -> None:
    """NaN and the infinities come back as floats; readers that know finite ones alone read the rest."""
    metrics = {"loss": float("nan"), "most": float("inf"), "least": float("-inf"), "rate": 0.5}
    with SnapshotManager(tmp_path / "snapshots") as manager:
        save = manager.save_snapshot(*_model(), metrics=metrics, wait=True)
        assert save is not None
        assert repr(save) == f"<Save 1: durable as {save.id}>"
        state = manager.load_latest_snapshot()
        assert state is not None
        [listed] = manager.list_snapshots()
        for found in (state["metrics"], listed.facts.metrics):
            assert {name: repr(value) for name, value in found.items()} == {
                name: repr(value) for name, value in metrics.items()
            }
        assert listed.facts.nonfinite == {}
    assert json.loads(encode_facts(listed.facts))["metrics"] == {"rate": 0.5}


def test_a_default_device_changes_nothing(tmp_path: Path) -> None:
    """A program that makes its tensors on another device by default saves, loads and resumes as any other."""
    model, optimizer = _model()
    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.save_snapshot(model, optimizer, wait=True)
    weight = model.weight.detach().clone()
    try:
        torch.set_default_device("meta")
        with SnapshotManager(tmp_path / "snapshots") as manager:
            state = manager.load_latest_snapshot()
            assert state is not None
            manager.register(model=model, optimizer=optimizer)
            assert manager.resume() is not None
            save = manager.save_snapshot(wait=True)
            assert save is not None
            assert save.error is None
    finally:
        torch.set_default_device(None)
    assert torch.equal(state["model_state_dict"]["weight"], weight)
    assert torch.equal(model.weight, weight)


@pytest.mark.parametrize("call", ["wait", "boundary", "close"])
def test_what_automatic_saves_cannot_store_is_raised_by_the_next_call(
    call: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A value that cannot be stored is counted, logged once and raised by `wait` and `boundary`, by no step and not by `close`."""

    class Projecting(torch.optim.SGD):  # type: ignore[misc, name-defined, unused-ignore]
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["projector"] = object()

    model = torch.nn.Linear(2, 2)
    optimizer = Projecting(model.parameters(), 0.1)
    manager = SnapshotManager(tmp_path, every_steps=1)
    manager.register(model=model, optimizer=optimizer)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert manager.stats.failed >= 1
    assert "projector" in manager.stats.last_error
    assert len([one for one in caplog.messages if "projector" in one]) == 1
    if call != "close":
        with pytest.raises(TypeError, match=r"optimizer.*projector"):
            getattr(manager, call)()
    manager.close()


@pytest.mark.parametrize("kind", ["AdamW", "RAdam", "Adamax"])
def test_another_optimizer_with_the_same_hyperparameters_is_refused_by_class(
    kind: str, tmp_path: Path
) -> None:
    """The refusal names both classes; the option loads what torch loads, and so does a snapshot without the class."""
    model, _ = _model()
    adam = torch.optim.Adam(model.parameters(), 0.1)
    other = getattr(torch.optim, kind)(model.parameters(), 0.1)
    with SnapshotManager(tmp_path, name="a") as manager:
        manager.save_snapshot(model, adam, wait=True)
        state = manager.load_latest_snapshot()
    assert state is not None
    objects = {"model": model, "optimizer": other}
    with pytest.raises(
        ValueError, match=rf"{kind}.*torch\.optim\.adam\.Adam was saved.*allow_other_optimizer=True"
    ):
        check_fits(state, objects, None)
    check_fits(state, objects, None, allow_other_optimizer=True)
    check_fits(state, {"model": model, "optimizer": adam}, None)
    state.optimizers.clear()
    check_fits(state, objects, None)
    objects["optimizer"] = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(
        ValueError, match="a SGD with dampening, momentum, nesterov, but another kind of optimizer"
    ):
        check_fits(state, objects, None)


def test_a_wrapper_of_an_optimizer_is_of_the_class_that_it_wraps() -> None:
    """Wrappers by the names of Accelerate, Lightning and torch's ZeRO count as the optimizer in them, also in each other."""
    model, _ = _model()
    plain = torch.optim.SGD(model.parameters(), 0.1)

    def wrapped(name: str, value: Any) -> Any:
        return type("Wrapper", (), {name: value, "param_groups": value.param_groups})()

    for name in ("optimizer", "_optimizer", "optim"):
        assert optimizer_class(wrapped("optimizer", wrapped(name, plain))) == "torch.optim.sgd.SGD"
    assert optimizer_class(model) == ""


@pytest.mark.parametrize("reordered", [False, True])
def test_moments_of_a_lower_rank_are_taken_and_those_of_other_parameters_are_not(reordered: bool) -> None:
    """Only an optimizer of torch's own has moments of its parameters' shapes; moments in another order fit none."""

    class LowRank(torch.optim.Optimizer):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((6, 4), (5, 3))]
    shapes = [(5, 3), (6, 4)] if reordered else [(2, 4), (2, 3)]
    saved = {
        "state": {at: {"exp_avg": torch.zeros(shape)} for at, shape in enumerate(shapes)},
        "param_groups": [{"params": [0, 1]}],
    }
    assert ("has the shape" in problem_of(LowRank(parameters), saved)) is reordered
    assert "has the shape" in problem_of(torch.optim.Adam(parameters), saved)
