"""Exported states are opened by torch, safetensors, NumPy and torch.distributed.checkpoint without ciuic."""

from __future__ import annotations

import collections
import datetime
import enum
import json
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.late_modules import torch
from support.warm_python import WarmPython
from support.without_ciuic import run_without_ciuic

from ciuic import SnapshotManager
from ciuic.errors import DestinationExists, NotFound, UsageError
from ciuic.training import register_type

np = pytest.importorskip("numpy", reason="NumPy is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")


@register_type
class Color(enum.Enum):
    RED = 1


@register_type
class Pair(NamedTuple):
    left: int
    right: int


NOTE = {
    "path": Path("/data/run"),
    "when": datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.timezone.utc),
    "took": datetime.timedelta(minutes=1.5),
    "cost": Decimal("1.50"),
    "steps": range(1, 9, 2),
    "last": collections.deque([1, 2], maxlen=2),
    "colors": {Color.RED: Pair(1, 2)},
    "frozen": frozenset({3}),
    "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
    "words": np.array(["a", "b"]),
    "scalar": np.float32(1.5),
    "huge": 1 << 3000,
    "nan": float("nan"),
}


def _tensors() -> dict[str, Any]:
    return {
        "generator": torch.Generator().manual_seed(3),
        "sparse": torch.eye(3).to_sparse(),
        "complex": torch.tensor([1 + 2j]).conj(),
    }


DIGESTS = """
import hashlib, torch
def digest(value):
    return hashlib.sha256(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
def digests(state):
    return {name: digest(value) for name, value in state.items()}
"""


def _digests(state: dict[str, Any]) -> dict[str, str]:
    found: dict[str, Any] = {}
    exec(DIGESTS, found)
    result: dict[str, str] = found["digests"](state)
    return result


def tied() -> Any:
    """Return a model with tied weights."""

    class Tied(torch.nn.Module):
        """Model with tied weights, a small and a large tensor, numbers of bfloat16 and a scalar."""

        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(300, 300, dtype=torch.bfloat16)
            self.second = torch.nn.Linear(300, 300, dtype=torch.bfloat16)
            self.second.weight = self.first.weight
            self.register_buffer("count", torch.tensor(7))

    return Tied()


class Trained(NamedTuple):
    manager: SnapshotManager
    model: Any
    optimizer: Any


@pytest.fixture
def trained(tmp_path: Path) -> Any:
    """Return a manager with two snapshots, in which the weights of the first are zero."""
    torch.manual_seed(1)
    model = tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model.second(model.first(torch.randn(4, 300, dtype=torch.bfloat16))).sum().backward()
    with SnapshotManager(tmp_path / "snapshots") as manager:
        kept = model.first.weight.detach().clone()
        with torch.no_grad():
            model.first.weight.zero_()
        manager.save_snapshot(model, epoch=1, wait=True)
        with torch.no_grad():
            model.first.weight.copy_(kept)
        optimizer.step()
        manager.save_snapshot(
            model, optimizer, epoch=2, step=5, metrics={"loss": 0.5}, note=NOTE | _tensors(), wait=True
        )
        yield Trained(manager, model, optimizer)


