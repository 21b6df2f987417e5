"""Whether systemd is about to start us again: then the roots stay mounted, and their workers serve on.

systemd tells a service nothing but SIGTERM, for a stop and for a restart alike; the job that it carries out says which
(org.freedesktop.systemd1.Job, type "restart"). Asked through systemctl, with a time-out: without an answer it is a stop,
after which the plain directories are there.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

import structlog
import trio

from ciuic.child_process import find_program, program_environment
from ciuic.service_manager import unit_of

QUESTION_SECONDS = 3.0
log = structlog.get_logger(__name__)


async def is_restarting(environment: Mapping[str, str] = os.environ) -> bool:
    """True while systemd carries out a restart of the unit that this process belongs to."""
    if "INVOCATION_ID" not in environment:
        return False
    with open("/proc/self/cgroup") as file:  # noqa: ASYNC230  no disk is behind it
        unit = unit_of(file.read())
    if unit is None:
        return False
    command = [find_program("systemctl"), "list-jobs", "--no-legend", "--plain", unit]
    try:
        with trio.fail_after(QUESTION_SECONDS):
            answer = await trio.run_process(
                command, capture_stdout=True, stderr=subprocess.DEVNULL, cwd="/", env=program_environment()
            )
    except (OSError, subprocess.CalledProcessError, trio.TooSlowError) as error:
        log.warning("service_manager_not_asked", error=str(error) or type(error).__name__)
        return False
    return job_type(answer.stdout.decode(errors="replace"), unit) in ("restart", "try-restart")


def job_type(listing: str, unit: str) -> str:
    """The type of the unit's job in the output of ``systemctl list-jobs``; empty without one."""
    for line in listing.splitlines():
        fields = line.split()
        if len(fields) >= 3 and fields[1] == unit:
            return fields[2]
    return ""
