"""Small training under a manager whose heartbeat is watched; its last argument chooses how it ends.

    python watched_training.py SAVE_DIR HEARTBEAT_SECONDS STEPS end|raise|finally|exit|vanish

Prints a line after the first step, and continues step by step, a hundredth of a second each.
"""

from __future__ import annotations

import os
import sys
import time

from support.tiny_training import Model, Optimizer

from ciuic import SnapshotManager
from ciuic.training import ManagerOptions


def main(save_dir: str, heartbeat_seconds: float, steps: int, how: str) -> None:
    model = Model()
    optimizer = Optimizer(model)
    manager = SnapshotManager(
        save_dir, every_steps=1000, options=ManagerOptions(heartbeat_seconds=heartbeat_seconds)
    )
    manager.register(model=model, optimizer=optimizer)
    for _ in range(steps):
        optimizer.step()
        if optimizer.steps == 1:
            sys.stdout.write("stepped\n")
            sys.stdout.flush()
        time.sleep(0.01)
    if how == "raise":
        raise ValueError("loss is nan")
    if how == "finally":
        try:
            raise ValueError("loss is inf")
        finally:
            manager.close()
    if how == "exit":
        sys.exit(3)
    if how == "vanish":
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
