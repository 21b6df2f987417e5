"""States that programs without ciuic have written become snapshots, and nothing in them is executed."""

from __future__ import annotations

import json
import os
import pickletools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.late_modules import torch
from support.warm_python import WarmPython
from support.without_ciuic import run_without_ciuic

from ciuic import SnapshotManager
from ciuic.errors import NotFound, UsageError
from ciuic.training import import_state, state_import

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def warm_import(warm_torch: WarmPython, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process of each `import_state` find torch imported; the commands' test has it start as users have it."""

    def run(command: list[str], *, input: bytes, env: dict[str, str], cwd: str, **_: object) -> object:
        module = command[command.index("-m") + 1 :]
        return warm_torch.run(["-m", *module], env=env, cwd=cwd, stdin=input, timeout=120)

    monkeypatch.setattr(state_import, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE))


TRAINING = """
import os, random, torch
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.Linear(300, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
model(torch.randn(4, 200)).sum().backward()
optimizer.step(); scheduler.step()
"""
SAVING = """
from torch.distributed import checkpoint
top = sys.argv[1]
state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
torch.save({**state, "epoch": 4, "global_step": 9, "args": ["--lr", 0.5], "a name": 1}, f"{top}/plain.pt")
torch.save({**{f"{name}_state_dict": one for name, one in state.items()}, "epoch": 4, "step": 9, "note": {"a": 1}}, f"{top}/marked.pt")
torch.save(model.state_dict(), f"{top}/bare.pt")
checkpoint.save({**state, "epoch": 4, "step": 9}, checkpoint_id=f"{top}/dcp", no_dist=True)
with open(f"{top}/weight", "wb") as file:
    file.write(model[0].weight.detach().numpy().tobytes())
print(json.dumps(float(optimizer.state[model[0].weight]["exp_avg"].double().sum())))"""


class Resumed:
    """Fresh objects into which the newest snapshot of a directory was restored."""

    def __init__(self, save_dir: Path, names: tuple[str, ...]) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.Linear(300, 5))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 7)
        with SnapshotManager(save_dir) as manager:
            manager.register(**{name: getattr(self, name) for name in names})
            self.found = manager.resume()

    @property
    def weight(self) -> bytes:
        return self.model[0].weight.detach().numpy().tobytes()

    @property
    def moment(self) -> float:
        return float(self.optimizer.state[self.model[0].weight]["exp_avg"].double().sum())


@pytest.mark.usefixtures("warm_import")
def test_a_run_of_another_program_is_resumed(plain_torch: WarmPython, tmp_path: Path) -> None:
    """Model, optimizer, scheduler, step and epoch of .pt files and of a DCP directory are restored by resume."""
    moment = run_without_ciuic(TRAINING + SAVING, tmp_path, python=plain_torch)
    weight = (tmp_path / "weight").read_bytes()
    every = ("model", "optimizer", "scheduler")
    expected = {
        "plain.pt": (("args",), ("a name",)),
        "marked.pt": (("note",), ()),
        "dcp": ((), ()),
    }
    for name, (values, left_out) in expected.items():
        done = import_state(tmp_path / name, tmp_path / f"{name}-snapshots", tags=("moved",))
        assert (done.objects, done.values, done.left_out) == (every, values, left_out)
        resumed = Resumed(tmp_path / f"{name}-snapshots", every)
        assert resumed.found is not None
        assert (resumed.found.id, resumed.found.step, resumed.found.epoch) == (done.id, 9, 4)
        assert (resumed.weight, resumed.moment) == (weight, moment)
        assert (resumed.scheduler.step_size, resumed.scheduler.last_epoch) == (3, 1)
    done = import_state(tmp_path / "bare.pt", tmp_path / "bare")
    assert done.objects == ("model",)
    assert Resumed(tmp_path / "bare", ("model",)).weight == weight
    with SnapshotManager(tmp_path / "marked.pt-snapshots") as manager:
        (info,) = manager.list_snapshots()
        state = manager.load_latest_snapshot()
    assert set(info.tags) >= {"imported", "moved"}
    assert state is not None
    assert state["note"] == {"a": 1}


