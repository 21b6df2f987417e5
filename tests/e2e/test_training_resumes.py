"""A short form of the resumes torture: mixed precision, gradient scaling and an average of the weights."""

from __future__ import annotations

import json
import os
from pathlib import Path

from support.warm_python import WarmPython


def test_a_killed_training_ends_with_the_state_and_the_log_of_an_undisturbed_one(
    warm_torch: WarmPython, tmp_path: Path
) -> None:
    """A training that is killed three times at random resumes to the same bits and values."""
    tests = Path(__file__).parents[1]
    result = tmp_path / "result.json"
    done = warm_torch.run(
        ["-m", "support.resumes.trial", "cnn", tmp_path, 5, 3, result],
        env={**os.environ, "PYTHONPATH": str(tests)},
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(result.read_text())
    assert (found["states"], found["values"], found["problems"]) == ([], [], [])
    assert found["kills"] == 3
    assert any(step for step in found["resumed_steps"]), "no run was resumed"
