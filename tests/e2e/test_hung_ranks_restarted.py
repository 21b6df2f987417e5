"""`ciuic watch --restart-hung` over real trainings: one that hangs goes on from its last save, others are left alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.hanging_training import STILL_SECONDS
from support.live import installed

SUPPORT = Path(__file__).parents[1] / "support"
LAUNCHER = 'n=0; until "$@"; do n=$((n + 1)); [ $n -lt 3 ] || exit 1; done'
"""Starts a command again that does not end well, twice at most."""


def watch(top: Path, limit_seconds: float, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command under the watch, without a daemon."""
    (top / "ciuic.toml").write_text(f'[daemon]\nruntime_dir = "{top}/none"\n')
    env = {
        **os.environ,
        "CIUIC_CONFIG": str(top / "ciuic.toml"),
        "OMP_NUM_THREADS": "1",
        # Ranks find addresses of dead ones otherwise (docs/snapshot-manager.md, Elastic jobs).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "PYTHONPATH": f"{SUPPORT.parent}:{SUPPORT.parents[1]}",
    }
    options = ["watch", "--restart-hung", f"{limit_seconds:g}s"]
    return subprocess.run(
        [str(installed()), *options, "--", *words], env=env, capture_output=True, text=True, timeout=180
    )


def train(top: Path, name: str, how: str, steps: int) -> list[str]:
    program = str(SUPPORT / "hanging_training.py")
    return [sys.executable, program, str(top / f"{name}-saves"), str(steps), str(top / name), how]


def result(top: Path, name: str) -> dict[str, object]:
    found = json.loads((top / name).read_text())
    return {"digest": found["digest"], "losses": found["losses"]}


def is_gone(text: str) -> bool:
    """Return whether the processes of which a log speaks have ended."""
    pids = {int(pid) for pid in re.findall(r"stacks of (?:rank \d+ \()?pid (\d+)", text)}
    return bool(pids) and not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_a_training_that_hangs_goes_on_from_its_last_save(tmp_path: Path) -> None:
    """A rank that hangs is shown and killed, the launcher starts it again, and its result is that of a run that never hung."""
    assert not subprocess.run(
        train(tmp_path, "whole", "", 12), env={**os.environ, "PYTHONPATH": str(SUPPORT.parent)}, check=True
    ).returncode
    ended = watch(tmp_path, 2.0, "sh", "-c", LAUNCHER, "sh", *train(tmp_path, "hangs", "hang", 12))
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("has made no step for") == 1
    assert ended.stderr.count("in never_ends") == 1
    assert "no emergency snapshot of files: no daemon watches this command" in ended.stderr
    assert is_gone(ended.stderr)
    assert result(tmp_path, "hangs") == result(tmp_path, "whole")
    assert json.loads((tmp_path / "hangs").read_text())["began"] == 6


def test_a_training_that_stands_still_for_a_reason_is_left_alone(tmp_path: Path) -> None:
    """Slow steps, long saves, SIGSTOP and what follows the manager's end are no hang, though each is longer than the limit."""
    ended = watch(tmp_path, STILL_SECONDS, *train(tmp_path, "still", "still", 6))
    assert ended.returncode == 0, ended.stderr
    assert "hangs" not in ended.stderr
    assert result(tmp_path, "still")


@pytest.mark.usefixtures("torch_distributed")
def test_torchrun_starts_ranks_that_hang_again(tmp_path: Path) -> None:
    """One rank that hangs, and the other that waits for it, are started again by torchrun and end with the bits of a run that never hung."""
    found = []
    for name, hung_rank in (("whole", -1), ("hangs", 1)):
        (tmp_path / name).mkdir()
        launcher = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        program = [
            str(SUPPORT / "preempted_ranks.py"),
            str(tmp_path / name / "saves"),
            str(tmp_path / name / "result"),
        ]
        words = [sys.executable, *launcher, "--max-restarts=2", *program, "hang", str(hung_rank)]
        ended = watch(tmp_path, 8.0, *words)
        assert ended.returncode == 0, ended.stderr
        found.append([json.loads((tmp_path / name / f"result-{rank}").read_text()) for rank in range(2)])
    assert "; rank 0 (pid" in ended.stderr
    assert ended.stderr.count("ciuic: stacks of rank ") == 2
    assert ended.stderr.count("in never_ends") == 1
    assert is_gone(ended.stderr)
    assert found[0] == found[1]