def test_torch_load_opens_an_export_with_weights_only(
    trained: Trained, plain_torch: WarmPython, tmp_path: Path
) -> None:
    """A .pt has all tensors to the bit, ties, and values as plain ones, for `torch.load(weights_only=True)`."""
    done = trained.manager.export(tmp_path / "state.pt", to="torch")
    assert done.left_out == ()
    assert done.size_bytes == (tmp_path / "state.pt").stat().st_size
    opened = """
state = torch.load(sys.argv[1], weights_only=True)
note = state["note"]
model = state["model_state_dict"]
print(json.dumps({
    "keys": sorted(state), "model": digests(model), "epoch": state["epoch"], "step": state["step"], "metrics": state["metrics"],
    "moments": digests({str(key): one["exp_avg"] for key, one in state["optimizer_state_dict"]["state"].items()}),
    "tied": model["first.weight"].data_ptr() == model["second.weight"].data_ptr(),
    "plain": {key: note[key] for key in ("path", "when", "took", "cost", "steps", "last", "frozen", "words", "scalar", "huge")},
    "colors": [[key, value] for key, value in note["colors"].items()],
    "array": note["array"].tolist(), "generator": digest(note["generator"]["state"]),
    "sparse": note["sparse"].to_dense().tolist(), "complex": str(note["complex"].item()), "nan": str(note["nan"]),
}))"""
    found = run_without_ciuic(DIGESTS + opened, tmp_path / "state.pt", python=plain_torch)
    moments = {str(key): one["exp_avg"] for key, one in trained.optimizer.state_dict()["state"].items()}
    assert found == {
        "keys": [
            *("epoch", "metrics", "model_state_dict", "note", "optimizer_state_dict", "random_state", "step"),
        ],
        "model": _digests(trained.model.state_dict()),
        "moments": _digests(moments),
        "epoch": 2,
        "step": 5,
        "metrics": {"loss": 0.5},
        "tied": True,
        "plain": {
            "path": "/data/run",
            "when": "2024-02-29T12:00:00+00:00",
            "took": 90.0,
            "cost": "1.50",
            "steps": [1, 9, 2],
            "last": [1, 2],
            "frozen": [3],
            "words": ["a", "b"],
            "scalar": 1.5,
            "huge": hex(1 << 3000),
        },
        "colors": [["RED", [1, 2]]],
        "array": [[0, 1, 2], [3, 4, 5]],
        "generator": _digests({"": _tensors()["generator"].get_state()})[""],
        "sparse": torch.eye(3).tolist(),
        "complex": "(1-2j)",
        "nan": "nan",
    }


def test_an_export_of_a_program_without_its_classes_is_the_same(
    trained: Trained, warm_torch: WarmPython, tmp_path: Path
) -> None:
    """The command, which knows no class of the program, writes the plain values that the program writes."""
    trained.manager.export(tmp_path / "own.pt", to="torch")
    source = "import sys; from ciuic.training.snapshots import TrainingSnapshots; TrainingSnapshots(sys.argv[1]).export(sys.argv[2], to='torch')"
    done = warm_torch.run(["-c", source, tmp_path / "snapshots", tmp_path / "other.pt"], timeout=120)
    assert done.returncode == 0, done.stderr
    own, other = (torch.load(tmp_path / name, weights_only=True)["note"] for name in ("own.pt", "other.pt"))
    assert own["colors"] == other["colors"] == {"RED": (1, 2)}
    assert own["path"] == other["path"] == "/data/run"


def test_safetensors_and_numpy_open_an_export(
    trained: Trained, plain_torch: WarmPython, tmp_path: Path
) -> None:
    """safetensors and npz have the tensors of one object under its own names, of several with theirs before."""
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    done = trained.manager.export(tmp_path / "model.safetensors", to="safetensors", only=["model"])
    assert done.left_out == ("optimizer", "random_state", "note")
    trained.manager.export(tmp_path / "model.npz", to="npz", only=["model", "optimizer"])
    opened = """
import numpy, safetensors.torch
with numpy.load(sys.argv[2]) as arrays:
    numbers = {name: [str(arrays[name].dtype), float(arrays[name].astype("f8").sum())] for name in arrays.files}
print(json.dumps([digests(safetensors.torch.load_file(sys.argv[1])), numbers]))"""
    weights, numbers = run_without_ciuic(
        DIGESTS + opened, tmp_path / "model.safetensors", tmp_path / "model.npz", python=plain_torch
    )
    state = trained.model.state_dict()
    assert weights == _digests(state)
    assert set(numbers) >= {*(f"model.{name}" for name in state), "optimizer.state.0.exp_avg"}
    assert numbers["model.first.weight"] == [
        "float32",
        float(state["first.weight"].double().sum()),
    ]
    assert numbers["model.count"] == ["int64", 7.0]


