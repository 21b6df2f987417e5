"""Lightning with values of whole epochs, a validation, ReduceLROnPlateau, EarlyStopping and ModelCheckpoint.

On several ranks with DistributedDataParallel, whose ranks Lightning connects.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any, Final

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import DDPStrategy
from support.resumes.child import ResumedRun, generators
from torch.utils.data import DataLoader, TensorDataset

from ciuic.integrations.lightning import SnapshotCallback, SnapshotCheckpointIO, resumable

MODULES: Final = "torch torch._dynamo lightning.pytorch.callbacks ciuic.integrations.lightning"
WORLD: Final = 1
CONNECTS_RANKS: Final = True
BY_DESIGN: Final = {
    "at the end: current score": "of the last checkpoint that this process saved: Lightning does not restore it",
    "log: a line is missing": "Lightning gives its loggers the line after the callbacks of the step, one of which saves",
}


class Report(Logger):  # type: ignore[misc, unused-ignore]
    """Logger that reports each line."""

    def __init__(self, run: ResumedRun) -> None:
        super().__init__()
        self._run = run

    @property
    def name(self) -> str:
        return "report"

    @property
    def version(self) -> str:
        return "0"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Have none."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._run.report(f"log {step} {'/'.join(sorted(metrics))}", metrics)


class Epochs(lightning.Callback):  # type: ignore[misc, unused-ignore]
    """Callback that reports what other callbacks see at the end of an epoch."""

    def __init__(self, run: ResumedRun) -> None:
        self._run = run

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self._run.report(f"epoch {trainer.current_epoch}", {**trainer.callback_metrics, "rate": rate})


class Classifier(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 32),
            torch.nn.BatchNorm1d(32),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(32, 2),
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.layers(x + 0.01 * torch.rand_like(x)), y)
        # Synchronized, because the rate follows it.
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("total", loss, on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        if batch_idx < 3:
            self.log("early", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("validation", torch.nn.functional.cross_entropy(self.layers(x), y), sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.05)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss_epoch"}}


def train(run: ResumedRun) -> None:
    """Train until the loss of the validation no longer falls."""
    lightning.seed_everything(1)
    # As many batches on each rank as one process has.
    x = torch.rand(80 * run.world, 8)
    data = TensorDataset(x, (x.sum(1) > 4).long())
    model = Classifier()
    io = SnapshotCheckpointIO(run.save_dir, every_steps=4, max_snapshots=4)
    stopping = EarlyStopping("validation", patience=2, min_delta=0.02)
    best = ModelCheckpoint(f"{run.save_dir}-files", monitor="validation", save_top_k=2)
    trainer = lightning.Trainer(
        max_epochs=8,
        accelerator="cpu",
        devices=run.world,
        strategy=DDPStrategy(timeout=timedelta(seconds=60)) if run.world > 1 else "auto",
        plugins=[io],
        callbacks=[Epochs(run), stopping, best, SnapshotCallback(io)],
        logger=Report(run),
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = resumable(DataLoader(data, batch_size=8, shuffle=True))
    trainer.fit(model, loader, DataLoader(data, batch_size=40), ckpt_path=io.latest())
    state = {
        "model": model.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
    }
    kept = best.state_dict()
    values = {
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "stopped epoch": stopping.stopped_epoch,
        "early stopping": {name: str(one) for name, one in stopping.state_dict().items()},
        "best score": kept["best_model_score"],
        "current score": kept["current_score"],
        # Lightning gives a checkpoint another version if a process that was killed has left one of its name.
        "files": sorted(re.sub(r"(.*/|-v\d+)", "", path) for path in kept["best_k_models"]),
        **{f"metric {name}": one for name, one in trainer.callback_metrics.items()},
    }
    run.finish(state | generators(), values)
