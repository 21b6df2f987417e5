"""Small training whose state is sharded over the ranks (FSDP2), and digests of its state."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.rank_processes import Ranks as Ranks
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ciuic import SnapshotManager
from ciuic.training.dcp.storage import CiuicStorageReader, CiuicStorageWriter

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
        """Train on the same batch on every rank, so that only rounding depends on their number."""
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
        """Load the checkpoint; return its note."""
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
        """Return a digest of the whole tensors, gathered from all ranks."""
        hasher = hashlib.sha256()
        _add(hasher, get_state_dict(self.model, self.optimizer))
        return hasher.hexdigest()


def _add(hasher: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        hasher.update(full.detach().numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value):
            hasher.update(repr(key).encode())
            _add(hasher, value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add(hasher, item)
    else:
        hasher.update(repr(value).encode())


def save_in_both_ways(rank: int, world: int, save_dir: str, result: str) -> None:
    """Save by `dcp.save`, and by `dcp.async_save` with the state overwritten before it is written."""
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
    """Load both into a fresh state, the newest first; RESULT gets notes and digests."""
    found = []
    for checkpoint_id in (None, "first"):
        fresh = Sharded(world)
        note = fresh.load(CiuicStorageReader(save_dir), checkpoint_id)
        found.append((repr(note), fresh.digest()))
    if rank == 0:
        Path(result).write_text(json.dumps(found))


def train(rank: int, world: int, save_dir: str, result: str, step_seconds: float) -> None:
    """Train to the end from the newest whole checkpoint, saving after every second step.

    Ranks 0 and 1 write RESULT-RANK.
    """
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
    """Save once on both ranks; then kill rank 1 when it has stored its part, or before."""
    trained = Sharded(world)
    writer = CiuicStorageWriter(save_dir)
    dcp.save(trained.state(0), checkpoint_id="whole", storage_writer=writer)
    trained.step(1)
    if rank == 1:
        wait = writer._parts.wait_stored

        def wait_and_die(number: int) -> Any:
            wait(number)
            os.kill(os.getpid(), signal.SIGKILL)

        writer._parts.wait_stored = wait_and_die  # type: ignore[method-assign]
    dcp.save(trained.state(1), checkpoint_id="torn", storage_writer=writer)


class Managed:
    """Training under `SnapshotManager`, with batch statistics per rank, dropout and a counting loader."""

    def __init__(
        self,
        rank: int,
        world: int,
        save_dir: str,
        *,
        compiled: bool = False,
        width: int = 1026,
        **options: Any,
    ) -> None:
        torch.manual_seed(5)
        inner = torch.nn.Sequential(
            torch.nn.Linear(16, width),
            torch.nn.BatchNorm1d(width),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(width, 77),
        )
        self.model: Any = fully_shard(inner, mesh=init_device_mesh("cpu", (world,))) if world else inner
        if compiled:
            self.model = torch.compile(self.model)  # type: ignore[arg-type, unused-ignore]
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

    def train(
        self, epochs: int, step_seconds: float = 0.0, on_step: Callable[[Any], None] = lambda loss: None
    ) -> None:
        resumed = self.manager.resume()
        for _ in range((resumed.epoch or 0) if resumed else 0, epochs):
            for (x,) in self.loader:
                time.sleep(step_seconds)
                self.optimizer.zero_grad()
                loss = self.model(x).square().mean()
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()
                on_step(loss.detach())

    def digest(self) -> str:
        """Return a digest of whole tensors, which all ranks compute together."""
        hasher = hashlib.sha256()
        plain = getattr(self.model, "_orig_mod", self.model)
        _add(hasher, {key: one for key, one in plain.state_dict().items() if "running" not in key})
        _add(hasher, self.optimizer.state_dict()["state"])
        return hasher.hexdigest()

    def rank_digest(self) -> str:
        """Return a digest of this rank's own state."""
        buffers = [one.tolist() for one in self.model.buffers()]
        return hashlib.sha256(repr((buffers, torch.rand(2).tolist())).encode()).hexdigest()


def train_managed(rank: int, world: int, save_dir: str, result: str, step_seconds: float) -> None:
    """Train as `train` does, with a `SnapshotManager`."""
    run = Managed(rank, world, save_dir, every_steps=3, max_snapshots=4)
    run.train(2, step_seconds)
    run.manager.close()
    digest = run.digest()
    Path(f"{result}-{rank}.tmp").write_text(json.dumps({"digest": digest, "own": run.rank_digest()}))
    os.replace(f"{result}-{rank}.tmp", f"{result}-{rank}")


def save_managed(rank: int, world: int, save_dir: str, result: str) -> None:
    """Save on request, wait on every rank, and train on."""
    run = Managed(rank, world, save_dir)
    run.train(1)
    save = run.manager.save_snapshot(epoch=7, tags=["asked"], wait=True, note={"a": 1.5})
    digest = run.digest()
    newest = run.manager.list_snapshots()[0].facts
    # What all ranks store there, not this one.
    assert run.manager.forecast is not None
    assert 0.9 < run.manager.forecast.size_bytes / newest.size_bytes < 1.1
    run.train(1)
    run.manager.close()
    if rank == 0:
        assert save is not None
        found = {"id": save.id, "digest": digest, "world": newest.world_size, "size": newest.size_bytes}
        Path(result).write_text(json.dumps(found))


def through_a_compiled_model(rank: int, world: int, save_dir: str, result: str) -> None:
    """Save a plain model, resume and save it compiled, and resume it plain; RESULT gets the digests."""
    digests = []
    for compiled in (False, True, False):
        run = Managed(rank, world, save_dir, compiled=compiled)
        if digests:
            run.manager.resume()
        else:
            run.train(1)
        digests.append(run.digest())
        local = [one.to_local().shape for one in run.model.parameters() if hasattr(one, "to_local")]
        assert any(shape[0] in (513, 8) for shape in local), local
        run.manager.save_snapshot(wait=True)
        run.manager.close()
    if rank == 0:
        Path(result).write_text(json.dumps(digests))


def resume_managed(rank: int, world: int, save_dir: str, result: str) -> None:
    """Resume into a fresh state, on any number of ranks."""
    run = Managed(rank, world, save_dir)
    resumed = run.manager.resume()
    digest = run.digest()
    if world:
        # Checks that the loaded state can be trained on.
        run.train(2)
    run.manager.close()
    if rank == 0:
        assert resumed is not None
        Path(result).write_text(json.dumps({"id": resumed.id, "step": resumed.step, "digest": digest}))


def note_saves(rank: int, world: int, save_dir: str, result: str) -> None:
    """Save twice by a rule and once when asked; RESULT-RANK gets the ids that callbacks were told of."""
    run = Managed(rank, world, save_dir, every_steps=4)
    told: list[str | None] = []
    run.manager.on_saved(lambda saved: told.append(saved.id))
    for number, (x,) in enumerate(run.loader, 1):
        run.model(x).square().mean().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.scheduler.step()
        run.manager.wait()
        if number == 9:
            break
    run.manager.save_snapshot(wait=True)
    run.manager.close()
    Path(f"{result}-{rank}").write_text(json.dumps(told))
