"""A training with SnapshotManager, killed with SIGKILL at random instants until it is done.

The newest snapshot is damaged after every other kill. Each trial is a kill; some runs are then left to
finish, and must end with the bits of an undisturbed one.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from pathlib import Path

from support import training_trials as trials
from torture.figure import Figure

_KILLS_A_RUN = 6


def run(seconds: float, seed: int) -> list[Figure]:
    """Run until the time is over, one at least."""
    choose = random.Random(seed)
    top = Path(tempfile.mkdtemp())
    expected = trials.uninterrupted(top)
    until = time.monotonic() + seconds
    kills = damaged = runs = 0
    failures: list[str] = []
    while not runs or time.monotonic() < until:
        place = top / str(runs)
        place.mkdir()
        for number in range(_KILLS_A_RUN):
            trials.kill_one(place / "snapshots", place / "result", choose)
            kills += 1
            damaged += number % 2 and trials.flip(place / "snapshots", choose)
        try:
            found = trials.finish(trials.begin(place / "snapshots", place / "result"), place / "result")
            if (found["digest"], found["losses"]) != (expected["digest"], expected["losses"]):
                failures.append(f"run {runs} of seed {seed} ended with other bits")
        except AssertionError as error:
            failures.append(f"run {runs} of seed {seed} did not end: {error}")
        runs += 1
        shutil.rmtree(place)
    if not damaged:
        failures.append("no snapshot was damaged")
    return [
        Figure("kills of a training that saves its state", kills),
        Figure("newest snapshots of it damaged", damaged),
        Figure(
            "such runs that ended with the bits of an undisturbed one", runs - len(failures), tuple(failures)
        ),
    ]
