"""Random actions on a messy host (support/mess.py), a new host for every hundred."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from pathlib import Path

from support.mess import Broken, run_rounds
from torture.figure import Figure

_ACTIONS = 100


def run(seconds: float, seed: int) -> list[Figure]:
    """Return figures: actions after which all that is mounted was there and unchanged, and restores that were exact."""
    end, dice = time.monotonic() + seconds, random.Random(seed)
    actions = restores = snapshots = 0
    failures: list[str] = []
    while time.monotonic() < end and not failures:
        top = Path(tempfile.mkdtemp(prefix="mess-"))
        try:
            done = run_rounds(top, dice.randrange(10**6), _ACTIONS, until=end)
        except Broken as error:
            failures.append(str(error))
        else:
            actions, restores, snapshots = (
                sum(pair) for pair in zip((actions, restores, snapshots), done, strict=True)
            )
        shutil.rmtree(top, ignore_errors=True)
    return [
        Figure("actions on messy hosts, with what is mounted unchanged", actions, tuple(failures)),
        Figure("restores on messy hosts, compared with the model", restores),
        Figure("snapshots of messy hosts, restored at the end", snapshots),
    ]
