"""The checkpoint engine for DeepSpeed against DeepSpeed's interface, without DeepSpeed.

`tests/e2e/test_integration_deepspeed.py` trains with DeepSpeed itself where it is installed.
"""

from __future__ import annotations

import abc
import json
import os
import shutil
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.late_modules import torch

from ciuic.errors import Damaged, NotFound
from ciuic.repository import Repository
from ciuic.training.writer.housekeeping import read_back

pytestmark = pytest.mark.usefixtures("torch_distributed")


class Interface(abc.ABC):
    """What DeepSpeed 0.19 calls of a checkpoint engine, as its own base class declares it."""

    def __init__(self, config_params: Any = None) -> None:
        self.name = None

    @abc.abstractmethod
    def create(self, info: Any) -> Any: ...

    @abc.abstractmethod
    def save(self, state_dict: Any, path: str) -> Any: ...

    @abc.abstractmethod
    def load(self, path: str, map_location: Any = None) -> Any: ...

    @abc.abstractmethod
    def commit(self, info: Any) -> Any: ...

    def is_decoupled(self) -> bool:
        return False


class Scaler:
    """Stand-in for DeepSpeed's LossScaler, which is an object in the states of ZeRO 1 and 2."""

    def __init__(self, scale: float) -> None:
        self.cur_scale = scale
        self.dynamic = False


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the module under test, imported over a stand-in for DeepSpeed."""
    import importlib

    names = {
        "deepspeed": {},
        "deepspeed.runtime": {},
        "deepspeed.runtime.checkpoint_engine": {},
        "deepspeed.runtime.checkpoint_engine.checkpoint_engine": {"CheckpointEngine": Interface},
        "deepspeed.runtime.engine": {"create_checkpoint_engine": lambda *_, **__: "DeepSpeed's"},
        "deepspeed.runtime.fp16": {},
        "deepspeed.runtime.fp16.loss_scaler": {"LossScaler": Scaler},
    }
    for name, content in names.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    monkeypatch.delitem(sys.modules, "ciuic.integrations.deepspeed", raising=False)
    yield importlib.import_module("ciuic.integrations.deepspeed")
    sys.modules.pop("ciuic.integrations.deepspeed", None)


def info(save_dir: Path, tag: str, save_latest: bool = True) -> Any:
    return SimpleNamespace(save_dir=str(save_dir), tag=tag, save_latest=save_latest)


def states(number: float) -> dict[str, Any]:
    """Return what a rank saves: file by name."""
    return {
        "mp_rank_00_model_states.pt": {
            "module": OrderedDict(a=torch.full((300, 200), number), b=torch.full((3,), number)),
            "param_shapes": [OrderedDict(a=torch.Size([300, 200]))],
            "global_steps": int(number),
        },
        "zero_pp_rank_0_mp_rank_00_optim_states.pt": {
            "optimizer_state_dict": {
                "loss_scaler": Scaler(number),
                "groups": [torch.full((50_000,), number)[:10]],
            },
        },
    }


def save(engine: Any, directory: Path, tag: str, number: float, save_latest: bool = True) -> None:
    """Call the engine as DeepSpeed's save_checkpoint does."""
    engine.makedirs(str(directory), exist_ok=True)
    engine.create(info(directory, tag, save_latest))
    engine.makedirs(str(directory / tag), exist_ok=True)
    for name, state in states(number).items():
        engine.save(state, str(directory / tag / name))
    assert engine.commit(info(directory, tag, save_latest)) is True


