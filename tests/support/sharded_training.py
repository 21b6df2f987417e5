"""A small training whose state is sharded over the ranks (FSDP2), and what can be said of its state."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ciuic import SnapshotManager
from ciuic.training.dcp import CiuicStorageReader, CiuicStorageWriter

STEPS = 20


class Sharded:
    def __init__(self, world: int) -> None:
        self.done = 0
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(128, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 77)
        )
        if dist.is_initialized():
            fully_shard(self.model, mesh=init_device_mesh("cpu", (world,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, number: int) -> None:
        """The same batch on every rank: so the run does not depend on how many there are, but for rounding."""
        torch.manual_seed(number)
        self.model(torch.randn(8, 128)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self, note: Any) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "note": {"value": note, "generator": torch.get_rng_state()},
        }

    def load(self, reader: CiuicStorageReader, checkpoint_id: str | None = None) -> Any:
        """Returns the note."""
        state = self.state(None)
        dcp.load(state, storage_reader=reader, checkpoint_id=checkpoint_id)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        torch.set_rng_state(state["note"]["generator"])
        return state["note"]["value"]

    def digest(self) -> str:
        """Of the whole tensors, gathered from all ranks."""
        whole = hashlib.sha256()
        _add(whole, get_state_dict(self.model, self.optimizer))
        return whole.hexdigest()


def _add(whole: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        whole.update(full.detach().numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value):
            whole.update(repr(key).encode())
            _add(whole, value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add(whole, item)
    else:
        whole.update(repr(value).encode())


def save_in_both_ways(rank: int, world: int, save_dir: str, result: str) -> None:
    """`dcp.save`, and `dcp.async_save` with the state overwritten before it is written."""
    trained = Sharded(world)
    trained.step(1)
    writer = CiuicStorageWriter(save_dir)
    writer.step = 1
    dcp.save(trained.state((1, 2.5, float("inf"), "x")), checkpoint_id="first", storage_writer=writer)
    digests = [trained.digest()]
    trained.step(2)
    digests.append(trained.digest())
    upload = dcp.async_save(trained.state("later"), checkpoint_id="second", storage_writer=writer)
    for parameter in trained.model.parameters():
        parameter.detach().zero_()
    upload.result()
    writer.close()
    if rank == 0:
        Path(result).write_text(json.dumps({"digests": digests, "id": writer.last_id}))


def load_both(rank: int, world: int, save_dir: str, result: str) -> None:
    """Into a fresh state, the newest first; RESULT gets notes and digests."""
    found = []
    for checkpoint_id in (None, "first"):
        fresh = Sharded(world)
        note = fresh.load(CiuicStorageReader(save_dir), checkpoint_id)
        found.append((repr(note), fresh.digest()))
    if rank == 0:
        Path(result).write_text(json.dumps(found))


def train(rank: int, world: int, save_dir: str, result: str, step_seconds: float) -> None:
    """To the end, from the newest checkpoint that is whole; saves after every second step; rank 0 and rank 1 write RESULT-RANK."""
    trained = Sharded(world)
    writer = CiuicStorageWriter(save_dir, max_snapshots=3)
    reader = CiuicStorageReader(save_dir)
    if reader.find() is not None:
        trained.done = trained.load(reader)
    while trained.done < STEPS:
        time.sleep(step_seconds)
        trained.done += 1
        trained.step(trained.done)
        if trained.done % 2 == 0:
            state = trained.state(trained.done)
            dcp.async_save(state, checkpoint_id=f"step-{trained.done}", storage_writer=writer).result()
    digest = trained.digest()
    writer.close()
    Path(f"{result}-{rank}").write_text(json.dumps({"digest": digest}))


def die_in_the_middle(rank: int, world: int, save_dir: str) -> None:
    """Both ranks have saved once; then rank 1 is killed when it has stored its part, or before."""
    trained = Sharded(world)
    writer = CiuicStorageWriter(save_dir)
    dcp.save(trained.state(0), checkpoint_id="whole", storage_writer=writer)
    trained.step(1)
    if rank == 1:
        wait = writer._wait

        def wait_and_die(number: int) -> Any:
            wait(number)
            os.kill(os.getpid(), signal.SIGKILL)

        writer._wait = wait_and_die  # type: ignore[method-assign]
    dcp.save(trained.state(1), checkpoint_id="torn", storage_writer=writer)


class Managed:
    """With `SnapshotManager`: two kinds of parameters, batch statistics of each rank's own, dropout, a loader that is counted."""

    def __init__(self, rank: int, world: int, save_dir: str, **options: Any) -> None:
        torch.manual_seed(5)
        inner = torch.nn.Sequential(
            torch.nn.Linear(16, 1026),
            torch.nn.BatchNorm1d(1026),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(1026, 77),
        )
        self.model = fully_shard(inner, mesh=init_device_mesh("cpu", (world,))) if world else inner
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 100)
        torch.manual_seed(50 + rank)
        data = torch.utils.data.TensorDataset(
            torch.rand(48, 16, generator=torch.Generator().manual_seed(rank))
        )
        self.loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
        self.manager = SnapshotManager(save_dir, **options)
        self.objects = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.manager.register(**self.objects, loader=self.loader)

    def train(self, epochs: int, step_seconds: float = 0.0) -> None:
        resumed = self.manager.resume()
        for _ in range((resumed.epoch or 0) if resumed else 0, epochs):
            for (x,) in self.loader:
                time.sleep(step_seconds)
                self.optimizer.zero_grad()
                self.model(x).square().mean().backward()
                self.optimizer.step()
                self.scheduler.step()

    def digest(self) -> str:
        """Of whole tensors, so by all ranks."""
        whole = hashlib.sha256()
        _add(whole, {key: one for key, one in self.model.state_dict().items() if "running" not in key})
        _add(whole, self.optimizer.state_dict()["state"])
        return whole.hexdigest()

    def own(self) -> str:
        """Of what is this rank's alone."""
        buffers = [one.tolist() for one in self.model.buffers()]
        return hashlib.sha256(repr((buffers, torch.rand(2).tolist())).encode()).hexdigest()


