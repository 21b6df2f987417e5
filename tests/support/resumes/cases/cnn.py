"""A convolutional network with mixed precision, gradient scaling and an average of its weights, in a loop of its own."""

from __future__ import annotations

import random
from typing import Any, Final

import torch
from support.resumes.child import ResumedRun, generators
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

from ciuic import SnapshotManager
from ciuic.training import OnImprovement

MODULES: Final = "torch torch._dynamo torch.optim.swa_utils"
WORLD: Final = 1
BY_DESIGN: Final[dict[str, str]] = {}
_EPOCHS: Final = 6
_BATCHES: Final = 10


class Images(Dataset[Any]):
    """Images that are shifted and made noisy while they are loaded."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(3)
        self._images = torch.rand(8 * _BATCHES, 3, 12, 12, generator=made)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, at: int) -> tuple[torch.Tensor, int]:
        shifted = self._images[at].roll(random.randrange(3), 2)
        return shifted + 0.1 * torch.rand(3, 12, 12), at % 4


def _network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 16, 3, stride=2),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(16 * 16, 4),
    )


def train(run: ResumedRun) -> None:
    """Train with bfloat16 and a scale of the loss that overflows now and then."""
    torch.manual_seed(1)
    random.seed(2)
    model = _network()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=_EPOCHS * _BATCHES)
    # Grows to an overflow, which skips a step and shrinks it again.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**122, growth_interval=5)
    history: dict[str, Any] = {"sum": 0.0, "losses": [], "validation": []}
    loader = DataLoader(Images(), batch_size=8, shuffle=True)
    manager = SnapshotManager(
        run.save_dir, every_steps=4, max_snapshots=4, save_when=[OnImprovement("validation", "min")]
    )
    manager.register(
        model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, average=average, history=history
    )
    manager.register(loader=loader)
    resumed = manager.resume()
    images, labels = torch.stack([Images()._images[at] for at in range(32)]), torch.arange(32) % 4
    for epoch in range((resumed.epoch or 0) if resumed else 0, _EPOCHS):
        for x, y in loader:
            with torch.autocast("cpu", torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            average.update_parameters(model)
            optimizer.zero_grad()
            scheduler.step()
            history["sum"] += float(loss.detach())
            history["losses"].append(float(loss.detach()))
            rate, scale = scheduler.get_last_lr()[0], scaler.get_scale()
            run.report(f"batch {len(history['losses'])}", {"loss": loss, "rate": rate, "scale": scale})
        average.eval()
        with torch.no_grad():
            validation = torch.nn.functional.cross_entropy(average(images), labels)
        average.train()
        mean = sum(history["losses"][-_BATCHES:]) / _BATCHES
        run.report(f"epoch {epoch}", {"loss": mean, "sum": history["sum"], "validation": validation})
        manager.report(validation=float(validation))
    manager.close()
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "scaler": scaler,
        "average": average,
    }
    run.finish({name: one.state_dict() for name, one in state.items()} | generators(), history)
