"""Trials of a training that is killed at random instants, shared by the crash tests and the torture."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from support import stored
from support.until import until

from ciuic.repository import Repository, Walker
from ciuic.types import ChunkId

PROGRAM = Path(__file__).with_name("tiny_training.py")
STEPS = 60


def uninterrupted(where: Path) -> dict[str, Any]:
    """Return the result of an undisturbed run."""
    return finish(begin(where / "snapshots", where / "result"), where / "result")


def begin(save_dir: Path, result: Path, step_seconds: float = 0.0) -> subprocess.Popen[bytes]:
    """Start a run that resumes by itself, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), str(save_dir), str(STEPS), str(result), str(step_seconds)],
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[bytes], result: Path) -> dict[str, Any]:
    """Wait for the end and return the result; raise AssertionError with the output if the run failed."""
    _, complaint = process.communicate(timeout=120)
    assert process.returncode == 0, complaint.decode()
    return dict(json.loads(result.read_text()))


def kill_one(save_dir: Path, result: Path, choose: random.Random, snapshots: int = 0) -> None:
    """Kill a run somewhere between its first instant and its last; return when its writer has ended too.

    ``snapshots``: it is killed after so many are stored; 0: at a random instant.
    """
    process = begin(save_dir, result, 0.01)
    if snapshots:
        until("stored snapshots", lambda: _stored(save_dir) >= snapshots or process.poll() is not None)
    else:
        time.sleep(choose.uniform(0.1, 1.5))
    os.killpg(process.pid, signal.SIGKILL)
    # The writer holds the other end of standard error, so this waits for its end.
    process.communicate()
    if Repository.exists(save_dir):
        with Repository.open(save_dir) as repository:
            repository.writer(wait_seconds=60).close()


def _stored(save_dir: Path) -> int:
    if not Repository.exists(save_dir):
        return 0
    with Repository.open(save_dir) as repository:
        return len(repository.snapshots.names())


def flip(save_dir: Path, choose: random.Random) -> bool:
    """Flip one bit of a file that only the newest snapshot has; return whether there is one."""
    if not Repository.exists(save_dir):
        return False
    with Repository.open(save_dir) as repository:
        ids = repository.snapshots.ids()
        seen: set[ChunkId] = set()
        walker = Walker(repository, seen=seen)
        for id_ in ids[1:]:
            deque(walker.walk(repository.snapshots.load(id_), on_damage=_no_matter), maxlen=0)
        if not seen:
            return False
        own = [one.id for one in walker.walk(repository.snapshots.load(ids[0]), on_damage=_no_matter)]
        if not own:
            return False
        place = repository.chunks.locate(choose.choice(own))
    at = place.offset + choose.randrange(place.stored_bytes)
    stored.flip(save_dir / "packs" / f"{place.pack:016x}.pack", at, 1 << choose.randrange(8))
    return True


def _no_matter(*_: object) -> None:
    """Ignore the error: the file was damaged before."""
