"""Small training whose ranks are stages of a pipeline (torch.distributed.pipelining), under a `SnapshotManager`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from ciuic import SnapshotManager


def train(rank: int, world: int, save_dir: str, result: str, alike: bool) -> None:
    """Train with saves that are due and one that is asked for; RESULT-RANK gets the losses and what was saved.

    Args:
        rank: number of the stage.
        world: number of stages.
        save_dir: directory of the snapshots.
        result: path of the results, without the rank.
        alike: whether all stages have parameters of the same names and shapes.
    """
    torch.manual_seed(rank)
    linear = torch.nn.Linear(8, 8)
    module = torch.nn.Sequential(linear) if alike else torch.nn.ModuleDict({str(rank): linear})
    stage = PipelineStage(linear, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=torch.nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    manager = SnapshotManager(save_dir, every_steps=2)
    manager.register(model=module, optimizer=optimizer)
    resumed = manager.resume()
    done = 0
    for _ in range(6):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(torch.rand(4, 8))
        else:
            schedule.step(target=torch.ones(4, 8))
        optimizer.step()
        done += 1
    manager.save_snapshot(wait=True)
    error = manager.stats.last_error
    manager.close()
    found = {
        "steps": done,
        "resumed": resumed is not None,
        "saved": len(manager.list_snapshots()),
        "error": error,
    }
    Path(f"{result}-{rank}").write_text(json.dumps(found))
