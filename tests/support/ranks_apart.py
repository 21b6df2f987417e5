"""Trainings whose ranks save in directories of their own, as on hosts without a file system in common."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support import ddp_training
from support.sharded_training import Managed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ciuic import SnapshotManager
from ciuic.remote.objects.model import RemoteRefused
from ciuic.remote.sealing.key_slots import make_key_file
from ciuic.training import coordinator, ranks
from ciuic.training.remote.place import uploads_of
from ciuic.training.remote.remote_options import remotes_from
from ciuic.training.results import SaveResult

WAIT_SECONDS = 120


def option(remote: tuple[str, str] | None) -> Any:
    """Return the option ``remote`` for a URL and a key file."""
    return None if remote is None else {"url": remote[0], "key_file": remote[1]}


def prepare_remote(place: Path, url: str = "") -> Any:
    """Make a key, and a place for a remote unless a URL is given, below a directory, where `train_apart` finds them; return its configuration."""
    if not url:
        (place / "nas").mkdir()
        url = f"file://{place / 'nas'}"
    make_key_file(str(place / "key"))
    (place / "remote").write_text(url)
    return remotes_from(option((url, str(place / "key"))))[0]


def _use(host: str) -> None:
    """Use the caches of a host, as processes of it would."""
    os.environ["XDG_CACHE_HOME"] = f"{host}.cache"
    os.environ["XDG_STATE_HOME"] = f"{host}.state"


def _write(result: str, rank: int, found: dict[str, Any]) -> None:
    _put(Path(f"{result}-{rank}"), found)


def _put(path: Path, found: Any) -> None:
    """Replace a file, which others read at any time and after any kill."""
    beside = path.with_name(f"{path.name}.tmp")
    beside.write_text(json.dumps(found))
    os.replace(beside, path)


def save_sharded(
    rank: int, world: int, hosts: Sequence[str], remote: tuple[str, str] | None, result: str
) -> None:
    """Train sharded, save once more on request, and wait for the remote; RESULT-RANK gets id and digest."""
    _use(hosts[rank])
    run = Managed(rank, world, hosts[rank], every_steps=5, remote=option(remote))
    told: list[str | None] = []
    run.manager.on_saved(lambda saved: told.append(saved.id))
    run.train(1)
    if rank == 0:
        run.manager.report(loss=0.5)
    forecast = run.manager.forecast
    assert forecast is not None
    save = run.manager.save_snapshot(epoch=7, wait=True, note={"a": 1.5})
    digest, own = run.digest(), run.rank_digest()
    if remote is not None:
        assert run.manager.wait_remote(WAIT_SECONDS)
    run.manager.close()
    _write(
        result,
        rank,
        {
            "id": save and save.id,
            "digest": digest,
            "own": own,
            "told": len(told),
            "step": 12,
            "size": forecast.size_bytes,
        },
    )


def resume_sharded(
    rank: int, world: int, hosts: Sequence[str], remote: tuple[str, str] | None, result: str
) -> None:
    """Resume, and train on; RESULT-RANK gets what was found."""
    host = hosts[rank if world else 0]
    _use(host)
    run = Managed(rank, world, host, remote=option(remote))
    resumed = run.manager.resume()
    assert resumed is not None
    found = {
        "step": resumed.step,
        "digest": run.digest(),
        "own": run.rank_digest(),
        "passed_over": [reason for _, reason in resumed.passed_over],
    }
    if world:
        run.train(9)
    run.manager.close()
    _write(result, rank, found)


def train_apart(
    rank: int,
    world: int,
    save_dir: str,
    result: str,
    step_seconds: float,
    epochs: int = 2,
    sharded: bool = True,
    configs: Sequence[str] = (),
    **options: Any,
) -> None:
    """Train to the end, each rank in a directory of its own below SAVE_DIR, with a remote if there is one beside it.

    Each rank says beside SAVE_DIR at which step it resumed (resumed-RANK), which it has made (step-RANK), and which saves it was told of (told-RANK).
    With ``configs``, of a daemon for each rank, it writes a file for each step to FILES-RANK beside SAVE_DIR, which leads to a protected directory.
    """
    top = Path(save_dir)
    files = top.with_name(f"files-{rank}")
    if configs:
        os.environ["CIUIC_CONFIG"] = configs[rank]
        options["filesystem"] = True
    url, key = top.parent / "remote", top.parent / "key"
    remote = (url.read_text(), str(key)) if url.exists() else None
    host = f"{save_dir}/{rank}"
    _use(host)
    settings = {"every_steps": 3, "max_snapshots": 4, "remote": option(remote), **options}
    run = (
        Managed(rank, world, host, **settings) if sharded else ddp_training.Run(rank, world, host, **settings)
    )
    resumed = run.manager.resume()
    told: list[int] = []

    @run.manager.on_saved
    def tell(saved: SaveResult) -> None:
        if saved.error is None and saved.step is not None:
            told.append(saved.step)
            _put(top.with_name(f"told-{rank}"), told)

    def step_made(*_: object) -> None:
        _put(top.with_name(f"step-{rank}"), run.manager.step)
        if configs:
            # That of the step that has begun is there at its boundary.
            _write_file(files, rank, run.manager.step + 1)

    for step in range(1, (resumed.step if resumed else 0) + 2) if configs else ():
        _write_file(files, rank, step)
    _put(top.with_name(f"resumed-{rank}"), resumed.step if resumed else 0)
    run.train(epochs, step_seconds, step_made)
    run.manager.close()
    own = run.rank_digest() if isinstance(run, Managed) else ""
    _write(result, rank, {"digest": run.digest(), "own": own})


def file_of_step(rank: int, step: int) -> bytes:
    """Return the content of the file that `train_apart` writes for a step."""
    return hashlib.sha256(f"{rank} {step}".encode()).hexdigest().encode() * 20


def _write_file(directory: Path, rank: int, step: int) -> None:
    fd = os.open(directory / f"step-{step}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(fd, file_of_step(rank, step), 0)
    finally:
        os.close(fd)


def save_alike(rank: int, world: int, hosts: Sequence[str], result: str) -> None:
    """Train with DDP, whose state is the same on all ranks but for what is each rank's own."""
    run = ddp_training.Run(rank, world, hosts[rank], every_steps=4)
    run.train(2)
    run.manager.save_snapshot(run.model, run.optimizer, 2, wait=True)
    run.manager.close()
    _write(result, rank, {"digest": run.digest()})


