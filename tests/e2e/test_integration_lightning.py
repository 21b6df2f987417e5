"""Lightning under both its names, killed and resumed from the store: the same bits; and ModelCheckpoint over our CheckpointIO."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from support.runs import EXAMPLES, assert_goes_on, on_two_ranks, run

pytest.importorskip("torch", reason="no CPU build of PyTorch is offered here")
pytest.importorskip("lightning.pytorch", reason="the extra `lightning` is not installed")

EXAMPLE = EXAMPLES / "lightning_fit.py"
TWO_DEVICES = {
    'accelerator="cpu",': 'accelerator="cpu", devices=2, strategy="ddp",',
    "batch_size=8": "batch_size=4",
}
WITH_MODEL_CHECKPOINT = """
from pathlib import Path
from lightning.pytorch.callbacks import ModelCheckpoint
io = SnapshotCheckpointIO(save_dir)
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


def test_fit_goes_on_in_the_middle_of_an_epoch_to_the_same_bits(tmp_path: Path) -> None:
    """The example: order of the data, dropout, schedule. Alone, and as two processes, each with batches and dropout of its own."""
    two = _two_devices(EXAMPLE.read_text(), tmp_path / "two.py")
    assert_goes_on("torch lightning ciuic.integrations.lightning", {EXAMPLE: (9, 7), two: (7,)}, tmp_path)


def _two_devices(source: str, script: Path) -> Path:
    for old, new in TWO_DEVICES.items():
        assert old in source
        source = source.replace(old, new)
    script.write_text(source)
    return on_two_ranks(script, script.parent)


def test_what_model_checkpoint_saves_and_removes_are_snapshots(tmp_path: Path) -> None:
    """save_top_k, save_last and ckpt_path="last" as with files; what it removes is not kept any longer. By one process and by two. Under the
    other name of the package, which has other classes."""
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
    whole, _, last, whole_of_two, _, last_of_two = run(modules, *names, where=tmp_path)
    assert last["steps"] == last_of_two["steps"] == 30 - 12
    assert last["digest"] == whole["digest"]
    assert last_of_two["digest"] == whole_of_two["digest"]
    for found in (whole, last, whole_of_two, last_of_two):
        assert (found["facts"]["steps"], found["facts"]["held"]) == ([24, 28], 2)
        assert found["facts"]["largest"] < 1000, "a file that says which snapshot it is"
