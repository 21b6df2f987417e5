"""Lightning under both its names, killed and resumed, ends with the same bits, also with ModelCheckpoint."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.late_modules import skipped_without
from support.runs import EXAMPLES, assert_goes_on, on_two_ranks, run
from support.warm_python import WarmPython

pytestmark = [pytest.mark.slow, skipped_without("torch", "lightning")]

EXAMPLE = EXAMPLES / "lightning_fit.py"
TWO_DEVICES = {
    'accelerator="cpu",': 'accelerator="cpu", devices=2, strategy="ddp",',
    "batch_size=8": "batch_size=4",
}
WITH_MODEL_CHECKPOINT = """
from pathlib import Path
from lightning.pytorch.callbacks import ModelCheckpoint
io = SnapshotCheckpointIO(save_dir, materialize="none")
files = ModelCheckpoint(f"{save_dir}-files", every_n_train_steps=4, save_top_k=2, monitor="step", mode="max", save_last="link")
trainer = lightning.Trainer(max_epochs=3, accelerator="cpu", plugins=[io], callbacks=[files, SnapshotCallback(io)], logger=False,
                            enable_progress_bar=False, enable_model_summary=False)
trainer.fit(model, resumable(loader), ckpt_path="last")
kept = sorted(path for path in Path(f"{save_dir}-files").iterdir() if not path.is_symlink())
io.latest()  # what a run that was killed had removed is let go
FACTS = {
    "files": [path.name for path in kept],
    "steps": [io.load_checkpoint(path)["global_step"] for path in kept],
    "held": sum(one.held for one in io.manager.list_snapshots()),
    "largest": max(path.stat().st_size for path in kept),
}
"""

WITH_LOGGED_VALUES = """
import torchmetrics
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint

