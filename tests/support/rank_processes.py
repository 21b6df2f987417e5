"""Ranks of a training as real processes with a gloo group, killed at will.

Each is forked from a process that has imported torch already and holds nothing of the test's own process.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from support.host_networks import INTERFACE, HostNetworks, enter

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOAD = ["torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "ciuic.training.dcp.storage"]
Main = Callable[..., None]


class Ranks:
    """Processes that run ``main(rank, world, *args)``, on hosts of these networks if any; their output goes to files in ``where``."""

    def __init__(
        self,
        where: Path,
        world: int,
        main: Main,
        *args: Any,
        timeout_seconds: float = 240,
        networks: HostNetworks | None = None,
    ) -> None:
        _CONTEXT.set_forkserver_preload(_PRELOAD)
        where.mkdir(parents=True, exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        meeting = "127.0.0.1" if networks is None else networks.addresses[0]
        paths = [""] * world if networks is None else networks.paths
        self._logs = [where / f"rank-{rank}.log" for rank in range(world)]
        self.processes = [
            _CONTEXT.Process(
                target=_run,
                args=(
                    rank,
                    world,
                    (meeting, port),
                    paths[rank],
                    timeout_seconds,
                    self._logs[rank],
                    main,
                    args,
                ),
                daemon=True,
            )
            for rank in range(world)
        ]
        for process in self.processes:
            process.start()

    def kill(self, *ranks: int) -> None:
        """Send SIGKILL."""
        for rank in ranks:
            self.processes[rank].kill()

    def wait(self, timeout_seconds: float = 280) -> list[int]:
        """Return the exit statuses; kill ranks that are not done in time."""
        end = time.monotonic() + timeout_seconds
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        for process in self.processes:
            process.kill()
            process.join()
        return [process.exitcode or 0 for process in self.processes]

    def check(self, timeout_seconds: float = 280) -> list[str]:
        """Assert that all ended well; return what each printed."""
        statuses = self.wait(timeout_seconds)
        logs = [log.read_text() if log.exists() else "" for log in self._logs]
        assert not any(statuses), f"{statuses}\n" + "\n".join(logs)
        return logs

    def log_of(self, rank: int) -> str:
        return self._logs[rank].read_text() if self._logs[rank].exists() else ""


def _run(
    rank: int,
    world: int,
    meeting: tuple[str, int],
    network: str,
    timeout_seconds: float,
    log: Path,
    main: Main,
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = open(1, "w", closefd=False, buffering=1)
    sys.stderr = open(2, "w", closefd=False, buffering=1)
    if network:
        # Before any thread is made, which would stay in the other network.
        enter(network)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    os.environ.update(
        MASTER_ADDR=meeting[0],
        MASTER_PORT=str(meeting[1]),
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=timeout_seconds))
    status = 0
    try:
        main(rank, world, *args)
        dist.destroy_process_group()
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    # A program has no atexit handlers of a process it was forked from.
    os._exit(status)
