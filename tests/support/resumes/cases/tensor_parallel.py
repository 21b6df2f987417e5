"""Tensor parallelism on two ranks, with data and dropout that are the same on both."""

from __future__ import annotations

from typing import Final

import torch
from support.resumes.child import ResumedRun, generators
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ciuic import SnapshotManager

MODULES: Final = (
    "torch torch._dynamo torch.distributed.checkpoint.state_dict torch.distributed.tensor.parallel"
)
WORLD: Final = 2
BY_DESIGN: Final[dict[str, str]] = {}
_EPOCHS: Final = 6


def train(run: ResumedRun) -> None:
    """Train with a list of losses, and a normalization that is no DTensor."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(16, 3),
    )
    mesh = init_device_mesh("cpu", (run.world,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    data = torch.rand(40, 8, generator=torch.Generator().manual_seed(2))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=4, shuffle=True)
    losses: list[float] = []
    manager = SnapshotManager(run.save_dir, every_steps=4, max_snapshots=4)
    manager.register(model=model, optimizer=optimizer, scheduler=scheduler, losses=losses, loader=loader)
    resumed = manager.resume()
    for _ in range((resumed.epoch or 0) if resumed else 0, _EPOCHS):
        for (x,) in loader:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(float(loss.detach()))
            run.report(f"batch {len(losses)}", {"loss": loss, "rate": scheduler.get_last_lr()[0]})
    manager.close()
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    state = {name: one.state_dict() for name, one in objects.items()} | generators()
    torch.distributed.destroy_process_group()
    run.finish(state, {"losses": losses})