@pytest.mark.usefixtures("warm_import")
@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_an_export_comes_back_with_its_generators(tmp_path: Path, to: str) -> None:
    """A snapshot that was exported and imported resumes with the same state and draws the same numbers."""
    model = torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.Linear(300, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    with SnapshotManager(tmp_path / "first") as manager:
        manager.save_snapshot(model, optimizer, epoch=2, step=3, metrics={"loss": 0.25}, wait=True)
        drawn = torch.rand(3)
        manager.export(tmp_path / "moved", to=to)
    before = torch.get_rng_state()
    done = import_state(tmp_path / "moved", tmp_path / "second")
    assert torch.equal(torch.get_rng_state(), before)
    assert (done.objects, done.values, done.left_out) == (("model", "optimizer"), (), ())
    resumed = Resumed(tmp_path / "second", ("model", "optimizer"))
    assert torch.equal(torch.rand(3), drawn)
    assert resumed.weight == model[0].weight.detach().numpy().tobytes()
    with SnapshotManager(tmp_path / "second") as manager:
        (info,) = manager.list_snapshots()
    assert (info.facts.step, info.facts.epoch, info.facts.metrics) == (3, 2, {"loss": 0.25})


class Evil:
    """Value whose pickle makes a directory when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.mark.usefixtures("warm_import")
def test_nothing_that_is_imported_is_executed(tmp_path: Path) -> None:
    """Pickles that would run something are refused, in a .pt, in an object and in the metadata of a checkpoint."""
    marker = tmp_path / "executed"
    torch.save({"model": {"weight": torch.ones(2)}, "evil": Evil(marker)}, tmp_path / "evil.pt")
    with pytest.raises(UsageError, match="weights_only"):
        import_state(tmp_path / "evil.pt", tmp_path / "snapshots")
    from torch.distributed import checkpoint

    state = {"weight": torch.ones(2), "evil": Evil(marker)}
    checkpoint.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(UsageError, match="weights_only"):
        import_state(tmp_path / "dcp", tmp_path / "snapshots")
    metadata = torch.serialization.pickle.dumps({"state_dict_metadata": Evil(marker)})
    assert any(code.name == "REDUCE" for code, _, _ in pickletools.genops(metadata))
    (tmp_path / "dcp/.metadata").write_bytes(metadata)
    with pytest.raises(ValueError, match="metadata"):
        import_state(tmp_path / "dcp", tmp_path / "snapshots")
    assert not marker.exists()
    assert not (tmp_path / "snapshots").exists()
    with pytest.raises(NotFound):
        import_state(tmp_path / "nothing", tmp_path / "snapshots")


@pytest.mark.usefixtures("warm_import")
def test_a_forged_checkpoint_is_refused(tmp_path: Path) -> None:
    """Metadata that names other files, or claims tensors larger than the files, is refused before it is used."""
    from torch.distributed import checkpoint

    checkpoint.save({"weight": torch.ones(70_000)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    genuine = (tmp_path / "dcp/.metadata").read_bytes()
    outside = b"../../secret"
    name = b"__0_0.distcp"
    assert genuine.count(name) == 1
    forged = genuine.replace(name, outside)
    number = (70_000).to_bytes(4, "little")
    assert genuine.count(number)
    for data, message in (
        (forged, "outside"),
        (genuine.replace(number, (0x7FFFFFFF).to_bytes(4, "little")), "bytes of the files|shorter"),
        (genuine[:-40], "pickle"),
    ):
        (tmp_path / "dcp/.metadata").write_bytes(data)
        with pytest.raises(ValueError, match=message):
            import_state(tmp_path / "dcp", tmp_path / "snapshots")
    (tmp_path / "dcp/.metadata").write_bytes(genuine)
    (tmp_path / "dcp/__0_0.distcp").rename(tmp_path / "elsewhere")
    (tmp_path / "dcp/__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="regular file"):
        import_state(tmp_path / "dcp", tmp_path / "snapshots")


HUGGING_FACE = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
set_seed(1)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2))
tokens = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 40
arguments = TrainingArguments(sys.argv[1], max_steps=6, save_steps=4, logging_steps=2, report_to="none", disable_tqdm=True,
                              use_cpu=True, per_device_train_batch_size=2)
Trainer(model, arguments, train_dataset=tokens).train()
print(json.dumps(0))"""


@pytest.mark.usefixtures("warm_import")
def test_a_checkpoint_of_the_trainer_is_continued(plain_torch: WarmPython, tmp_path: Path) -> None:
    """A folder of Hugging Face's Trainer becomes a snapshot from which the callback resumes the Trainer."""
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    pytest.importorskip("accelerate", reason="the extra `hf` is not installed")
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from ciuic.integrations.transformers import SnapshotCallback

    run_without_ciuic(HUGGING_FACE, tmp_path / "logs", python=plain_torch)
    folder = tmp_path / "logs/checkpoint-4"
    done = import_state(folder, tmp_path / "snapshots")
    assert done.objects == ("model", "optimizer", "scheduler", "progress", "unlogged")
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2))
    tokens = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 40
    arguments = {"max_steps": 6, "logging_steps": 2, "per_device_train_batch_size": 2, "save_strategy": "no"}
    callback = SnapshotCallback(tmp_path / "snapshots")
    trainer = Trainer(
        model,
        TrainingArguments(
            str(tmp_path / "more"), report_to="none", disable_tqdm=True, use_cpu=True, **arguments
        ),
        train_dataset=tokens,
        callbacks=[callback],
    )
    trainer.train(resume_from_checkpoint=callback.resume(trainer))
    steps = [line["step"] for line in trainer.state.log_history if "loss" in line]
    assert steps == [2, 4, 6], "the log goes on where the folder's ended"
    callback.manager.close()
    # Weights, and the configuration that came with them, go out again.
    callback.manager.export(tmp_path / "out", to="hf", snapshot=done.id)
    same = (folder / "model.safetensors", tmp_path / "out/model.safetensors")
    opened = """
import safetensors.torch
one, other = (safetensors.torch.load_file(path) for path in sys.argv[1:])
print(json.dumps(all(one[name].equal(other[name]) for name in one)))"""
    assert run_without_ciuic(opened, *same, python=plain_torch)
    assert json.loads((tmp_path / "out/config.json").read_text())["n_embd"] == 32


