"""Putting what runs beside the job into ciuic-capture.slice, where systemd runs the machine.

Our own control group cannot have a low weight: the overlay workers are in it, and they serve the job. So captures and
upkeep are started through `systemd-run --scope`, which joins the slice and then becomes the command (same pid, same
descriptors). Guarantees: it is used only after a trial showed exactly that; elsewhere commands run as they are.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

import structlog

from ciuic.child_process import find_program, program_environment

SLICE = "ciuic-capture.slice"
TRIAL_SECONDS = 10.0
log = structlog.get_logger(__name__)


def slice_prefix(environment: Mapping[str, str], *, systemd_run: str = "") -> tuple[str, ...]:
    """What to put before a command; empty where we are no systemd service or the trial failed. Blocks for the trial."""
    if "INVOCATION_ID" not in environment:
        return ()
    prefix = (
        systemd_run or find_program("systemd-run"),
        "--scope",
        "--quiet",
        "--collect",
        f"--slice={SLICE}",
        "--",
    )
    reason = _try(prefix)
    if reason:
        log.warning("capture_slice_not_used", reason=reason)
        return ()
    return prefix


def _try(prefix: Sequence[str]) -> str:
    """Why the prefix does not do what it must; empty when it does."""
    read_end, write_end = os.pipe()
    os.close(write_end)
    try:
        process = subprocess.Popen(
            [*prefix, "/bin/sh", "-c", f"echo $$; test -e /proc/self/fd/{read_end}"],
            pass_fds=(read_end,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            cwd="/",
            env=program_environment(),
        )
    except OSError as error:
        return f"{prefix[0]} cannot be run: {error.strerror}"
    finally:
        os.close(read_end)
    try:
        said, complaint = process.communicate(timeout=TRIAL_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"{prefix[0]} did not answer"
    if said.strip() != str(process.pid).encode():
        return f"{prefix[0]} does not become the command: {complaint.decode(errors='replace').strip()[:200]}"
    return "" if process.returncode == 0 else f"{prefix[0]} does not pass descriptors on"
