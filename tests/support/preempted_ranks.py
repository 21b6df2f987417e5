"""Training of several ranks of which one is signalled to end, or hangs.

    torchrun … preempted_ranks.py SAVE_DIR RESULT KIND TOLD

KIND is `ddp`, `fsdp` or `hang`; rank TOLD sends itself SIGTERM in the middle of its fifth step (-1: none), or hangs there the first time. Each rank
that ends by itself writes its result to RESULT-RANK.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support import ddp_training, sharded_training
from support.hanging_training import never_ends

from ciuic.training import BeforePreemption

STEP = 5


def train(rank: int, world: int, save_dir: str, result: str, kind: str, signalled_rank: int) -> None:
    """Train to the end, or until a signal to end."""
    made: Any = sharded_training.Managed if kind == "fsdp" else ddp_training.Run
    run = (
        made(rank, world, save_dir, every_steps=3)
        if kind == "hang"
        else made(rank, world, save_dir, save_when=[BeforePreemption(grace_seconds=60)])
    )

    def about_to_step(*_: object) -> None:
        if run.manager.step + 1 == STEP and rank == signalled_rank:
            if kind != "hang":
                os.kill(os.getpid(), signal.SIGTERM)
            elif not os.path.exists(f"{result}.hung"):
                Path(f"{result}.hung").touch()
                never_ends()

    run.optimizer.register_step_pre_hook(about_to_step)
    run.train(2)
    run.manager.close()
    found = {"digest": run.digest(), "steps": run.manager.step}
    Path(f"{result}-{rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(dist.get_rank(), dist.get_world_size(), *sys.argv[1:4], int(sys.argv[4]))  # type: ignore[arg-type, call-arg]
    dist.destroy_process_group()
