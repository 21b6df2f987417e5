"""Checkpoints of Lightning become files that torch and Lightning open without ciuic when `fit` has ended."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.late_modules import skipped_without
from support.warm_python import WarmPython
from support.without_ciuic import run_without_ciuic

pytestmark = skipped_without("torch", "lightning")

LINE = """
import hashlib, json, os, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
import lightning, torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

class Line(lightning.LightningModule):
    def __init__(self, width, place):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, width)
    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss
    def test_step(self, batch, batch_idx):
        self.log("sum", self.layer.weight.double().sum())
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)

def digest(tensor):
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()

top = Path(sys.argv[1])
quiet = dict(default_root_dir=top, logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
torch.manual_seed(1)
loader = DataLoader(TensorDataset(torch.randn(32, 4)), 4)
"""
FITTING = (
    LINE
    + """
from ciuic.integrations.lightning import SnapshotCallback, SnapshotCheckpointIO
def fit(name, epochs=3, ckpt_path=None, save_last=True, **options):
    io = SnapshotCheckpointIO(top / f"{name}-snapshots", **options)
    files = ModelCheckpoint(top / f"{name}-files", monitor="loss", mode="min", save_top_k=2, save_last=save_last)
    trainer = lightning.Trainer(max_epochs=epochs, plugins=[io], callbacks=[files, SnapshotCallback(io)], **quiet)
    model = Line(3, Path("/data"))
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    return io, files, trainer, model
"""
)
# Loaded by everything that people use, in a process that cannot import ciuic.
OPENED = (
    LINE
    + """
found = {}
for path in sys.argv[2:]:
    whole = torch.load(path, weights_only=True)
    mapped = torch.load(path, weights_only=True, mmap=True)
    model = Line.load_from_checkpoint(path)
    assert torch.equal(mapped["state_dict"]["layer.weight"], model.layer.weight)
    found[path] = [digest(model.layer.weight), model.hparams.width, model.hparams.place, whole["global_step"], sorted(whole["loops"])]
last = sys.argv[-1]
trainer = lightning.Trainer(max_epochs=5, **quiet)
trainer.fit(Line(3, "/data"), loader, ckpt_path=last)
found["continued"] = trainer.global_step
print(json.dumps(found))
"""
)

OPENED_WEIGHTS = (
    LINE
    + """
print(json.dumps({path: digest(Line.load_from_checkpoint(path).layer.weight) for path in sys.argv[1:]}))
"""
)


@pytest.fixture(scope="module")
def python() -> Iterator[WarmPython]:
    with WarmPython("torch", "torch._dynamo", "lightning", "ciuic.integrations.lightning") as one:
        yield one


@pytest.fixture(scope="module")
def plain_python() -> Iterator[WarmPython]:
    """Provide programs that find Lightning imported, and nothing of ciuic."""
    with WarmPython("torch", "torch._dynamo", "lightning") as one:
        yield one


def _fit(python: WarmPython, source: str, *arguments: object) -> Any:
    done = python.run(["-c", FITTING + source, *arguments], timeout=250)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


DEFAULT = """
io, files, trainer, model = fit("a", save_last=sys.argv[2] if sys.argv[2] == "link" else True)
best, last = files.best_model_path, str(Path(files.last_model_path).resolve())
plugin = {path: digest(io.load_checkpoint(path)["state_dict"]["layer.weight"]) for path in map(str, Path(best).parent.iterdir())}
place = type(io.load_checkpoint(best)["hyper_parameters"]["place"]).__name__
tested = trainer.test(model, loader, ckpt_path="best", verbose=False)[0]["sum"]
print(json.dumps({"best": best, "last": files.last_model_path, "plugin": plugin, "place": place, "tested": tested,
                  "small": [path for path in plugin if os.path.getsize(path) < 1000], "link": os.path.islink(files.last_model_path)}))
"""


@pytest.mark.parametrize("save_last", ["file", "link"])
def test_best_and_last_are_opened_without_ciuic(
    python: WarmPython, plain_python: WarmPython, tmp_path: Path, save_last: str
) -> None:
    """After fit torch.load, load_from_checkpoint and fit(ckpt_path=…) work on the best and the last checkpoint.

    The plugin still finds their snapshots, in which values have their own types; the others stay pointers.
    """
    found = _fit(python, DEFAULT, tmp_path, save_last)
    opened = run_without_ciuic(OPENED, tmp_path, found["best"], found["last"], python=plain_python)
    assert opened.pop("continued") == 5 * 8
    for path in (found["best"], found["last"]):
        weights, width, place, step, loops = opened[path]
        assert weights == found["plugin"][path]
        assert (width, place) == (3, "/data")
        assert step in (8, 16, 24)
        assert "fit_loop" in loops
    assert found["place"] == "PosixPath"
    assert found["link"] == (save_last == "link")
    assert not {found["best"], found["last"]} & set(found["small"])
    assert len(found["plugin"]) - len(found["small"]) in (2, 3), "a link counts twice"


REMOVED = """
io, files, trainer, model = fit("a", materialize="all")
kept = sorted(files.best_k_models)
sizes = {path: os.path.getsize(path) for path in [*kept, files.last_model_path]}
def held():
    io.latest()  # what was overwritten (last.ckpt) is let go
    return sorted(one.id for one in io.manager.list_snapshots() if one.held)
before = held()
io.remove_checkpoint(kept[0])
after = held()
# A run that goes on: Lightning removes checkpoints that are files, and their snapshots.
_, more, _, _ = fit("a", 6, ckpt_path=files.last_model_path)
there = sorted(str(path) for path in Path(kept[0]).parent.glob("*.ckpt"))
print(json.dumps({"small": min(sizes.values()), "before": len(before), "after": len(after), "exists": os.path.exists(kept[0]),
                  "there": there, "kept": sorted([*more.best_k_models, more.last_model_path]), "held": len(held())}))
"""


def test_lightning_removes_checkpoints_that_are_files(python: WarmPython, tmp_path: Path) -> None:
    """A checkpoint that has become a file is removed with its snapshot, also by the run that goes on."""
    found = _fit(python, REMOVED, tmp_path)
    assert found["small"] > 1000
    assert (found["before"], found["after"], found["exists"]) == (3, 2, False)
    assert set(found["kept"]) <= set(found["there"])
    assert found["held"] == len(found["there"])


ALONE = """
io, files, trainer, model = fit("a")
last = files.last_model_path
expected = digest(io.load_checkpoint(last)["state_dict"]["layer.weight"])
io.manager.close()
import shutil
shutil.rmtree(io.manager.save_dir)
other, _, going_on, _ = fit("b", 5, ckpt_path=last)
alone = digest(other.load_checkpoint(last)["state_dict"]["layer.weight"])
from ciuic.training import import_state
done = import_state(last, top / "c-snapshots")
again = SnapshotCheckpointIO(top / "c-snapshots")
resumed = lightning.Trainer(max_epochs=5, plugins=[again], callbacks=[SnapshotCallback(again)], **quiet)
resumed.fit(Line(3, Path("/data")), loader, ckpt_path=again.latest())
print(json.dumps([expected == alone, going_on.global_step, sorted(done.objects), resumed.global_step, resumed.current_epoch]))
"""


def test_a_file_without_its_snapshot_is_loaded_and_imported(python: WarmPython, tmp_path: Path) -> None:
    """The plugin reads the file where the snapshot is gone, and `ciuic import` makes a snapshot of it again."""
    assert _fit(python, ALONE, tmp_path) == [True, 40, ["checkpoint", "of_rank"], 40, 5]


OUTSIDE = """
kind = sys.argv[2]
class Last(lightning.Callback):
    def on_train_end(self, trainer, module):
        trainer.save_checkpoint(top / "within.ckpt")
        sizes["within.ckpt"] = os.path.getsize(top / "within.ckpt")
    def on_fit_end(self, trainer, module):
        trainer.save_checkpoint(top / "end.ckpt")
    def teardown(self, trainer, module, stage):
        trainer.save_checkpoint(top / "teardown.ckpt")
sizes = {}
io = SnapshotCheckpointIO(top / "snapshots", materialize=kind)
trainer = lightning.Trainer(max_epochs=1, plugins=[io], callbacks=[Last()], enable_checkpointing=False, **quiet)
model = Line(3, Path("/data"))
trainer.strategy.connect(model)
trainer.save_checkpoint(top / "before.ckpt", weights_only=True)
sizes["before.ckpt"] = os.path.getsize(top / "before.ckpt")
trainer.fit(model, loader)
trainer.save_checkpoint(top / "after.ckpt")
paths = [str(top / f"{name}.ckpt") for name in ("before", "end", "teardown", "after")]
print(json.dumps({"within": sizes["within.ckpt"], "before": sizes["before.ckpt"], "sizes": list(map(os.path.getsize, paths)),
                  "paths": paths, "weights": digest(model.layer.weight), "held": sum(one.held for one in io.manager.list_snapshots())}))
"""


@pytest.mark.parametrize("kind", ["all", "best,last"])
def test_a_checkpoint_saved_outside_of_fit_is_a_file_at_once(
    python: WarmPython, plain_python: WarmPython, tmp_path: Path, kind: str
) -> None:
    """`trainer.save_checkpoint` before and after `fit`, and in hooks after the teardown, leaves a file on return.

    A checkpoint that is saved while the Trainer runs is a pointer at first: the training does not wait for a file.
    """
    found = _fit(python, OUTSIDE, tmp_path, kind)
    assert found["within"] < 1000
    assert min(found["before"], *found["sizes"]) > 1000
    assert found["held"] == 5
    opened = run_without_ciuic(OPENED_WEIGHTS, *found["paths"], python=plain_python)
    assert [opened[path] == found["weights"] for path in found["paths"]] == [False, True, True, True]


def test_no_file_is_written_where_none_is_wanted(python: WarmPython, tmp_path: Path) -> None:
    """With materialize="none" a checkpoint that is saved outside of `fit` is a pointer like any other."""
    found = _fit(python, OUTSIDE, tmp_path, "none")
    assert max(found["within"], found["before"], *found["sizes"]) < 1000


KILLED = """
import signal
real = os.rename
def killed(source, target, **options):
    if str(source).endswith(".tmp") and os.path.basename(source).startswith("."):
        os.kill(os.getpid(), signal.SIGKILL)
    real(source, target, **options)
os.rename = killed
fit("a")
"""
AFTER = """
from ciuic.integrations.checkpoint_pointer import read_pointer
folder = top / "a-files"
left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
pointers = [path for path in sorted(folder.glob("*.ckpt")) if not read_pointer(path).is_whole]
io = SnapshotCheckpointIO(top / "a-snapshots")
steps = sorted(io.load_checkpoint(path)["global_step"] for path in pointers)
_, files, _, _ = fit("a", 4, ckpt_path=folder / "last.ckpt")
still = [path.name for path in folder.iterdir() if path.name.startswith(".") and path.name.split(".ckpt")[0][1:] in ("last",)]
print(json.dumps([len(left), len(pointers), steps, os.path.getsize(files.last_model_path) > 1000, still]))
"""


def test_a_kill_leaves_a_pointer_or_the_whole_file(python: WarmPython, tmp_path: Path) -> None:
    """Killed right before a checkpoint becomes a file, a run leaves pointers that the plugin loads."""
    done = python.run(["-c", FITTING + KILLED, tmp_path], timeout=250)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left, pointers, steps, is_whole, still = _fit(python, AFTER, tmp_path)
    assert (left, pointers, len(steps)) == (1, 3, 3)
    assert 24 in steps
    assert is_whole
    assert still == []


def test_the_option_is_checked() -> None:
    """`materialize` takes best, last, both, all or none, and names what is wrong otherwise."""
    from ciuic.integrations.lightning_parts import parse_kinds

    assert parse_kinds("best,last") == parse_kinds("last, best") == {"best", "last"}
    assert parse_kinds("all") > parse_kinds("best")
    assert parse_kinds("none") == set()
    with pytest.raises(ValueError, match="worst"):
        parse_kinds("worst")
