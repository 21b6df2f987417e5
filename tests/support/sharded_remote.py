"""Sharded trainings with a remote: ranks save on one host and load on another, which has the URL and the key."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from support.sharded_training import Managed, Sharded
from torch.distributed import checkpoint as dcp

from ciuic.remote.reading.remote_packs import RangePrefetch
from ciuic.training.dcp import CiuicStorageReader, CiuicStorageWriter, FileSystemReader, FileSystemWriter

WAIT_SECONDS = 120
STEP = 3
WIDTH = 12288
"""Width of a model whose shards are much larger than a block, which is what is read at least of each."""


def remote_of(url: str, key_file: str) -> dict[str, str]:
    """Return the option ``remote``."""
    return {"url": url, "key_file": key_file}


def _use(host: str) -> None:
    """Use the directories of a host, as processes of it would."""
    os.environ["XDG_CACHE_HOME"] = f"{host}/cache"
    os.environ["XDG_STATE_HOME"] = f"{host}/state"


class WantedBytes:
    """Counts what this process asks for of the data packs of remotes; small ranges are read with what follows them."""

    def __init__(self) -> None:
        self.count = 0
        whole = RangePrefetch.read

        def read(ranges: RangePrefetch, name: str, start: int, length: int) -> Any:
            self.count += length
            return whole(ranges, name, start, length)

        RangePrefetch.read = read  # type: ignore[method-assign, assignment]


def save_managed(rank: int, world: int, host: str, url: str, key_file: str, result: str) -> None:
    """Train, save, and wait until the remote has it."""
    _use(host)
    run = Managed(rank, world, f"{host}/snapshots", width=WIDTH, remote=remote_of(url, key_file))
    run.train(1)
    save = run.manager.save_snapshot(epoch=7, wait=True)
    digest = run.digest()
    Path(f"{result}-{rank}").write_text(run.rank_digest())
    if rank == 0:
        assert save is not None
        assert run.manager.wait_remote(WAIT_SECONDS)
        facts = run.manager.list_snapshots()[0].facts
        Path(result).write_text(json.dumps({"id": save.id, "digest": digest, "size": facts.size_bytes}))
    run.manager.close()


def resume_managed(rank: int, world: int, host: str, url: str, key_file: str, result: str) -> None:
    """Resume on a host that has nothing, and write what each rank read."""
    _use(host)
    wanted = WantedBytes()
    # As a user gives it: the URL alone.
    os.environ["CIUIC_REMOTE_KEY_FILE"] = key_file
    run = Managed(rank, world, url, width=WIDTH)
    resumed = run.manager.resume()
    assert resumed is not None
    found = {"id": resumed.id, "step": resumed.step, "digest": run.digest(), "wanted": wanted.count}
    found["own"] = run.rank_digest()
    run.train(2)
    run.manager.close()
    Path(f"{result}-{rank}").write_text(json.dumps(found))


def save_checkpoints(rank: int, world: int, host: str, url: str, key_file: str, result: str) -> None:
    """Save with both writers of torch.distributed.checkpoint, and wait until the remote has the snapshots."""
    _use(host)
    run = Sharded(world)
    run.step(0)
    option = remote_of(url, key_file)
    writer = CiuicStorageWriter(f"{host}/named", remote=option)
    dcp.save(run.state(STEP), checkpoint_id="step-3", storage_writer=writer)  # type: ignore[attr-defined, unused-ignore]
    paths = FileSystemWriter(f"{host}/checkpoints/a", repository=f"{host}/all", remote=option)
    dcp.save(run.state(STEP), storage_writer=paths)  # type: ignore[attr-defined, unused-ignore]
    if rank == 0:
        assert writer.wait_remote(WAIT_SECONDS)
        assert paths.wait_remote(WAIT_SECONDS)
        assert writer.remote_status()[0].behind == 0
    digest = run.digest()
    if rank == 0:
        Path(result).write_text(json.dumps({"id": writer.last_id, "path": paths.last_id, "digest": digest}))
    torch.distributed.barrier()
    writer.close()
    paths.close()


def load_checkpoints(
    rank: int, world: int, host: str, lost: str, url: str, key_file: str, result: str
) -> None:
    """Load with both readers on a host that has nothing."""
    _use(host)
    option = remote_of(url, key_file)
    found = []
    newest = CiuicStorageReader(f"{host}/named", remote=option)
    assert newest.find() is not None
    for reader, checkpoint_id in (
        (newest, None),
        (CiuicStorageReader(f"{host}/named", remote=option), "step-3"),
        (FileSystemReader(f"{lost}/checkpoints/a", remote=option), None),
    ):
        run = Sharded(world)
        run.load(reader, checkpoint_id)
        found.append([reader.id, run.digest()])
    assert not Path(f"{host}/named").exists()
    if rank == 0:
        Path(result).write_text(json.dumps(found))
