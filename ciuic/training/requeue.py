"""Coming back after preemption: what asks the scheduler to run the job again.

    BeforePreemption(grace_seconds=120, then=requeue_slurm)        # sbatch --requeue --signal=USR1@120

For submitit the job's callable needs a method ``checkpoint`` that says what is to be run again; `again` is that:

    class Train:
        def __call__(self, save_dir): ...
        checkpoint = again

submitit's own handler is called once the last snapshot is staged, and requeues by itself.
"""

from __future__ import annotations

import logging
import os
import subprocess
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ciuic.training.preemption import Preempted

log = logging.getLogger("ciuic")

_PATIENCE_SECONDS: Final = 20.0


def requeue_slurm(preempted: Preempted) -> None:
    """Puts this job back into the queue, from its first process alone, and ends it: SystemExit(0).

    Not where Slurm preempts by requeueing on its own: there ``then="exit"`` is right. Outside of Slurm, or where the scheduler refuses, that
    is logged, and the process ends with 128 + signal.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        log.error("ciuic: this is no job of Slurm, so it is not put back into the queue")
        raise SystemExit(128 + preempted.signal)
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    name = f"{array}_{task}" if array and task else job
    if os.environ.get("SLURM_PROCID", "0") == "0":
        try:
            subprocess.run(
                ["scontrol", "requeue", name],
                check=True,
                timeout=_PATIENCE_SECONDS,
                capture_output=True,
                text=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            log.error("ciuic: the job is not back in the queue: %s", getattr(error, "stderr", None) or error)
            raise SystemExit(128 + preempted.signal) from None
        log.warning("ciuic: job %s is back in the queue", name)
    raise SystemExit(0)


def again(self: Any, *args: Any, **kwargs: Any) -> Any:
    """As ``checkpoint`` of a submitit callable: the same again, with what it was called with; it resumes by itself."""
    from submitit.helpers import DelayedSubmission  # type: ignore[import-not-found, unused-ignore]

    return DelayedSubmission(self, *args, **kwargs)
