"""FSDP2 on two ranks: sharded weights and moments, and batch statistics, data and dropout of each rank."""

from __future__ import annotations

from typing import Any, Final

import torch
from support.resumes.child import ResumedRun, generators
from support.sharded_training import Managed

MODULES: Final = "torch torch._dynamo torch.distributed.checkpoint.state_dict torch.distributed.fsdp support.sharded_training"
WORLD: Final = 2
BY_DESIGN: Final[dict[str, str]] = {}
_EPOCHS: Final = 5


def train(run: ResumedRun) -> None:
    """Train with a list of losses that each rank keeps for itself."""
    training = Managed(run.rank, run.world, run.save_dir, every_steps=4, max_snapshots=4)
    losses: list[float] = []
    training.manager.register(losses=losses)

    def on_step(loss: Any) -> None:
        losses.append(float(loss))
        rate = training.scheduler.get_last_lr()[0]
        run.report(f"batch {len(losses)}", {"loss": loss, "rate": rate})

    training.train(_EPOCHS, on_step=on_step)
    training.manager.close()
    names = ("model", "optimizer", "scheduler")
    state = {name: getattr(training, name).state_dict() for name in names} | generators()
    torch.distributed.destroy_process_group()
    run.finish(state, {"losses": losses})
