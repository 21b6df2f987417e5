"""Tags of the snapshots of Slurm jobs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ciuic.cli.shared.options import Tag
from ciuic.system.slurm import is_job_tag, job_tags


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
