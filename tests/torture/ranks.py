"""Trainings of several ranks with ranks killed at random.

DDP and FSDP with SnapshotManager and FSDP through torch.distributed.checkpoint in turn. Each trial is a kill
of one rank, of the one that saves, or of all; some runs are then left to finish, and every rank must end with
the bits of an undisturbed run. After each kill every existing snapshot must be whole.
"""

from __future__ import annotations

import importlib.util
import random
import shutil
import tempfile
import time
from pathlib import Path

from torture.figure import Figure

_KILLS_A_RUN = 4
_VICTIMS = ((0,), (1,), (0, 1))


def run(seconds: float, seed: int) -> list[Figure]:
    """Run until the time is over, one of each kind at least."""
    if importlib.util.find_spec("torch") is None:
        return [Figure("rank kills: no CPU build of PyTorch is offered here", 0)]
    from support import ddp_training, sharded_training
    from support.ranks_kill import Trial

    choose = random.Random(seed)
    top = Path(tempfile.mkdtemp())
    mains = (ddp_training.train, sharded_training.train, sharded_training.train_managed)
    until = time.monotonic() + seconds
    kills = runs = complete = 0
    failures: list[str] = []
    while runs < len(mains) or time.monotonic() < until:
        place = top / str(runs)
        place.mkdir()
        trial = Trial(place, mains[runs % len(mains)], choose, longest_seconds=5.0)
        what = f"run {runs} of seed {seed}"
        try:
            expected = trial.uninterrupted()
            for _ in range(_KILLS_A_RUN):
                trial.killed(choose.choice(_VICTIMS))
                kills += 1
                found, problems = trial.read_back()
                complete += found
                failures += [f"{what}: {problem}" for problem in problems]
            if trial.finished() != expected:
                failures.append(f"{what} ended with other bits")
        except AssertionError as error:
            failures.append(f"{what} did not end: {error}")
        runs += 1
        shutil.rmtree(place)
    return [
        Figure("kills of ranks of a distributed training", kills),
        Figure("snapshots read back whole after them", complete),
        Figure(
            "such runs that ended with the bits of an undisturbed one", runs - len(failures), tuple(failures)
        ),
    ]
