"""The Slurm job that this process is part of: its tags, its state, and requeueing.

Slurm describes a job to its processes by environment variables (sbatch(1)), and answers for its state by squeue(1).
Nothing is asked before it is needed: tags come from the environment alone, so that a training pays nothing for them.

A job that is preempted and ends within the grace period of its partition is *not* requeued by Slurm, not even where
PreemptMode is REQUEUE: only what still runs at the end of that period is (tried with 22.05). Who ends earlier requeues itself.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Mapping
from typing import Final, NamedTuple

from ciuic.errors import CiuicError, NotPermitted, UsageError
from ciuic.system.child_process import without_secrets
from ciuic.system.disk import PIN_DIRECTORY

ASK_SECONDS: Final = 20.0
"""Time limit of one request to the controller."""
_MAX_NAME: Final = 100
_ON_A_NODE: Final = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT")
# Characters that no tag may have: blanks and commas separate tags, and the bar fields of lists.
_NO_TAG: Final = re.compile(r"[^!-+\--{}~]")
_JOB_TAG: Final = re.compile(r"slurm-(?:job|name|array|restart)=[!-+\--{}~]{1,100}")
"""Form of the tags of `job_tags`."""


class JobState(NamedTuple):
    """Answer of the controller about a job."""

    state: str
    """As squeue(1) names it, such as RUNNING; empty if the controller does not know the job."""
    is_preempted: bool
    """The run that is under way is to end because of preemption."""


class SlurmJob(NamedTuple):
    """Job that a process is part of."""

    id: str
    """Number of the job, of an array that of the task."""
    name: str
    array_job: str
    """Number of the array; empty if the job is not part of one."""
    array_index: str
    """Index in an array; empty if the job is not part of one."""
    restarts: int
    is_first_process: bool
    """This is the batch script, or the first task of a step: one process of the job speaks for it."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> SlurmJob | None:
        """Return the job that an environment describes; None outside of Slurm."""
        if not (number := environ.get("SLURM_JOB_ID", "")).isdecimal():
            return None
        restarts = environ.get("SLURM_RESTART_COUNT", "")
        return cls(
            id=number,
            name=environ.get("SLURM_JOB_NAME", ""),
            array_job=environ.get("SLURM_ARRAY_JOB_ID", ""),
            array_index=environ.get("SLURM_ARRAY_TASK_ID", ""),
            restarts=int(restarts) if restarts.isdecimal() else 0,
            is_first_process=environ.get("SLURM_PROCID", "0") == "0",
        )

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags of the job's snapshots; characters that no tag may have become ``_``."""
        values = {
            "job": self.id,
            "name": self.name,
            "array": self.array_index,
            "restart": str(self.restarts),
        }
        return tuple(
            f"slurm-{key}={_NO_TAG.sub('_', value)[:_MAX_NAME]}" for key, value in values.items() if value
        )

    @property
    def _in_slurm(self) -> str:
        """Name of the job alone: the number of the last task of an array is that of the array, too."""
        return f"{self.array_job}_{self.array_index}" if self.array_job and self.array_index else self.id

    def ask(self) -> JobState:
        """Return the state of the job.

        Raises:
            CiuicError: the controller cannot be asked.
        """
        # Fixed widths: a field that squeue does not know is left out without them.
        said = _run("squeue", "--noheader", "--states=all", f"--jobs={self._in_slurm}", "--Format=State:30,PreemptTime:30,StartTime:30")  # fmt: skip
        words = said.split()
        if not words:
            return JobState("", False)
        state, preempted, started = (*words, "N/A", "N/A")[:3]
        # Times of ISO 8601 in one zone compare as texts. The time of an earlier run's preemption stays on record.
        return JobState(state, preempted[:1].isdigit() and preempted >= started)

    def comment(self, environ: Mapping[str, str]) -> str:
        """Return what ``--comment`` gave the job. CiuicError."""
        # Slurm from 23.02 on has it in the environment of Prolog and Epilog.
        known = environ.get("SLURM_JOB_COMMENT")
        said = (
            _run("squeue", "--noheader", "--states=all", f"--jobs={self._in_slurm}", "--format=%k")
            if known is None
            else known
        )
        return said.strip()

    def requeue(self) -> None:
        """Put the job back into the queue; Slurm then ends all its processes, this one included.

        Raises:
            CiuicError: the controller refuses, or cannot be asked.
        """
        _run("scontrol", "requeue", self._in_slurm)


def job_tags(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the tags of this process's job; none outside of Slurm."""
    job = SlurmJob.of(os.environ if environ is None else environ)
    return () if job is None else job.tags


def directory_in_comment(comment: str) -> str:
    """Return the directory that a job names in its comment, as in ``--comment=ciuic=/data/run``; empty if it names none.

    The text is the user's own: what is returned is not checked.
    """
    found = [word.removeprefix("ciuic=") for word in comment.split() if word.startswith("ciuic=")]
    return found[0] if found else ""


def check_directory(path: str, uid: int) -> None:
    """Check that a directory that a user's job has named may be treated by root as that user's.

    Raises:
        CiuicError: it is not a plain absolute path, leads through a link, or belongs to somebody else.
    """
    parts = path.split("/")[1:]
    if not path.startswith("/") or not path.isprintable() or any(part in ("", ".", "..") for part in parts):
        raise UsageError(f"not a plain absolute path: {path!r}", hint="--comment=ciuic=/data/run")
    fd = os.open("/", PIN_DIRECTORY)
    try:
        for part in parts:
            deeper = os.open(part, PIN_DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = deeper
        owner = os.fstat(fd).st_uid
    except OSError as error:
        reason = (
            "a symbolic link leads there" if error.errno in (errno.ELOOP, errno.ENOTDIR) else error.strerror
        )
        raise CiuicError(f"{path!r}: {reason or error}") from None
    finally:
        os.close(fd)
    # Also for root's own jobs: what root's comment names may be a mistake, and never a user's directory.
    if owner != uid:
        raise NotPermitted(f"{path!r} belongs to user {owner}, and the job to user {uid}")


def is_job_tag(tag: str) -> bool:
    """Return whether a tag has the form of those of `job_tags`."""
    return _JOB_TAG.fullmatch(tag) is not None


def jobs_on_node(node: str) -> frozenset[str]:
    """Return the numbers of the jobs that a node has. CiuicError."""
    said = _run("squeue", "--noheader", "--states=all", f"--nodelist={node}", "--format=%A %T")
    lines = (line.split() for line in said.splitlines())
    return frozenset(words[0] for words in lines if words[1:] and words[1] in _ON_A_NODE)


def _run(*command: str) -> str:
    try:
        return subprocess.run(
            command,
            env=without_secrets(os.environ),
            cwd="/",
            check=True,
            timeout=ASK_SECONDS,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip()
        raise CiuicError(f"{' '.join(command[:2])} failed: {said}") from None
