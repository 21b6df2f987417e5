"""Requeue a job after preemption.

    BeforePreemption(grace_seconds=120, then=requeue_slurm)        # sbatch --requeue --signal=USR1@120

For submitit the job's callable needs a method ``checkpoint`` that returns what is to be run again;
`requeue_submitit` is that:

    class Train:
        def __call__(self, save_dir): ...
        checkpoint = requeue_submitit

submitit's own handler is called once the last snapshot is staged, and requeues by itself.
"""

from __future__ import annotations

import logging
import os
import subprocess
from typing import Any, Final

from ciuic.system.child_process import without_secrets
from ciuic.training.preemption.last_moment import Preempted

log = logging.getLogger("ciuic")

_PATIENCE_SECONDS: Final = 20.0
"""Time limit of one scontrol call."""


def requeue_slurm(preempted: Preempted) -> None:
    """Requeue this Slurm job, from its first process alone, and end the process.

    Not for clusters where Slurm preempts by requeueing on its own: there ``then="exit"`` is right. Outside of
    Slurm, or if the scheduler refuses, the failure is logged, and the process ends with 128 + signal.

    Raises:
        SystemExit: always; 0 if the job was requeued.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        log.error("ciuic: not requeued: SLURM_JOB_ID is not set, so this is no Slurm job")
        raise SystemExit(128 + preempted.signal)
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    name = f"{array}_{task}" if array and task else job
    # Every process of the job gets the signal; one request is enough.
    if os.environ.get("SLURM_PROCID", "0") == "0":
        try:
            subprocess.run(
                ["scontrol", "requeue", name],
                env=without_secrets(os.environ),
                check=True,
                timeout=_PATIENCE_SECONDS,
                capture_output=True,
                text=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            log.error("ciuic: scontrol requeue %s failed: %s", name, getattr(error, "stderr", None) or error)
            raise SystemExit(128 + preempted.signal) from None
        log.warning("ciuic: job %s is requeued", name)
    raise SystemExit(0)


def requeue_submitit(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return a submitit request to run the same callable with the same arguments; it resumes by itself.

    It is meant as the method ``checkpoint`` of a submitit callable.
    """
    from submitit.helpers import DelayedSubmission  # type: ignore[import-not-found, unused-ignore]

    return DelayedSubmission(self, *args, **kwargs)