@pytest.mark.parametrize("ranks", [1, 3, 310])
def test_dcp_load_opens_an_export_for_any_number_of_ranks(
    trained: Trained, plain_torch: WarmPython, tmp_path: Path, ranks: int
) -> None:
    """`dcp.load` reads a DCP export, whose tensors lie in as many files as ranks were asked for."""
    if not torch.distributed.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    trained.manager.export(tmp_path / "dcp", to="dcp", ranks=ranks, only=["model", "optimizer"])
    assert len(list((tmp_path / "dcp").glob("__*.distcp"))) == ranks
    opened = """
from torch.distributed import checkpoint
state = {"model": {"first.weight": torch.zeros(300, 300, dtype=torch.bfloat16), "count": torch.tensor(0)}, "epoch": 0,
         "optimizer": {"state": {0: {"exp_avg": torch.zeros(300, 300, dtype=torch.bfloat16), "step": torch.tensor(0.)}}}}
checkpoint.load(state, checkpoint_id=sys.argv[1])
print(json.dumps([digests(state["model"]), digest(state["optimizer"]["state"][0]["exp_avg"]), state["epoch"]]))"""
    weights, moment, epoch = run_without_ciuic(DIGESTS + opened, tmp_path / "dcp", python=plain_torch)
    state = trained.model.state_dict()
    assert weights == {
        name: one for name, one in _digests(state).items() if name in ("first.weight", "count")
    }
    assert moment == _digests({"": trained.optimizer.state_dict()["state"][0]["exp_avg"]})[""]
    assert epoch == 2


def test_sharded_states_are_exported_whole(plain_torch: WarmPython, tmp_path: Path) -> None:
    """States that two ranks saved, by the manager and by dcp.save, are exported as whole tensors."""
    if not torch.distributed.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    from support import sharded_training
    from support.rank_processes import Ranks

    from ciuic.training.snapshots import TrainingSnapshots

    for name, main in (
        ("training", sharded_training.save_managed),
        ("dcp", sharded_training.save_in_both_ways),
    ):
        save_dir, result = tmp_path / name, tmp_path / "result"
        Ranks(tmp_path / f"{name}-ranks", 2, main, str(save_dir), str(result)).check()
        snapshots = TrainingSnapshots(save_dir, name)
        snapshots.export(tmp_path / f"{name}.pt", to="torch")
        snapshots.export(tmp_path / f"{name}-of-3", to="dcp", ranks=3)
        opened = """
from torch.distributed import checkpoint
state = torch.load(sys.argv[1], weights_only=True)
model = state["model_state_dict"] if "model_state_dict" in state else state["model"]
loaded = {"model": {name: torch.zeros_like(value) for name, value in model.items()}}
checkpoint.load(loaded, checkpoint_id=sys.argv[2])
print(json.dumps([digests(model), digests(loaded["model"]), [list(one.shape) for one in model.values()]]))"""
        whole, loaded, shapes = run_without_ciuic(
            DIGESTS + opened, tmp_path / f"{name}.pt", tmp_path / f"{name}-of-3", python=plain_torch
        )
        assert whole == loaded
        rows, columns = (1026, 16) if name == "training" else (1024, 128)
        assert shapes[0] == [rows, columns]
    fresh = sharded_training.Sharded(1)
    fresh.load(sharded_training.CiuicStorageReader(str(tmp_path / "dcp")))
    assert whole == _digests(fresh.model.state_dict())


