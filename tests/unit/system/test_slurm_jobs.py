"""Tags of the snapshots of Slurm jobs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.site import CHECKOUT

from ciuic.cli.shared.options import Tag
from ciuic.system import slurm
from ciuic.system.slurm import SlurmJob, is_job_tag, job_tags


@given(st.text(), st.text(), st.text(), st.from_regex(r"[0-9]{1,12}", fullmatch=True))
def test_whatever_a_job_is_called_its_tags_are_tags(
    name: str, index: str, restarts: str, number: str
) -> None:
    """Tags of a job can be carried by lists and filters whatever its variables have, and are told from other tags."""
    tags = job_tags(
        {
            "SLURM_JOB_ID": number,
            "SLURM_JOB_NAME": name,
            "SLURM_ARRAY_TASK_ID": index,
            "SLURM_RESTART_COUNT": restarts,
        }
    )
    assert f"slurm-job={number}" in tags
    for tag in tags:
        assert is_job_tag(tag)
        assert Tag().convert(tag, None, None) == tag


def test_a_job_is_told_by_its_number_name_index_and_restarts() -> None:
    """A job's tags have its number, name, array index and restart count; there are none outside of Slurm."""
    variables = {"SLURM_JOB_NAME": "my run", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "2"}
    assert job_tags({**variables, "SLURM_JOB_ID": "17"}) == (
        "slurm-job=17", "slurm-name=my_run", "slurm-array=3", "slurm-restart=2",
    )  # fmt: skip
    assert job_tags({"SLURM_JOB_ID": "17"}) == ("slurm-job=17", "slurm-restart=0")
    assert job_tags(variables) == ()
    assert not is_job_tag("keep")
    assert not is_job_tag("slurm-job=17,keep")


def test_the_last_task_of_an_array_asks_for_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task whose number is the array's, too, names itself to Slurm by its index: the number names all tasks."""
    asked: list[tuple[str, ...]] = []

    def run(*command: str) -> str:
        asked.append(command)
        return ""

    monkeypatch.setattr(slurm, "_run", run)
    job = SlurmJob.of({"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "14", "SLURM_ARRAY_TASK_ID": "2"})
    assert job is not None
    job.ask()
    job.comment({})
    job.requeue()
    assert [{"14", "--jobs=14"}.isdisjoint(command) for command in asked] == [True] * 3
    assert [any(word.endswith("14_2") for word in command) for command in asked] == [True] * 3


def test_tasks_of_an_array_save_apart_by_the_shipped_script(tmp_path: Path) -> None:
    """The job script that is shipped gives each task of an array a save directory of its own."""
    shown = tmp_path / "ciuic"
    shown.write_text('#!/bin/sh\nfor word; do last=$word; done\necho "$last"\n')
    shown.chmod(0o755)
    said = [
        subprocess.run(
            ["bash", CHECKOUT / "etc/training/slurm.sbatch"], check=True, capture_output=True, text=True,
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": "/run", **task},
        ).stdout.strip()
        for task in ({}, {"SLURM_ARRAY_TASK_ID": "1"}, {"SLURM_ARRAY_TASK_ID": "2"})
    ]  # fmt: skip
    assert said == ["/run/snapshots", "/run/snapshots-1", "/run/snapshots-2"]