def train_managed(rank: int, world: int, save_dir: str, result: str, step_seconds: float) -> None:
    """As `train`, with a `SnapshotManager`."""
    run = Managed(rank, world, save_dir, every_steps=3, max_snapshots=4)
    run.train(2, step_seconds)
    run.manager.close()
    digest = run.digest()
    Path(f"{result}-{rank}.tmp").write_text(json.dumps({"digest": digest, "own": run.own()}))
    os.replace(f"{result}-{rank}.tmp", f"{result}-{rank}")


def save_managed(rank: int, world: int, save_dir: str, result: str) -> None:
    """Saved when asked, waited for on every rank; then trained on."""
    run = Managed(rank, world, save_dir)
    run.train(1)
    save = run.manager.save_snapshot(epoch=7, tags=["asked"], wait=True, note={"a": 1.5})
    digest = run.digest()
    newest = run.manager.list_snapshots()[0].facts
    run.train(1)
    run.manager.close()
    if rank == 0:
        assert save is not None
        found = {"id": save.id, "digest": digest, "world": newest.world_size, "size": newest.size_bytes}
        Path(result).write_text(json.dumps(found))


def resume_managed(rank: int, world: int, save_dir: str, result: str) -> None:
    """Into a fresh state, by however many ranks."""
    run = Managed(rank, world, save_dir)
    resumed = run.manager.resume()
    digest = run.digest()
    if world:
        run.train(2)  # and it can be trained on
    run.manager.close()
    if rank == 0:
        assert resumed is not None
        Path(result).write_text(json.dumps({"id": resumed.id, "step": resumed.step, "digest": digest}))