def load(engine: Any, directory: Path, tag: str) -> float:
    """Load a checkpoint's files, check that all are of one save, and return its number."""
    model = engine.load(
        str(directory / tag / "mp_rank_00_model_states.pt"), map_location=lambda storage, _: storage
    )
    zero = engine.load(str(directory / tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt"), map_location="cpu")
    number = model["global_steps"]
    assert type(model["module"]) is OrderedDict
    assert all(tensor.eq(number).all() for tensor in model["module"].values())
    assert model["param_shapes"] == [OrderedDict(a=torch.Size([300, 200]))]
    scaler = zero["optimizer_state_dict"]["loss_scaler"]
    assert (type(scaler), vars(scaler)) == (Scaler, {"cur_scale": number, "dynamic": False})
    assert zero["optimizer_state_dict"]["groups"][0].eq(number).all()
    return float(number)


def test_every_method_that_deepspeed_calls_is_there(deepspeed: Any, tmp_path: Path) -> None:
    """The engine is DeepSpeed's kind of object, commits by itself, and needs no clones of views."""
    engine = deepspeed.SnapshotCheckpointEngine(tmp_path / "snapshots")
    assert isinstance(engine, Interface)
    assert not engine.is_decoupled()
    assert not engine.preserves_storage_sharing()
    assert isinstance(engine.name, str)


def test_a_checkpoint_is_one_snapshot(deepspeed: Any, tmp_path: Path) -> None:
    """All files of a checkpoint are one snapshot, which loads equal, also after the same tag was saved anew."""
    engine = deepspeed.SnapshotCheckpointEngine(tmp_path / "snapshots")
    save(engine, tmp_path / "run", "step1", 1)
    save(engine, tmp_path / "run", "step2", 2)
    assert [load(engine, tmp_path / "run", tag) for tag in ("step1", "step2")] == [1, 2]
    save(engine, tmp_path / "run", "step1", 3)
    assert load(engine, tmp_path / "run", "step1") == 3
    engine.cleanup()
    with Repository.open(tmp_path / "snapshots") as repository:
        found = repository.snapshots.list()
        assert [one.message for one in found] == ["step1", "step2", "step1"]
        assert found[0].id == engine.last_id
        assert not any(read_back(repository, one.id) for one in found)
    # Only names for DeepSpeed to find: no tensor is in the directory.
    assert sum(file.stat().st_size for file in (tmp_path / "run/step1").iterdir()) < 1000


def test_a_save_that_fails_is_an_error_of_the_commit(deepspeed: Any, tmp_path: Path) -> None:
    """What only pickle could store makes the commit fail by its path, and the checkpoint of that tag stays."""
    engine = deepspeed.SnapshotCheckpointEngine(tmp_path / "snapshots")
    save(engine, tmp_path / "run", "step1", 1)
    engine.create(info(tmp_path / "run", "step1"))
    engine.makedirs(str(tmp_path / "run/step1"), exist_ok=True)
    engine.save({"client": {"thing": object()}}, str(tmp_path / "run/step1/mp_rank_00_model_states.pt"))
    with pytest.raises(
        OSError, match=r"step1 was not saved: rank 0, mp_rank_00_model_states.pt: .*client\.thing"
    ):
        engine.commit(info(tmp_path / "run", "step1"))
    assert load(engine, tmp_path / "run", "step1") == 1


def test_a_file_outside_of_a_checkpoint_is_written_as_usual(deepspeed: Any, tmp_path: Path) -> None:
    """What save_16bit_model writes on rank 0 alone is a file that other programs can read, and no snapshot."""
    engine = deepspeed.SnapshotCheckpointEngine(tmp_path / "snapshots")
    engine.create(info(tmp_path, "global_step1"))
    engine.makedirs(str(tmp_path), exist_ok=True)
    engine.save({"a": torch.ones(3)}, str(tmp_path / "pytorch_model.bin"))
    assert engine.commit(info(tmp_path, "global_step1")) is True
    assert torch.load(tmp_path / "pytorch_model.bin")["a"].eq(1).all()
    with Repository.open(tmp_path / "snapshots") as repository:
        assert not repository.snapshots.list()


def test_what_cannot_be_loaded_says_why(deepspeed: Any, tmp_path: Path) -> None:
    """A file of another engine is not unpickled, and a snapshot that was removed is an error that names it."""
    engine = deepspeed.SnapshotCheckpointEngine(tmp_path / "snapshots", max_snapshots=1)
    (tmp_path / "old").mkdir()
    torch.save({"a": 1}, tmp_path / "old/mp_rank_00_model_states.pt")
    with pytest.raises(ValueError, match="another checkpoint engine saved it, with pickle"):
        engine.load(str(tmp_path / "old/mp_rank_00_model_states.pt"))
    save(engine, tmp_path / "run", "step1", 1)
    save(engine, tmp_path / "run", "step2", 2)
    engine.cleanup()
    assert load(engine, tmp_path / "run", "step2") == 2
    with pytest.raises(NotFound, match=r"run/step1 is not in .*snapshots: it was removed"):
        load(engine, tmp_path / "run", "step1")


def test_files_are_exported_for_tools_that_read_these(deepspeed: Any, tmp_path: Path) -> None:
    """An exported checkpoint has DeepSpeed's files, which torch.load reads."""
    engine = deepspeed.SnapshotCheckpointEngine(tmp_path / "snapshots")
    save(engine, tmp_path / "run", "step1", 5)
    written = deepspeed.export_checkpoint(tmp_path / "run/step1", tmp_path / "exported/step1")
    assert [file.name for file in written] == sorted(states(5))
    assert torch.load(written[0])["module"]["a"].eq(5).all()


def test_engines_that_a_framework_creates(deepspeed: Any, tmp_path: Path) -> None:
    """Within the context every new engine saves to the repository, and after it DeepSpeed's own way is back."""
    module = sys.modules["deepspeed.runtime.engine"]
    with suppress(KeyError), deepspeed.snapshot_checkpoints(tmp_path / "snapshots"):
        made = module.create_checkpoint_engine(config_params=None, groups=None)
        raise KeyError
    assert isinstance(made, deepspeed.SnapshotCheckpointEngine)
    assert module.create_checkpoint_engine() == "DeepSpeed's"
    engine = SimpleNamespace(checkpoint_engine=None)
    assert deepspeed.save_in(engine, tmp_path / "snapshots") is engine.checkpoint_engine


def _killed_before(engine: Any, monkeypatch: pytest.MonkeyPatch, instant: str, run: Path) -> None:
    """Save step2 as a process does that is killed at an instant of it."""
    module = sys.modules[type(engine).__module__]
    writes = {"latest": ("_name_checkpoint", engine), "pointer": ("write_checkpoint_pointer", module)}
    if instant in writes:
        name, owner = writes[instant]

        def die(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(owner, name, die)
        with pytest.raises(KeyboardInterrupt):
            save(engine, run, "step2", 2)
        monkeypatch.undo()
    else:
        save(engine, run, "step2", 2)
        # As DeepSpeed opens it.
        (run / "latest").write_text("" if instant == "text" else "step2")


@pytest.mark.parametrize("instant", ["latest", "pointer", "text", "end"])
def test_a_kill_in_a_save_leaves_latest_at_a_whole_checkpoint(
    deepspeed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, instant: str
) -> None:
    """Once the snapshot is durable the next engine leads `latest` to it, even where the earlier one was removed."""
    engine = deepspeed.SnapshotCheckpointEngine(tmp_path / "snapshots", max_snapshots=1)
    save(engine, tmp_path / "run", "step1", 1)
    (tmp_path / "run/latest").write_text("step1")
    _killed_before(engine, monkeypatch, instant, tmp_path / "run")
    engine.cleanup()
    resumed = deepspeed.SnapshotCheckpointEngine(tmp_path / "snapshots", max_snapshots=1)
    assert load(resumed, tmp_path / "run", (tmp_path / "run/latest").read_text()) == 2


def test_a_repository_that_cannot_be_read_ends_no_training(
    deepspeed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The look at the last save only logs its failure: raised on rank 0, it would leave the other ranks waiting."""
    save(deepspeed.SnapshotCheckpointEngine(tmp_path / "snapshots"), tmp_path / "run", "step1", 1)

    def refuse(*_: object) -> None:
        raise Damaged("the snapshot file cannot be read")

    module = sys.modules[deepspeed.SnapshotCheckpointEngine.__module__]
    monkeypatch.setattr(module, "Repository", SimpleNamespace(open=refuse))
    deepspeed.SnapshotCheckpointEngine(tmp_path / "snapshots")
    assert "the snapshot file cannot be read" in caplog.text


def test_a_choice_of_the_program_stays(deepspeed: Any, tmp_path: Path) -> None:
    """A `latest` that was set back, a save that leaves it alone, and a removed checkpoint stay as they are."""
    engine = deepspeed.SnapshotCheckpointEngine(tmp_path / "snapshots")
    latest = tmp_path / "run/latest"
    save(engine, tmp_path / "run", "step1", 1)
    save(engine, tmp_path / "run", "a/step2", 2)
    assert latest.read_text() == "a/step2"
    latest.write_text("step1")
    deepspeed.SnapshotCheckpointEngine(tmp_path / "snapshots")
    assert latest.read_text() == "step1"
    save(engine, tmp_path / "run", "best", 3, save_latest=False)
    (tmp_path / "run/best/.metadata").unlink()
    deepspeed.SnapshotCheckpointEngine(tmp_path / "snapshots")
    assert latest.read_text() == "step1"
    assert load(engine, tmp_path / "run", "best") == 3
    shutil.rmtree(tmp_path / "run")
    deepspeed.SnapshotCheckpointEngine(tmp_path / "snapshots")
    assert not latest.exists()


def test_the_pointer_can_be_moved_with_the_checkpoint(deepspeed: Any, tmp_path: Path) -> None:
    """`.metadata` names the repository by its absolute path, so the checkpoint's directory may be moved."""
    engine = deepspeed.SnapshotCheckpointEngine(tmp_path / "snapshots")
    save(engine, tmp_path / "run", "step1", 1)
    os.rename(tmp_path / "run", tmp_path / "moved")
    assert load(engine, tmp_path / "moved", "step1") == 1
    assert json.loads((tmp_path / "moved/step1/.metadata").read_text())["repository"] == str(
        tmp_path / "snapshots"
    )