def test_the_commands_export_and_import(warm_torch: WarmPython, tmp_path: Path) -> None:
    """`ciuic export` and `ciuic import` move a state, refuse what exists, and name what they leave out."""

    def run(place: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        return warm_torch.run(["-m", "ciuic", "--repo", tmp_path / place, *arguments], timeout=240)

    model = torch.nn.Linear(3, 4)
    with SnapshotManager(tmp_path / "first") as manager:
        save = manager.save_snapshot(model, epoch=1, note=Path("/x"), wait=True)
    assert save is not None
    target = tmp_path / "state.pt"
    words = ("export", "latest", target, "--to", "torch")
    # As users have it, without any import.
    done = subprocess.run(
        [sys.executable, "-m", "ciuic", "--repo", tmp_path / "first", *words, "--json"],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "snapshot": save.id,
        "path": str(target),
        "format": "torch",
        "size_bytes": target.stat().st_size,
        "left_out": [],
    }
    again = run("first", *words)
    assert (again.returncode, "--overwrite" in again.stderr) == (6, True)
    done = run("second", "import", target, "--tag", "moved", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["objects"], found["values"], found["left_out"]) == (["model"], ["note"], [])
    (tmp_path / "no.pt").write_bytes(b"not of torch")
    refused = run("third", "import", tmp_path / "no.pt")
    assert (refused.returncode, "no.pt" in refused.stderr) == (2, True)
    fresh = torch.nn.Linear(3, 4)
    with SnapshotManager(tmp_path / "second") as manager:
        manager.register(model=fresh)
        assert manager.resume() is not None
    assert torch.equal(fresh.weight, model.weight)


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    """Without torch the commands say that torch is missing, with exit code 2."""
    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.save_snapshot(torch.nn.Linear(3, 4), wait=True)
    source = "import sys; sys.modules['torch'] = None; from ciuic.cli import main; sys.argv[0] = 'ciuic'; sys.exit(main())"
    for arguments in (
        ["export", "latest", str(tmp_path / "x.pt"), "--to", "torch"],
        ["import", str(tmp_path / "snapshots/x.pt")],
    ):
        (tmp_path / "snapshots/x.pt").write_bytes(b"")
        done = subprocess.run(
            [sys.executable, "-c", source, "--repo", str(tmp_path / "snapshots"), *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.returncode, "package torch" in done.stderr) == (2, True), done.stderr
