"""Loggers of Lightning and of the Trainer of transformers are told of snapshots without configuration."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.late_modules import LateModule, torch
from support.offline_wandb import set_offline

from ciuic.errors import NotFound
from ciuic.training.snapshots import TrainingSnapshots

mlflow: Any = LateModule("mlflow", lacking="mlflow is not installed")
wandb: Any = LateModule("wandb", lacking="wandb is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the libraries' own


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Set all trackers to files below the test's directory; yields the URI of MLflow's."""
    set_offline(monkeypatch, tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    before = mlflow.get_tracking_uri()
    uri = (tmp_path / "mlruns").as_uri()
    mlflow.set_tracking_uri(uri)
    yield uri
    mlflow.set_tracking_uri(before)
    if wandb.run is not None:
        wandb.run.finish()
    wandb.teardown()


def check(save_dir: Path, mlflow_run: str, wandb_run: str, log_dir: str) -> None:
    """Each snapshot, the last one of the training too, was logged to all three."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    saved = TrainingSnapshots(save_dir).list_snapshots()[::-1]
    assert len(saved) > 1
    for one in saved:
        runs = {name: run["run"] for name, run in one.facts.trackers.items()}
        assert runs == {"mlflow": mlflow_run, "wandb": wandb_run, "tensorboard": os.path.abspath(log_dir)}
    client = mlflow.MlflowClient()
    run = client.get_run(mlflow_run)
    assert saved[-1].facts.trackers["mlflow"]["experiment"] == run.info.experiment_id
    assert run.data.tags["ciuic.snapshot"] == saved[-1].id
    steps = [one.facts.step for one in saved]
    assert [one.step for one in client.get_metric_history(mlflow_run, "ciuic.size_bytes")] == steps
    summary = dict(wandb.run.summary)
    for one in saved:
        assert summary[f"ciuic/snapshots/{one.id}"]["step"] == one.facts.step
    # The last may be in a file of its own, of a writer that the Trainer had closed, or in both: a save that failed there is logged again.
    found: set[int] = set()
    for file in sorted(Path(log_dir).glob("events*")):
        read = EventAccumulator(str(file))
        read.Reload()
        if "ciuic/size_bytes" in read.Tags()["scalars"]:
            found |= {one.step for one in read.Scalars("ciuic/size_bytes")}
    assert sorted(found) == steps


def test_the_loggers_of_a_lightning_trainer_are_found(store: str, tmp_path: Path) -> None:
    """MLFlowLogger, WandbLogger and TensorBoardLogger of a Trainer get each snapshot of its SnapshotCallback."""
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger

    from ciuic.integrations.lightning import SnapshotCallback, SnapshotCheckpointIO

    class Logging(BoringModel):  # type: ignore[misc, unused-ignore]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            result = super().training_step(batch, batch_idx)
            self.log("loss", result["loss"])
            return result

    loggers: list[Any] = [
        MLFlowLogger("ours", tracking_uri=store),
        WandbLogger(project="ours"),
        TensorBoardLogger(tmp_path / "tb"),
    ]
    io = SnapshotCheckpointIO(tmp_path / "snapshots", every_steps=2)
    trainer = lightning.Trainer(
        max_steps=5,
        limit_val_batches=0,
        logger=loggers,
        plugins=[io],
        callbacks=[SnapshotCallback(io)],
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        accelerator="cpu",
        default_root_dir=tmp_path,
    )
    trainer.fit(Logging())
    io.manager.close()
    check(tmp_path / "snapshots", loggers[0].run_id, wandb.run.id, loggers[2].log_dir)
    again = SnapshotCheckpointIO(tmp_path / "snapshots")
    newest = again.manager.list_snapshots()[0].id
    assert str(again.latest(tracker_run=loggers[0].run_id)).endswith(newest)
    with pytest.raises(NotFound, match="has no snapshot of the run nobody's"):
        again.latest(tracker_run="nobody's")
    again.manager.close()


def test_what_the_trainer_of_transformers_reports_to_is_found(store: str, tmp_path: Path) -> None:
    """With ``report_to`` MLflow, W&B and TensorBoard get each snapshot, also the last, which is taken when their run has ended."""
    transformers = pytest.importorskip("transformers")
    from ciuic.integrations.transformers import SnapshotCallback

    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16, n_positions=8)
    )
    tokens = torch.arange(8) % 16
    callback = SnapshotCallback(tmp_path / "snapshots", every_steps=2)
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            str(tmp_path / "out"),
            max_steps=5,
            per_device_train_batch_size=1,
            report_to=["mlflow", "wandb", "tensorboard"],
            save_strategy="no",
            logging_steps=1,
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": tokens, "labels": tokens}] * 8,
        callbacks=[callback],
    )
    trainer.train()
    callback.manager.close()
    (run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    (log_dir,) = {file.parent for file in tmp_path.rglob("events.out*") if "snapshots" not in file.parts}
    check(tmp_path / "snapshots", run.info.run_id, wandb.run.id, str(log_dir))
    again = SnapshotCallback(tmp_path / "snapshots")
    found = again.resume(trainer, tracker_run=run.info.run_id)
    assert found is not None
    assert again.manager.step == 5
    assert again._resumed is not None
    again._resumed.finish()  # as the first hook of the training does
    with pytest.raises(NotFound, match="has no snapshot of the run nobody's"):
        again.resume(trainer, tracker_run="nobody's")
    again.manager.close()
