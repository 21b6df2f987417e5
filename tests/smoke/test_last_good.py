"""Recovery of a training whose writer was killed in mid-save: the choice is left to `restore --last-good`."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.live import Live
from support.until import until

pytestmark = pytest.mark.mount

_TRAINING = """
import sys, numpy as np
run, step = sys.argv[1], int(sys.argv[2])
while True:
    step += 1
    print(step, flush=True)
    with open(f"{run}/step-{step}.npz", "wb", buffering=0) as file:
        np.savez(file, step=np.array(step), weights=np.full(1 << 19, step))
"""


def test_a_killed_training_goes_on_from_the_last_good_one(protected: Live, root: Path) -> None:
    """Whatever was being written when snapshots were cut and the writer was killed, what comes back can be loaded."""
    dice = random.Random(7)
    run = root / "run"
    run.mkdir()
    last = 0
    for _ in range(3):
        training = subprocess.Popen(
            [sys.executable, "-c", _TRAINING, str(run), str(last)], stdout=subprocess.PIPE, text=True
        )
        assert training.stdout is not None
        try:
            for _ in range(dice.randrange(2, 6)):
                assert training.stdout.readline()
            protected.snapshot("--wait")
        finally:
            training.kill()
            training.communicate()
        protected.snapshot("--wait")
        shutil.rmtree(run)
        (choice,) = protected.json("restore", "--last-good", "-p", str(run))["last_good"]
        for bad in choice["not_good"]:
            Path(bad["path"]).unlink()
        if alone := choice["newer_good"]:
            protected.run("restore", "-s", alone["snapshot"], "-p", alone["checkpoint"])
        newest = max(run.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        with np.load(newest) as loaded:
            step = int(loaded["step"])
            assert newest.name == f"step-{step}.npz"
            assert (loaded["weights"] == step).all()
        assert step >= last
        last = step
    newest = protected.list()[0].id
    until("the verdicts on the newest snapshot", lambda: _verdict(protected, newest))
    shown = protected.json("checkpoints", newest)["checkpoints"]
    assert _verdict(protected, newest) == shown[0]["verdict"]


def _verdict(live: Live, snapshot: str) -> str:
    """Return what `list` shows of the newest checkpoint of a snapshot; empty while nothing is stored."""
    (found,) = [one for one in live.json("list")["snapshots"] if one["id"] == snapshot]
    return found["checkpoint"]["verdict"] if found["checkpoint"] else ""
