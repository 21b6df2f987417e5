"""One rank of several is signalled to end: all save the same step, and the job resumes to the same bits."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.late_modules import LateModule
from support.rank_processes import Ranks
from support.warm_python import WarmPython

from ciuic import SnapshotManager

preempted_ranks: Any = LateModule("support.preempted_ranks")
pytestmark = pytest.mark.usefixtures("torch_distributed")

WORLD = 2
_TERMINATED = 143


def test_all_ranks_save_at_one_step_when_one_is_signalled(plain_torch: WarmPython, tmp_path: Path) -> None:
    """Under torchrun with DDP the job ends with a signal's status, and every rank resumes exactly."""
    uninterrupted, place = tmp_path / "whole", tmp_path / "told"
    _finish(uninterrupted, "ddp")
    ended = _torchrun(plain_torch, place, "ddp", signalled_rank=1)
    assert ended.returncode != 0
    assert f"exitcode  : {_TERMINATED}" in ended.stderr, ended.stderr
    _one_of_all(place)
    _finish(place, "ddp")
    assert _results(place) == _results(uninterrupted)


def test_all_ranks_save_their_parts_when_rank_0_is_signalled(tmp_path: Path) -> None:
    """Each rank's part of one step is in one snapshot with FSDP2; every rank ends with a signal's status."""
    uninterrupted, place = tmp_path / "whole", tmp_path / "told"
    _finish(uninterrupted, "fsdp")
    assert _ranks(place, "fsdp", signalled_rank=0).wait() == [_TERMINATED] * WORLD
    _one_of_all(place)
    _finish(place, "fsdp")
    assert _results(place) == _results(uninterrupted)


def _one_of_all(place: Path) -> None:
    """Check that there is one snapshot, and that no rank has come to its end."""
    with SnapshotManager(place / "snapshots") as manager:
        (saved,) = manager.list_snapshots()
    assert (saved.facts.world_size, saved.facts.reason) in (
        (WORLD, "SIGTERM"),
        (WORLD, "SIGTERM to another rank"),
    )
    assert saved.facts.step is not None
    assert saved.facts.step >= preempted_ranks.STEP
    assert not list(place.glob("result-*"))


def _finish(place: Path, kind: str) -> None:
    _ranks(place, kind, signalled_rank=-1).check()


def _ranks(place: Path, kind: str, signalled_rank: int) -> Ranks:
    place.mkdir(exist_ok=True)
    result = str(place / "result")
    return Ranks(
        place / "logs", WORLD, preempted_ranks.train, str(place / "snapshots"), result, kind, signalled_rank
    )


def _results(place: Path) -> list[object]:
    return [json.loads((place / f"result-{rank}").read_text()) for rank in range(WORLD)]


def _torchrun(
    python: WarmPython, place: Path, kind: str, signalled_rank: int
) -> subprocess.CompletedProcess[str]:
    place.mkdir()
    program = [
        str(Path(__file__).parents[1] / "support/preempted_ranks.py"),
        str(place / "snapshots"),
        str(place / "result"),
        kind,
        str(signalled_rank),
    ]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    return python.run(["-W", "ignore", *launcher, *program], env=env, timeout=180)