class Logging(Classifier):
    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self.layers(x)
        loss = torch.nn.functional.cross_entropy(out, y)
        self.accuracy(out, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("total", loss, on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        if batch_idx < 3:
            self.log("early", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss_epoch"}}

class Record(Callback):
    epochs = {}
    def on_train_epoch_end(self, trainer, module):
        found = {key: float(value).hex() for key, value in trainer.callback_metrics.items()}
        self.epochs[trainer.current_epoch] = {**found, "rate": trainer.optimizers[0].param_groups[0]["lr"]}

lightning.seed_everything(1)
model = Logging()
io = SnapshotCheckpointIO(save_dir, every_steps=2)
stopping = EarlyStopping("loss_epoch", patience=1, min_delta=0.01)
best = ModelCheckpoint(f"{save_dir}-files", monitor="loss_epoch", save_top_k=1)
trainer = lightning.Trainer(max_epochs=4, accelerator="cpu", plugins=[io], callbacks=[Record(), stopping, best, SnapshotCallback(io)],
                            logger=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(model, resumable(loader), ckpt_path=io.latest())
FACTS = {"epochs": Record.epochs, "stopped": stopping.state_dict()["wait_count"], "best": float(stopping.best_score).hex(),
         "current": float(best.current_score).hex()}
"""


@pytest.fixture(scope="module")
def python() -> Iterator[WarmPython]:
    with WarmPython(
        "torch", "torch._dynamo", "lightning", "torchmetrics", "ciuic.integrations.lightning"
    ) as one:
        yield one


def test_fit_goes_on_in_the_middle_of_an_epoch_to_the_same_bits(python: WarmPython, tmp_path: Path) -> None:
    """The example resumes to the same bits, alone and as two processes with batches of their own."""
    two = _two_devices(EXAMPLE.read_text(), tmp_path / "two.py")
    assert_goes_on(
        "torch lightning ciuic.integrations.lightning",
        {EXAMPLE: (9, 7), two: (7,)},
        tmp_path,
        elsewhere=(EXAMPLE, 9),
        python=python,
    )


def _two_devices(source: str, script: Path) -> Path:
    for old, new in TWO_DEVICES.items():
        assert old in source
        source = source.replace(old, new)
    script.write_text(source)
    return on_two_ranks(script, script.parent)


def test_model_checkpoint_saves_and_removes_snapshots(python: WarmPython, tmp_path: Path) -> None:
    """ModelCheckpoint's save_top_k, save_last and ckpt_path="last" work with snapshots as with files.

    Tested with one process and with two, and under the other name of the package, which has other classes.
    """
    head = EXAMPLE.read_text().partition("io = SnapshotCheckpointIO")[0]
    source = head + WITH_MODEL_CHECKPOINT
    modules = "torch lightning ciuic.integrations.lightning"
    if find_spec("pytorch_lightning") is not None:
        modules = "torch pytorch_lightning ciuic.integrations.pytorch_lightning"
        source = source.replace("ciuic.integrations.lightning", "ciuic.integrations.pytorch_lightning")
        source = source.replace("import lightning\n", "import pytorch_lightning as lightning\n")
        source = source.replace("lightning.pytorch.callbacks", "pytorch_lightning.callbacks")
    script = tmp_path / "files.py"
    script.write_text(source)
    two = _two_devices(source, tmp_path / "two.py")
    names = (f"whole@{script}", f"parts:15@{script}", f"parts@{script}")
    names += (f"whole2@{two}", f"parts2:15@{two}", f"parts2@{two}")
    uninterrupted, _, last, whole_of_two, _, last_of_two = run(modules, *names, where=tmp_path, python=python)
    assert last["steps"] == last_of_two["steps"] == 30 - 12
    assert last["digest"] == uninterrupted["digest"]
    assert last_of_two["digest"] == whole_of_two["digest"]
    for found in (uninterrupted, last, whole_of_two, last_of_two):
        assert (found["facts"]["steps"], found["facts"]["held"]) == ([24, 28], 2)
        assert found["facts"]["largest"] < 1000, "a file that says which snapshot it is"


def test_what_is_logged_over_an_epoch_is_as_in_the_uninterrupted_run(
    python: WarmPython, tmp_path: Path
) -> None:
    """Means, sums, maxima and metrics of an epoch that was resumed in its middle are the whole epoch's, to the bit.

    So are what early stopping, ReduceLROnPlateau and ModelCheckpoint decide by them.
    """
    script = tmp_path / "logged.py"
    script.write_text(EXAMPLE.read_text().partition("model = Classifier()")[0] + WITH_LOGGED_VALUES)
    names = (
        f"whole@{script}",
        f"parts:7@{script}",
        f"parts:9@{script}",
        f"parts:10@{script}",
        f"parts@{script}",
        # Twice in one epoch: what was logged in its first three batches alone waits for the end of the epoch.
        f"twice:5@{script}",
        f"twice:5@{script}",
        f"twice@{script}",
    )
    whole, _, _, _, last, _, _, twice = run(
        "torch lightning torchmetrics ciuic.integrations.lightning", *names, where=tmp_path, python=python
    )
    assert last["digest"] == whole["digest"]
    assert last["facts"]["epochs"] == {
        epoch: whole["facts"]["epochs"][epoch] for epoch in last["facts"]["epochs"]
    }
    assert last["facts"]["epochs"]
    assert "0" in twice["facts"]["epochs"], "the first epoch did not end in the last process"
    assert twice["facts"] == whole["facts"]
    assert {**last["facts"], "epochs": 0} == {**whole["facts"], "epochs": 0}


WRONG_REPOSITORY = """
import copy, io as memory, sys, lightning, torch
from pathlib import Path
from ciuic.errors import NotFound
from ciuic.integrations import checkpoint_pointer
from ciuic.integrations.lightning import SnapshotCallback, SnapshotCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()
    def test_step(self, batch, batch_idx):
        self.log("sum", self.layer.weight.double().sum())
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

def trainer(name):
    io = SnapshotCheckpointIO(top / f"{name}-s", materialize="none")
    best = ModelCheckpoint(top / f"{name}-files")
    options = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
    return lightning.Trainer(max_epochs=2, accelerator="cpu", plugins=[io], callbacks=[best, SnapshotCallback(io)], **options), io, best

top = Path(sys.argv[1])
loader = DataLoader(TensorDataset(torch.randn(32, 4)), 4)
first, first_io, first_best = trainer("A")
model = Line()
first.fit(model, loader)
second, second_io, _ = trainer("B")
second.fit(Line(), loader)
tested = second.test(Line(), loader, ckpt_path=first_best.best_model_path, verbose=False)
assert tested[0]["sum"] == float(model.layer.weight.double().sum()), tested

ids = [one.id for one in first_io.manager.list_snapshots()]
# A snapshot that is being stored is waited for; this one never comes.
checkpoint_pointer._ARRIVAL_SECONDS = 1.0
pointer = Path(first_best.best_model_path)
pointer.write_text(pointer.read_text().replace("checkpoint-", "checkpoint-gone"))
for plugin in (first_io, second_io):
    try:
        plugin.load_checkpoint(pointer)
    except NotFound as error:
        assert all(id in str(error) for id in ids), error
    else:
        raise AssertionError("another snapshot was loaded")

for value in (model, first, first.strategy, first.fit_loop):
    torch.save(value, memory.BytesIO())
    copy.deepcopy(value)
print("done")
"""


def test_a_checkpoint_is_never_another_snapshot_than_the_one_it_names(
    python: WarmPython, tmp_path: Path
) -> None:
    """A checkpoint of another repository is loaded from there; one whose snapshot is gone raises NotFound.

    The Trainer with the plugin can be pickled and copied, as without it.
    """
    script = tmp_path / "wrong.py"
    script.write_text(WRONG_REPOSITORY)
    done = python.run([script, tmp_path], timeout=250)
    assert (done.returncode, done.stdout[-5:]) == (0, "done\n"), done.stderr


SAVED_AGAIN = """
import os, sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
import torch
from ciuic.integrations.lightning import SnapshotCheckpointIO

top = Path(sys.argv[1])
io = SnapshotCheckpointIO(top / "snapshots", materialize="none")
def save(step, path):
    io.save_checkpoint({"epoch": 0, "global_step": step, "state_dict": {"x": torch.full((9,), step)}}, path)
    io.manager.wait()
save(0, top / "best.ckpt")
os.symlink(top / "best.ckpt", top / "last.ckpt")
for step in range(1, 5):
    save(step, top / "other.ckpt")
save(5, top / "last.ckpt")
io.teardown()
held = sorted(one.facts.step for one in io.manager.list_snapshots() if one.held)
assert held == [0, 4, 5], held
print("done")
"""


def test_a_checkpoint_that_is_saved_again_keeps_its_last_snapshot_alone(
    python: WarmPython, tmp_path: Path
) -> None:
    """The snapshot of a checkpoint that is replaced at the same path goes; that of a link's target stays."""
    script = tmp_path / "again.py"
    script.write_text(SAVED_AGAIN)
    done = python.run([script, tmp_path], timeout=250)
    assert (done.returncode, done.stdout[-5:]) == (0, "done\n"), done.stderr
