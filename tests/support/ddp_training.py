"""Small DDP training in which the ranks differ: dropout, data order, batch statistics, and data seen."""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from ciuic import SnapshotManager
from ciuic.training import ManagerOptions, ranks
from ciuic.training.rules import Interval, Moment, Rule

EPOCHS = 3


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        # The noise is drawn while loading.
        return torch.full((8,), float(at)) + torch.rand(8), torch.tensor(at % 3)


class Run:
    def __init__(self, rank: int, world: int, save_dir: str, **options: Any) -> None:
        torch.manual_seed(10 + rank)
        random.seed(20 + rank)
        inner = torch.nn.Sequential(
            torch.nn.Linear(8, 64),
            torch.nn.BatchNorm1d(64),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(64, 3),
        )
        # Otherwise DDP arranges its buckets anew after the first step of each process, and more than two ranks add in
        # another order then: a run that was started again would not have the same bits, whatever it loads.
        self.model = DistributedDataParallel(inner, broadcast_buffers=False, find_unused_parameters=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 100)
        self.sampler = DistributedSampler(Numbers(), world, rank, shuffle=True)
        self.loader = DataLoader(Numbers(), batch_size=4, sampler=self.sampler)
        self.seen: list[float] = []
        self.manager = SnapshotManager(save_dir, **options)
        self.manager.register(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            loader=self.loader,
            seen=self.seen,
        )

    def train(
        self,
        epochs: int = EPOCHS,
        step_seconds: float = 0.0,
        on_step: Callable[[int, Any], None] = lambda step, loss: None,
    ) -> None:
        resumed = self.manager.resume()
        for epoch in range(resumed.epoch or 0 if resumed else 0, epochs):
            self.sampler.set_epoch(epoch)
            self.one_epoch(step_seconds, on_step)

    def one_epoch(
        self, step_seconds: float = 0.0, on_step: Callable[[int, Any], None] = lambda step, loss: None
    ) -> None:
        for x, y in self.loader:
            time.sleep(step_seconds)
            self.optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.seen.append(float(x.sum()) + random.random() + float(loss.detach()))
            on_step(len(self.seen), loss.detach())

    def digest(self) -> str:
        hasher = hashlib.sha256(
            repr((self.seen, self.scheduler.state_dict(), torch.rand(2).tolist(), random.random())).encode()
        )
        for value in self.model.state_dict().values():
            hasher.update(value.numpy().tobytes())
        for state in self.optimizer.state_dict()["state"].values():
            hasher.update(state["exp_avg"].numpy().tobytes())
        return hasher.hexdigest()


def train(rank: int, world: int, save_dir: str, result: str, step_seconds: float) -> None:
    """Train to the end from the last snapshot; each rank writes RESULT-RANK."""
    run = Run(rank, world, save_dir, every_steps=3, max_snapshots=4)
    run.train(EPOCHS, step_seconds)
    run.manager.close()
    Path(f"{result}-{rank}.tmp").write_text(json.dumps({"digest": run.digest(), "steps": len(run.seen)}))
    os.replace(f"{result}-{rank}.tmp", f"{result}-{rank}")


class OnOneRank(Rule):
    """Rule that is due at step 5, on rank 1 alone."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def due(self, moment: Moment) -> bool:
        return self._rank == 1 and moment.step == 5


def agree(rank: int, world: int, save_dir: str, result: str) -> None:
    """Save on all ranks at the step that one finds due; an explicit save waits only where it must."""
    run = Run(rank, world, save_dir, save_when=[OnOneRank(rank)])
    run.train()
    save = run.manager.save_snapshot(epoch=9, wait=True)
    newest, *earlier = [saved.facts for saved in run.manager.list_snapshots()]
    steps = [facts.step for facts in earlier]
    run.manager.close()
    found = {"steps": steps, "saves": save is not None, "epoch": newest.epoch, "world": newest.world_size}
    Path(f"{result}-{rank}").write_text(json.dumps(found))


class Twice(Rule):
    """Rule that is due at steps 4 and 8."""

    def due(self, moment: Moment) -> bool:
        return moment.step in (4, 8)


def dies_in_a_save(rank: int, world: int, save_dir: str, result: str) -> None:
    """Kill rank 1 between the agreement on a snapshot and its part; rank 0 prints the snapshots."""
    run = Run(rank, world, save_dir, save_when=[Twice()])
    gather = ranks.Ranks.gather

    def gather_or_die(self: ranks.Ranks, mine: Any) -> Any:
        if self.rank and run.manager.step > 5:
            os._exit(9)
        return gather(self, mine)

    ranks.Ranks.gather = gather_or_die  # type: ignore[method-assign]
    with suppress(RuntimeError):
        run.train()
    run.manager.close()
    found = [(one.facts.step, one.facts.world_size) for one in run.manager.list_snapshots()]
    Path(result).write_text(json.dumps({"snapshots": found, "failed": run.manager.stats.failed}))
    # Ending the process group would need the other rank.
    os._exit(0)


def manager_on_rank_0(rank: int, world: int, save_dir: str, result: str) -> None:
    """Make a manager on rank 0 only, as many programs do."""
    if rank == 0:
        run = SnapshotManager(save_dir, options=ManagerOptions(distributed=False))
        save = run.save_snapshot(model=torch.nn.Linear(2, 2), epoch=1, wait=True)
        run.close()
        Path(result).write_text(str(save is not None and save.id))


def rank_0_asks(rank: int, world: int, save_dir: str, result: str) -> None:
    """Call save_snapshot on rank 0 only, with all ranks registered and automatic snapshots."""
    ranks._COME_SECONDS = 0.5  # type: ignore[misc]
    run = Run(rank, world, save_dir, every_steps=7)
    for epoch in range(EPOCHS):
        run.sampler.set_epoch(epoch)
        run.one_epoch()
        if rank == 0:
            run.manager.save_snapshot(epoch=epoch, tags=["asked"])
            run.manager.wait()
    run.manager.close()
    if rank == 0:
        saved = [(list(one.tags), one.facts.world_size) for one in run.manager.list_snapshots()]
        Path(result).write_text(json.dumps(saved))


def rank_0_registers(rank: int, world: int, save_dir: str, result: str) -> None:
    """Make a manager with rules on all ranks, and register or save on rank 0 only."""
    ranks._COME_SECONDS = ranks._BOUNDARY_SECONDS = 0.5  # type: ignore[misc]
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = SnapshotManager(save_dir, every_steps=2, save_when=[Interval(3600)])
    for epoch in range(4):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.rand(4, 8)).sum().backward()
            optimizer.step()
        if rank == 0:
            manager.save_snapshot(model, optimizer, epoch)
    manager.close()
    if rank == 0:
        Path(result).write_text(json.dumps([one.facts.epoch for one in manager.list_snapshots()]))
