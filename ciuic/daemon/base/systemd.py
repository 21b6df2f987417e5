"""Detection of a restart by systemd.

Over a restart the roots stay mounted and their workers serve on. systemd sends a service SIGTERM for a stop
and for a restart alike; only the job that it carries out says which (org.freedesktop.systemd1.Job, type
"restart"). It is asked through systemctl, with a timeout; without an answer the daemon stops and unmounts.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

import structlog
import trio

from ciuic.system.child_process import find_program, program_environment
from ciuic.system.service_manager import unit_of

# The workers serve meanwhile, so the wait costs no job anything.
_QUESTION_SECONDS = 3.0
log = structlog.get_logger(__name__)


async def is_restarting(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether systemd is carrying out a restart of the unit that this process belongs to."""
    if "INVOCATION_ID" not in environment:
        return False
    # Untranslated, because a carriage return is allowed in the name of a control group.
    with open("/proc/self/cgroup", errors="replace", newline="\n") as file:  # noqa: ASYNC230  no disk
        unit = unit_of(file.read())
    if unit is None:
        return False
    command = [find_program("systemctl"), "list-jobs", "--no-legend", "--plain", unit]
    try:
        with trio.fail_after(_QUESTION_SECONDS):
            answer = await trio.run_process(
                command, capture_stdout=True, stderr=subprocess.DEVNULL, cwd="/", env=program_environment()
            )
    except (OSError, subprocess.CalledProcessError, trio.TooSlowError) as error:
        log.warning("service_manager_not_asked", error=str(error) or type(error).__name__)
        return False
    return _job_type(answer.stdout.decode(errors="replace"), unit) in ("restart", "try-restart")


def _job_type(listing: str, unit: str) -> str:
    """Return the type of the unit's job in the output of `systemctl list-jobs`; empty without a job."""
    for line in listing.splitlines():
        fields = line.split()
        if len(fields) >= 3 and fields[1] == unit:
            return fields[2]
    return ""
