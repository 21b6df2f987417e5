"""`tiny_training` that hangs, stands still or is slow where it is told to.

    python hanging_training.py SAVE_DIR STEPS RESULT hang|still

``hang``: step 8 never ends, the first time. ``still``: it is slow, saves for long, is stopped and goes on, and waits
after its end, each for twice what `STILL_SECONDS` allows.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

from support import tiny_training

from ciuic.training.writer.client import WriterClient

STILL_SECONDS = 2.0


def never_ends() -> None:
    """Hang, deaf to SIGTERM, as a rank in a collective does."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(3600)


def main(save_dir: str, steps: str, result: str, how: str) -> None:
    step, reserve = tiny_training.Optimizer.step, WriterClient.reserve

    def stepped(optimizer: tiny_training.Optimizer) -> float:
        if how == "hang" and optimizer.steps == 7 and not os.path.exists(f"{result}.hung"):
            with open(f"{result}.hung", "w"):
                never_ends()
        if how == "still":
            time.sleep(STILL_SECONDS / 2)
        if how == "still" and optimizer.steps == 4:
            subprocess.Popen(["sh", "-c", f"sleep {2 * STILL_SECONDS}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        return step(optimizer)

    def reserved(client: WriterClient, size_bytes: int) -> Any:
        if how == "still":
            time.sleep(2 * STILL_SECONDS)
        return reserve(client, size_bytes)

    tiny_training.Optimizer.step = stepped  # type: ignore[assignment, method-assign]
    WriterClient.reserve = reserved  # type: ignore[assignment, method-assign]
    tiny_training.main(save_dir, int(steps), result, 0.05)
    if how == "still":
        time.sleep(2 * STILL_SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
