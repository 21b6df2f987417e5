"""Training with `SnapshotManager` as a process, in one directory or with a remote.

CIUIC_RESCUE_STATES is the number of its steps; 0: the story does without it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ciuic.repository import Repository
from ciuic.training.remote.uploads import record_of

TRAINING = Path(__file__).with_name("tiny_training.py")
STATES_STEPS = int(os.environ.get("CIUIC_RESCUE_STATES", "150"))


def run_states(
    save_dir: str, result: Path, environment: Mapping[str, str], *, step_seconds: float = 0
) -> subprocess.Popen[bytes]:
    """Start the training of `tiny_training.py`, which resumes by itself; its messages are beside the result."""
    with open(f"{result}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, str(TRAINING), save_dir, str(STATES_STEPS), str(result), str(step_seconds)],
            env=dict(environment),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def stored_states(save_dir: Path) -> frozenset[str]:
    """Return the snapshots that the remotes of a directory have."""
    remotes = save_dir / "remotes"
    if not remotes.is_dir() or not Repository.exists(save_dir):
        return frozenset()
    with Repository.open(save_dir) as repository:
        records = [record_of(str(save_dir), one.name, repository.id) for one in remotes.iterdir()]
    return frozenset().union(*(record.stored for record in records if record is not None))
