"""`SnapshotManager.diff` and `ciuic diff --tensors` on states that a real writer stored, coded ones too."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.saved_states import SavedStates
from support.terminal import on_terminal
from support.tiny_training import Model, Optimizer

from ciuic import SnapshotManager
from ciuic.errors import NotFound
from ciuic.repository import Repository
from ciuic.training import ManagerOptions
from ciuic.training.snapshots import TrainingSnapshots


def _run(repository: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the program; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "ciuic", "--repo", str(repository), "diff", *arguments],
        env=os.environ | {"CIUIC_CONFIG": "/dev/null"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done
    return done


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], list[dict[str, Any]]]:
    """Return a repository with three states of a training, in codecs, their ids, and their weights."""
    save_dir = tmp_path_factory.mktemp("trained") / "snapshots"
    model = Model()
    optimizer = Optimizer(model)
    ids, weights = [], []
    with SnapshotManager(save_dir, compression="small") as manager:
        for _ in range(3):
            optimizer.step()
            save = manager.save_snapshot(model, optimizer, wait=True)
            assert save is not None
            ids.append(str(save.id))
            weights.append({name: value.copy() for name, value in model.weights.items()})
    return save_dir, ids, weights


def test_coded_states_have_the_figures_of_numpy(trained: Any) -> None:
    """Tensors that are stored as differences in planes are compared as NumPy compares the weights."""
    save_dir, ids, weights = trained
    with Repository.open(save_dir) as repository:
        assert repository.may_have_bases, "the writer has used codecs"
    diff = TrainingSnapshots(save_dir).diff(ids[1], ids[2])
    assert diff.read_bytes <= diff.size_bytes
    found = {one.name: one.figures for one in diff}
    assert set(found) == {
        "model.layer.weight",
        "model.bias",
        "optimizer.momentum.layer.weight",
        "optimizer.momentum.bias",
    }
    assert diff.identical == 2, "the frozen weights and their momentum"
    for name in ("layer.weight", "bias"):
        figures, old, new = found[f"model.{name}"], weights[1][name], weights[2][name]
        assert figures is not None
        assert figures.relative_change == pytest.approx(np.linalg.norm(new - old) / np.linalg.norm(old))
        assert figures.largest_change == np.abs(new - old).max()
        assert figures.cosine == pytest.approx(new @ old / np.linalg.norm(new) / np.linalg.norm(old))
        assert figures.changed_elements == (new != old).sum()


def test_a_manager_compares_by_any_name(trained: Any) -> None:
    """Snapshots to compare are named as for `load_snapshot`."""
    save_dir, ids, _ = trained
    with SnapshotManager(save_dir) as manager:
        diff = manager.diff("latest~2", "latest")
        assert (diff.old, diff.new) == (ids[0], ids[2])
        assert not manager.diff(ids[1], "latest~1")
        with pytest.raises(NotFound, match="which metric is best is not known"):
            manager.diff("best", "latest")


def test_the_command_prints_what_the_library_returns(trained: Any) -> None:
    """The table, the lines for scripts and the document of the command have the figures of the library."""
    save_dir, ids, _ = trained
    diff = TrainingSnapshots(save_dir).diff(ids[0], ids[2])
    table = _run(save_dir, "--tensors", ids[0], ids[2])
    lines = table.stdout.splitlines()
    assert lines[0].split() == ["TENSOR", "CHANGE", "LARGEST", "COSINE", "NAN", "INF"]
    assert [line.split()[0] for line in lines[1:]] == [one.name for one in diff]
    assert diff.summary() in table.stderr
    document = json.loads(_run(save_dir, ids[0], ids[2], "--tensors", "--json").stdout)
    assert (document["old"], document["new"], document["identical"]) == (ids[0], ids[2], 2)
    for one, other in zip(document["tensors"], diff, strict=True):
        assert other.figures is not None
        figures = other.figures._asdict()
        assert {key: one[key] for key in figures} == figures
        assert (one["name"], one["kind"], one["new_dtype"]) == (other.name, "changed", "F64")
    script = _run(save_dir, "--tensors", "--machine-readable", ids[0], ids[2]).stdout.splitlines()
    first = diff[0].figures
    assert first is not None
    assert script[0] == (
        f"changed|{first.relative_change:.6g}|{first.largest_change:.6g}|{first.cosine:.6g}|0|0|{diff[0].name}"
    )
    nothing = _run(save_dir, "--tensors", "--machine-readable", ids[0], ids[0])
    assert nothing.stdout == ""
    one = _run(
        save_dir, "--tensors", "--skip-identical", "-p", "/training/model/layer.weight.safetensors", *ids[:2]
    )
    assert [line.split()[0] for line in one.stdout.splitlines()[1:]] == ["model.layer.weight"]


def test_it_ends_as_other_commands_do(trained: Any, tmp_path: Path) -> None:
    """Unknown snapshots and paths, wrong use and damage have the exit codes of every command."""
    save_dir, ids, _ = trained
    _run(save_dir, "--tensors", ids[0], "cs-ffffffffffff", code=3)
    _run(save_dir, "--tensors", ids[0], ids[1], "-p", "/elsewhere", code=3)
    assert "name a second one" in _run(save_dir, "--tensors", ids[0], code=2).stderr
    assert "need --tensors" in _run(save_dir, "--machine-readable", ids[0], ids[1], code=2).stderr
    _run(save_dir, "--tensors", "--json", "--machine-readable", ids[0], ids[1], code=2)
    states = SavedStates(tmp_path / "repository")
    state, files = states.save(m={"a": np.zeros(3)}), states.commit({b"log": b"x"})
    assert "holds no training state" in _run(states.path, "--tensors", state, files, code=3).stderr
    bad = states.commit({b"state.json": b"{", b"snapshot.json": b"{}"})
    assert json.loads(_run(states.path, "--tensors", state, bad, "--json", code=4).stdout)["code"] == 4


def test_a_narrow_terminal_gets_lines_that_fit(tmp_path: Path) -> None:
    """Sixty columns are enough for the table, also with long names, new NaN and other shapes."""
    states = SavedStates(tmp_path / "repository")
    long = "transformer.h.11.attention.self.query.weight\x1b[2J"
    old = {long: np.ones(2000), "b": np.ones(2), "c": np.ones((3, 4)), "d": np.ones(3), "e": np.ones(2)}
    new = {long: np.full(2000, np.nan), "b": -np.ones(2), "c": np.ones((4, 3)), "d": np.ones(3, np.float32)}
    ids = [states.save(model=one) for one in (old, new)]
    printed = on_terminal(states.path, "diff", "--tensors", *ids, COLUMNS="60", NO_COLOR="1").decode()
    assert "\x1b[2J" not in printed
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in printed.splitlines()]
    assert all(len(line) <= 60 for line in lines), printed
    assert lines[0].split() == ["TENSOR", "CHANGE", "LARGEST", "COSINE", "NAN", "INF"]
    assert "model.c: shape 4x3, was 3x4" in lines
    assert "model.d: dtype F32, was F64" in lines
    assert any(line.split() == ["model.b", "2.0e+00", "2.0e+00", "-1.000"] for line in lines)
    assert any(line.split()[-1] == "2k" for line in lines if line)


class _Holder:
    """Object with the state that was loaded."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.filterwarnings("ignore")
