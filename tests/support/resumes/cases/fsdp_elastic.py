"""FSDP2 on four, two and three ranks in turn: each life has to begin with the state that an earlier one has saved.

Sums over another number of ranks round differently, so there is no undisturbed run to compare the end with.
"""

from __future__ import annotations

import uuid
from typing import Any, Final

import torch
from support.resumes.child import ResumedRun, digest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ciuic import SnapshotManager

MODULES: Final = (
    "torch torch._dynamo torch.distributed.checkpoint.state_dict torch.distributed.fsdp support.resumes.child"
)
WORLD: Final = 4
WORLDS: Final = (4, 2, 3)
"""Numbers of ranks of the lives, in turn."""
BY_DESIGN: Final[dict[str, str]] = {}
_EPOCHS: Final = 6
_STEPS_BETWEEN_SAVES: Final = 4


def train(run: ResumedRun) -> None:
    """Report the whole state at each step at which it is saved, and once more where a life resumes from it."""
    torch.manual_seed(1)
    # Rows that no number of ranks divides, and fewer of them than ranks.
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 65), torch.nn.ReLU(), torch.nn.Linear(65, 7), torch.nn.Linear(7, 2)
    )
    sharded: Any = fully_shard(model, mesh=init_device_mesh("cpu", (run.world,)))
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    data = torch.rand(40, 16, generator=torch.Generator().manual_seed(2))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=4, shuffle=True)
    saved_by = {"life": ""}
    objects = {"model": sharded, "optimizer": optimizer, "scheduler": scheduler}
    manager = SnapshotManager(run.save_dir, every_steps=_STEPS_BETWEEN_SAVES, max_snapshots=4)
    manager.register(**objects, loader=loader, saved_by=saved_by)

    def report(kind: str) -> None:
        found = {name: digest(one) for name, one in _whole(objects).items()}
        if run.rank == 0:
            run.report(f"{kind} {saved_by['life']} {manager.step}", found)

    resumed = manager.resume()
    if resumed:
        report("resumed")
    saved_by["life"] = uuid.uuid4().hex
    for _ in range((resumed.epoch or 0) if resumed else 0, _EPOCHS):
        for (x,) in loader:
            optimizer.zero_grad()
            sharded(x).square().mean().backward()
            optimizer.step()
            scheduler.step()
            if manager.step % _STEPS_BETWEEN_SAVES == 0:
                report("state")
    manager.close()
    torch.distributed.destroy_process_group()
    run.finish({}, {"steps": manager.step})


def _whole(objects: dict[str, Any]) -> dict[str, Any]:
    """Return each tensor and value of the states by its path, gathered from all ranks."""
    found: dict[str, Any] = {}

    def add(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, one in value.items():
                add(f"{path}.{key}", one)
        else:
            found[path] = value.full_tensor() if hasattr(value, "full_tensor") else value

    for name, one in objects.items():
        add(name, one.state_dict())
    return found
