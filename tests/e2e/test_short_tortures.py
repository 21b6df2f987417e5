"""Short forms of tortures: a messy host, snapshots under many writers, and trainings that are resumed."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
from support.mess import run_rounds
from support.warm_python import WarmPython
from torture import cut


@pytest.mark.mount
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_is_lost_on_a_messy_host(short_tmp: Path, seed: int) -> None:
    """Fifty random actions each: nothing that is mounted changes or goes, no job sees an error, every snapshot is exact."""
    done, restores, checked = run_rounds(short_tmp, seed, 50)
    assert done == 50
    assert restores
    assert checked


@pytest.mark.mount
@pytest.mark.slow
def test_every_snapshot_is_a_moment_of_every_writers_history(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cuts at random instants in two roots, with captures disturbed, show only states that existed."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_tmp))
    figures = cut.run(5, seed=20)
    assert [text for figure in figures for text in figure.failures] == []
    counts = {figure.name: figure.count for figure in figures}
    assert counts["snapshots checked"] > 0
    assert counts["records checked in them"] > 0


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
