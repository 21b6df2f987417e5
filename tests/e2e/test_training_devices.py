"""`SnapshotManager` with a state on a device that copies late: each listed snapshot is the state of one step.

The device is simulated (support/late_device.py) and everything else is real; with CUDA or another accelerator
the last tests run on that.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.late_training import saved_state, states_of, train

from ciuic import SnapshotManager

_TESTS = Path(__file__).parents[1]


def _check_all(save_dir: Path, states: dict[int, dict[str, Any]]) -> list[int]:
    """Check the state of each snapshot; return their steps."""
    steps = []
    with SnapshotManager(save_dir) as manager:
        for saved in manager.list_snapshots():
            step = saved.facts.step
            assert step is not None
            found, expected = saved_state(manager.load_snapshot(saved.id)), states[step]
            assert found.keys() == expected.keys()
            wrong = [name for name, value in found.items() if not np.array_equal(value, expected[name])]
            assert wrong == [], f"the snapshot of step {step}"
            steps.append(step)
    return sorted(steps)


@pytest.mark.parametrize(
    "behaviours",
    [set(), {"clamps"}, {"asks"}, {"clamps", "asks"}],
    ids=lambda value: "-".join(sorted(value)) or "plain",
)
def test_every_snapshot_is_the_state_of_its_step(tmp_path: Path, behaviours: set[str]) -> None:
    """Every snapshot is the state of its step, also if weights change between steps or after the request."""
    states = train(tmp_path, 7, behaviours, lambda saved: None, 8)
    assert len(_check_all(tmp_path, states)) >= 8


def test_a_trainer_that_is_killed_leaves_no_torn_snapshot(tmp_path: Path) -> None:
    """A state still on its way from the device when its trainer is killed is in no snapshot."""
    chosen = random.Random(3)
    states = states_of(3000)
    for number in range(3):
        place = tmp_path / str(number)
        program = subprocess.Popen(
            [sys.executable, "-m", "support.late_training", place, str(number)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(_TESTS)},
        )
        assert program.stdout is not None
        more = chosen.randrange(20)
        for line in program.stdout:
            more -= int(line) >= 2
            if more < 0:
                break
        os.kill(program.pid, signal.SIGKILL)
        program.communicate(timeout=60)
        assert len(_check_all(place, states)) >= 2
