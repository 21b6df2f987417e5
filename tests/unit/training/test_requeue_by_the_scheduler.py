"""Requeueing with a stand-in for the scheduler's command, and the examples in etc/training."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import ciuic.training
from ciuic.training import Preempted, requeue_slurm

EXAMPLES = Path(__file__).parents[3] / "etc" / "training"
TOLD = Preempted("SIGUSR1", 10, 0.0)


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-in that records its arguments; `refuse` makes it fail."""
    command = tmp_path / "scontrol"
    command.write_text(
        f'#!/bin/sh\n[ ! -e {tmp_path}/refuse ] || {{ echo "Invalid job" >&2; exit 1; }}\necho "$@" >>{tmp_path}/asked\n'
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    return tmp_path


def _end() -> object:
    with pytest.raises(SystemExit) as end:
        requeue_slurm(TOLD)
    return end.value.code


def test_the_first_process_of_a_job_puts_it_back(scheduler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process of a job requeues it once, a task of an array by its own name."""
    assert _end() == 0
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert _end() == 0
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "15")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    assert _end() == 0
    assert (scheduler / "asked").read_text() == "requeue 17\nrequeue 15_2\n"


def test_a_job_that_is_not_requeued_ends_with_the_signal_status(
    scheduler: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A refused requeue, or none because this is no Slurm job, ends with the signal's status."""
    (scheduler / "refuse").touch()
    assert _end() == 138
    assert "Invalid job" in caplog.text
    monkeypatch.delenv("SLURM_JOB_ID")
    assert _end() == 138


@pytest.mark.parametrize("name", ["slurm.sbatch", "kubernetes.yaml", "torchrun.sh"])
def test_the_examples_can_be_followed(name: str) -> None:
    """The examples parse as Python and import names that exist."""
    text = (EXAMPLES / name).read_text()
    lines = [
        line[4:]
        for line in text.splitlines()
        if line.startswith("#   ")
        and not any(one in line for one in ("sbatch ", "kubectl", "torchrun.sh", "python -c"))
    ]
    compile("\n".join(line for line in lines), name, "exec")
    names = re.search(r"from ciuic\.training import (.*)", text)
    assert names is not None
    assert all(hasattr(ciuic.training, one.strip()) for one in names[1].split(","))


def test_submitit_runs_the_same_again() -> None:
    """submitit runs the callable again with its arguments."""
    helpers = pytest.importorskip("submitit.helpers", reason="submitit is not installed")

    class Train:
        checkpoint = ciuic.training.requeue_submitit

        def __call__(self, save_dir: str) -> str:
            return save_dir

    delayed = Train().checkpoint("there")
    assert isinstance(delayed, helpers.DelayedSubmission)
    assert delayed.result() == "there"