def resume_alike(rank: int, world: int, hosts: Sequence[str], result: str) -> None:
    """Resume what `save_alike` saved."""
    run = ddp_training.Run(rank, world, hosts[rank])
    assert run.manager.resume() is not None
    run.manager.close()
    _write(result, rank, {"digest": run.digest()})


class _OwnState:
    """Object with megabytes that differ between ranks."""

    def __init__(self, mebibytes: int, value: int) -> None:
        self.content = torch.full((mebibytes << 18,), value, dtype=torch.int32)

    def state_dict(self) -> dict[str, Any]:
        return {"content": self.content}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.content = state["content"]


def save_own_states(rank: int, world: int, hosts: Sequence[str], sharded: bool, result: str) -> None:
    """Save more of each rank's own than the job's store takes in a message, and more than is sent unasked; use the store; resume."""
    model: Any = torch.nn.Linear(8, 8)
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    own = {"small": _OwnState(9, 10 + rank), "large": _OwnState(66, 20 + rank), "alike": _OwnState(66, 30)}
    model.register_buffer("mask", torch.full((9 << 18,), 40 + rank, dtype=torch.int32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    with SnapshotManager(hosts[rank], every_steps=1) as manager:
        manager.register(model=model, optimizer=optimizer, **own)
        for by_rule in (False, True):
            if by_rule:
                model(torch.ones(1, 8)).sum().backward()
                optimizer.step()
            else:
                manager.save_snapshot(epoch=1)
            manager.wait()
            # The job's own next group meets in the store, and no rank resumes before all have saved.
            dist.all_reduce(torch.ones(1), group=dist.new_group())
            for one in own.values():
                one.content = torch.zeros(1)
            model.mask.zero_()
            resumed = manager.resume()
            assert resumed is not None
            contents = [one.content for one in own.values()]
            found.append([resumed.step, *(one.unique().tolist() for one in (*contents, model.mask))])
        failed = manager.stats.failed
    _write(result, rank, {"found": found, "failed": failed})


def come_late(rank: int, world: int, hosts: Sequence[str], result: str) -> None:
    """Make a manager whose remote takes rank 1 longer than ranks wait for each other, and one for which rank 1 is refused."""
    ranks._MEET_SECONDS = 1.0  # type: ignore[misc]
    met = Path(f"{result}-met")
    meet = ranks.Ranks.meet

    def meet_and_tell(name: str, *more: Any) -> Any:
        found = meet(name, *more)
        if rank == 0:
            met.touch()
        return found

    def slow(*args: Any) -> Any:
        while rank and not met.exists():
            time.sleep(0.01)
        return uploads_of(*args)

    def refused(*args: Any) -> Any:
        if rank:
            raise RemoteRefused("the remote refuses rank 1")
        return uploads_of(*args)

    replaced: Any = coordinator
    ranks.Ranks.meet = meet_and_tell  # type: ignore[method-assign]
    together: list[str] = []
    for name, called in (("late", slow), ("refused", refused)):
        replaced.uploads_of = called
        try:
            made = SnapshotManager(hosts[rank], name=name)
            together.append(str(made._coordinator.taker.ranks is not None))
            made.close()
        except RemoteRefused:
            together.append("refused")
    _write(result, rank, {"together": together})
