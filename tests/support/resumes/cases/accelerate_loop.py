"""A loop with Accelerate: accumulated gradients, a scheduler, and an object of its own."""

from __future__ import annotations

from typing import Any, Final

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from support.resumes.child import ResumedRun, generators

from ciuic import SnapshotManager
from ciuic.integrations.accelerate import register

MODULES: Final = "torch torch._dynamo accelerate ciuic.integrations.accelerate"
WORLD: Final = 1
BY_DESIGN: Final[dict[str, str]] = {}
_EPOCHS: Final = 6


class Losses:
    """Losses of the batches, as an object that Accelerate saves."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = list(state["values"])


def train(run: ResumedRun) -> None:
    """Train with an optimizer step after every second batch."""
    set_seed(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32),
        torch.nn.BatchNorm1d(32),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(32, 3),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    data = torch.rand(80, 8, generator=torch.Generator().manual_seed(2))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = Losses()
    accelerator.register_for_checkpointing(losses)
    manager = SnapshotManager(run.save_dir, every_steps=4, max_snapshots=4)
    register(manager, accelerator)
    resumed = manager.resume()
    for _ in range((resumed.epoch or 0) if resumed else 0, _EPOCHS):
        for (x,) in loader:
            with accelerator.accumulate(model):
                loss = model(x).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.values.append(float(loss.detach()))
            rate = scheduler.get_last_lr()[0]
            run.report(f"batch {len(losses.values)}", {"loss": loss, "rate": rate})
    manager.close()
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    state = {name: one.state_dict() for name, one in objects.items()} | generators()
    run.finish(state, {"losses": losses.values})