def test_states_of_several_ranks_are_compared_with_whole_ones(tmp_path: Path) -> None:
    """What two ranks saved in parts is identical to the same state saved whole, and one number shows."""
    torch = pytest.importorskip("torch", reason="no CPU build of PyTorch is offered here")
    if not torch.distributed.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    from support import sharded_training
    from support.sharded_training import Ranks

    save_dir, result = tmp_path / "snapshots", tmp_path / "result"
    Ranks(tmp_path / "save", 2, sharded_training.save_managed, str(save_dir), str(result)).check()
    with SnapshotManager(save_dir, options=ManagerOptions(distributed=False)) as manager:
        state = manager.load_latest_snapshot()
        assert state is not None
        objects = {name: _Holder(state[f"{name}_state_dict"]) for name in ("model", "optimizer")}
        whole = manager.save_snapshot(**objects, wait=True)
        assert whole is not None
        same = manager.diff(state.id, str(whole.id))
        assert {one.kind for one in same} <= {"removed"}, "loader and scheduler are not in the second"
        assert same.identical >= 18
        objects["model"].state["0.weight"][7, 3] += 2.0
        changed = manager.save_snapshot(wait=True)
        assert changed is not None
        (change,) = [one for one in manager.diff(state.id, str(changed.id)) if one.kind != "removed"]
    assert (change.name, change.new_shape) == ("model.0.weight", (1026, 16))
    assert change.figures is not None
    assert change.figures.changed_elements == 1
    assert change.figures.largest_change == pytest.approx(2.0)
