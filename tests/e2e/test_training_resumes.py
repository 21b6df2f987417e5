"""A short form of the resumes torture: mixed precision, gradient scaling and an average of the weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="no CPU build of PyTorch is offered here")


def test_a_killed_training_ends_with_the_state_and_the_log_of_an_undisturbed_one(tmp_path: Path) -> None:
    """A training that is killed three times at random resumes to the same bits and values."""
    tests = Path(__file__).parents[1]
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "support.resumes.trial", "cnn", str(tmp_path), "5", "3", str(result)]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(tests), "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(result.read_text())
    assert (found["states"], found["values"], found["problems"]) == ([], [], [])
    assert found["kills"] == 3
    assert any(step for step in found["resumed_steps"]), "no run was resumed"
