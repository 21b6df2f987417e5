"""Putting what runs beside the job into ciuic-capture.slice, where systemd runs the machine.

Our own control group cannot have a low weight: the overlay workers are in it, and they serve the job. So captures and
upkeep are started through `systemd-run --scope`, which joins the slice and then becomes the command (same pid, same
descriptors). Guarantees: it is used only after a trial showed exactly that; elsewhere commands run as they are.
"""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Mapping, Sequence

import structlog
import trio

from ciuic.child_process import find_program, program_environment

SLICE = "ciuic-capture.slice"
TRIAL_SECONDS = 10.0
MAX_WEIGHT = 100
"""Weight of an ordinary service, which the slice has for work with the whole share; its unit file has 1."""
_SET_SECONDS = 10.0
"""For systemctl to answer: a weight is not worth more."""
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


class SliceWeight:
    """Weights of the slice for processor and disk, changed while it runs (`systemctl set-property --runtime`).

    A nice value counts within the slice alone: with the least weight a capture at nice 0 would starve all the same.
    """

    def __init__(self, *, systemctl: str = "") -> None:
        self._systemctl = systemctl or find_program("systemctl")
        self._weight = 0
        """0: not known, as a daemon that was killed has left it."""

    async def set(self, share: float) -> None:
        """Give the slice this share of an ordinary service's weight, in steps of two: systemctl takes 10 ms of a processor."""
        weight = weight_of(share)
        if weight == self._weight:
            return
        self._weight = weight
        command = [
            self._systemctl,
            "set-property",
            "--runtime",
            SLICE,
            f"CPUWeight={weight}",
            f"IOWeight={weight}",
        ]
        try:
            with trio.fail_after(_SET_SECONDS):
                done = await trio.run_process(
                    command,
                    stdin=subprocess.DEVNULL,
                    capture_stdout=True,
                    capture_stderr=True,
                    check=False,
                    cwd="/",
                    env=program_environment(),
                )
        except (OSError, trio.TooSlowError) as error:
            log.warning("slice_weight_not_set", weight=weight, error=str(error) or "no answer")
            return
        if done.returncode:
            complaint = done.stderr.decode(errors="replace").strip()[:200]
            log.warning("slice_weight_not_set", weight=weight, error=complaint)


def weight_of(share: float) -> int:
    """Return the weight for a share: 1, 2, 4 … up to MAX_WEIGHT."""
    if share * MAX_WEIGHT < 1:
        return 1
    return min(MAX_WEIGHT, 1 << math.ceil(math.log2(share * MAX_WEIGHT)))
