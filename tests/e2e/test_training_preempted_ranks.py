"""One rank of several is told to go: all save the same step, the job ends as it was told to, and goes on to the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="no CPU build of PyTorch is offered here")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

from support import preempted_ranks  # noqa: E402
from support.ranks import Ranks  # noqa: E402

from ciuic import SnapshotManager  # noqa: E402

WORLD = 2
_TERMINATED = 143


def test_what_one_rank_is_told_all_answer_at_one_step(tmp_path: Path) -> None:
    """Under torchrun, DDP: the job ends with the status of a signal, and every rank goes on to what it had undisturbed."""
    whole, place = tmp_path / "whole", tmp_path / "told"
    _finish(whole, "ddp")
    ended = _torchrun(place, "ddp", told=1)
    assert ended.returncode != 0
    assert f"exitcode  : {_TERMINATED}" in ended.stderr, ended.stderr
    _one_of_all(place)
    _finish(place, "ddp")
    assert _results(place) == _results(whole)


def test_what_rank_0_is_told_all_answer_with_their_parts(tmp_path: Path) -> None:
    """FSDP2: each rank's part of one step is in one snapshot, and every rank ends with the status of a signal."""
    whole, place = tmp_path / "whole", tmp_path / "told"
    _finish(whole, "fsdp")
    assert _ranks(place, "fsdp", told=0).wait() == [_TERMINATED] * WORLD
    _one_of_all(place)
    _finish(place, "fsdp")
    assert _results(place) == _results(whole)


def _one_of_all(place: Path) -> None:
    """There is one snapshot, and no rank has come to its end."""
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
    _ranks(place, kind, told=-1).check()


def _ranks(place: Path, kind: str, told: int) -> Ranks:
    place.mkdir(exist_ok=True)
    result = str(place / "result")
    return Ranks(place / "logs", WORLD, preempted_ranks.train, str(place / "snapshots"), result, kind, told)


def _results(place: Path) -> list[object]:
    return [json.loads((place / f"result-{rank}").read_text()) for rank in range(WORLD)]


def _torchrun(place: Path, kind: str, told: int) -> subprocess.CompletedProcess[str]:
    place.mkdir()
    program = [preempted_ranks.__file__, str(place / "snapshots"), str(place / "result"), kind, str(told)]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
    return subprocess.run(
        [sys.executable, "-W", "ignore", *launcher, *program],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
