"""Training of a Slurm job: five steps a run, and then it waits at a boundary to be preempted, until it may finish.

    python slurm_training.py DIRECTORY STEPS [EVERY]

Below DIRECTORY it appends a line to `runs` when it has resumed, with its first step, and when its five steps are done; `result`
gets the digest after the last step. It finishes once the file `finish` is there. It saves before a preemption, and after each
EVERY steps.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
from support.tiny_training import Model, Optimizer

from ciuic import SnapshotManager
from ciuic.training import BeforePreemption, Rule, Steps

RUN_STEPS = 5


def main(top: Path, steps: int, every: int, *, saves: Path | None = None, seed: int = 5) -> None:
    random.seed(seed)
    np.random.seed(seed)
    model = Model(1000)
    optimizer = Optimizer(model)
    node = os.environ.get("SLURMD_NODENAME", "")
    rules: list[Rule] = [BeforePreemption(grace_seconds=15), *([Steps(every)] if every else [])]
    manager = SnapshotManager(saves or top / "snapshots", save_when=rules)
    manager.register(model=model, optimizer=optimizer)
    manager.resume()
    began = optimizer.steps
    with open(top / "runs", "a", buffering=1) as runs:
        runs.write(f"{node} begins {began}\n")
        while optimizer.steps < steps:
            if optimizer.steps - began < RUN_STEPS or (top / "finish").exists():
                optimizer.step()
                if optimizer.steps - began == RUN_STEPS:
                    runs.write(f"{node} has {optimizer.steps}\n")
            else:
                time.sleep(0.02)
                manager.boundary()
    digest = hashlib.sha256()
    for value in (*model.weights.values(), *optimizer.momentum.values()):
        digest.update(value.tobytes())
    manager.close()
    (top / "result").write_text(digest.hexdigest())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