def test_a_destination_is_replaced_only_if_asked_and_recognised(trained: Trained, tmp_path: Path) -> None:
    """Nothing at the destination is replaced unasked, and no folder with files of somebody else ever."""
    for to, name in (("torch", "a.pt"), ("dcp", "folder")):
        trained.manager.export(tmp_path / name, to=to, snapshot="latest~1")
        with pytest.raises(DestinationExists):
            trained.manager.export(tmp_path / name, to=to)
        trained.manager.export(tmp_path / name, to=to, overwrite=True)
    assert torch.load(tmp_path / "a.pt", weights_only=True)["epoch"] == 2
    (tmp_path / "folder/notes.md").write_text("mine")
    with pytest.raises(DestinationExists, match=r"notes\.md"):
        trained.manager.export(tmp_path / "folder", to="dcp", overwrite=True)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DestinationExists):
        trained.manager.export(tmp_path / "link", to="torch")
    # Neither a temporary name nor the directory that was replaced stays.
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_what_cannot_be_exported_is_refused_by_name(trained: Trained, tmp_path: Path) -> None:
    """Errors name the object, the format or the package, and leave nothing behind."""
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError, match="configuration"):
        trained.manager.export(tmp_path / "x", to="hf")
    with pytest.raises(NotFound, match="scheduler, only model, optimizer"):
        trained.manager.export(tmp_path / "x", to="torch", only=["scheduler"])
    with pytest.raises(UsageError, match="must be one of"):
        trained.manager.export(tmp_path / "x", to="pickle")
    with pytest.raises(UsageError, match="ranks"):
        trained.manager.export(tmp_path / "x", to="torch", ranks=2)
    with SnapshotManager(tmp_path / "other") as other:
        other.register(state={"z": torch.ones(2, dtype=torch.complex64)})
        other.save_snapshot(wait=True)
    with pytest.raises(UsageError, match="complex64"):
        other.export(tmp_path / "x", to="safetensors")
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "other"])


def test_the_newest_whole_snapshot_is_exported(trained: Trained, tmp_path: Path) -> None:
    """Without an id a damaged newest snapshot is passed over; asked for by its id it is an error."""
    from ciuic.errors import CiuicError

    newest = trained.manager.list_snapshots()[0].id
    (damaged,) = (tmp_path / "snapshots/snapshots").glob(f"*{newest.removeprefix('cs-')}*")
    damaged.write_bytes(damaged.read_bytes()[:40])
    trained.manager.export(tmp_path / "older.pt", to="torch")
    assert torch.load(tmp_path / "older.pt", weights_only=True)["epoch"] == 1
    with pytest.raises(CiuicError):
        trained.manager.export(tmp_path / "x.pt", to="torch", snapshot=newest)


HUGGING_FACE = """
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(json.dumps([type(model).__name__, digests(model.state_dict()), model.config.n_embd, model.generation_config.eos_token_id]))"""


def test_from_pretrained_opens_an_export(plain_torch: WarmPython, tmp_path: Path) -> None:
    """A snapshot of the Trainer is exported as a folder with which from_pretrained makes the same model."""
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    pytest.importorskip("accelerate", reason="the extra `hf` is not installed")
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from ciuic.integrations.transformers import SnapshotCallback

    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2, eos_token_id=3)
    tokens = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 4
    arguments = {
        "max_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    callback = SnapshotCallback(tmp_path / "snapshots")
    model = GPT2LMHeadModel(config)
    Trainer(
        model,
        TrainingArguments(str(tmp_path / "logs"), **arguments),
        train_dataset=tokens,
        callbacks=[callback],
    ).train()
    callback.manager.close()
    done = callback.manager.export(tmp_path / "folder", to="hf")
    assert "optimizer" in done.left_out
    kind, weights, width, end = run_without_ciuic(
        DIGESTS + HUGGING_FACE, tmp_path / "folder", python=plain_torch
    )
    assert (kind, width, end) == ("GPT2LMHeadModel", 32, 3)
    assert weights == _digests(model.state_dict())
    assert json.loads((tmp_path / "folder/config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    callback.manager.export(tmp_path / "folder", to="hf", overwrite=True)
