"""DistributedDataParallel on ranks that differ in data, dropout and batch statistics."""

from __future__ import annotations

from typing import Final

import torch
from support.ddp_training import Run
from support.resumes.child import ResumedRun, generators

MODULES: Final = "torch torch._dynamo torch.distributed torch.nn.parallel support.ddp_training"
WORLD: Final = 2
BY_DESIGN: Final[dict[str, str]] = {}
_STEPS: Final = 56


def train(run: ResumedRun) -> None:
    """Train with a sum of the losses that is reduced over the ranks after each epoch."""
    training = Run(run.rank, run.world, run.save_dir, every_steps=4, max_snapshots=4)
    resumed = training.manager.resume()
    for epoch in range((resumed.epoch or 0) if resumed else 0, _STEPS // len(training.loader)):
        training.sampler.set_epoch(epoch)
        training.one_epoch(on_step=lambda step, loss: run.report(f"batch {step}", {"loss": loss}))
        total = torch.tensor(training.seen, dtype=torch.float64).sum()
        torch.distributed.all_reduce(total)
        run.report(f"epoch {epoch}", {"total": total, "rate": training.scheduler.get_last_lr()[0]})
    training.manager.close()
    state = {name: getattr(training, name).state_dict() for name in ("optimizer", "scheduler")}
    state |= {f"model, {name}": value for name, value in training.model.state_dict().items()}
    state |= generators()
    torch.distributed.destroy_process_group()
    run.finish(state, {"seen": training.seen})
