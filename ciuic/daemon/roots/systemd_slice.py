"""Start captures and upkeep in ciuic-capture.slice, on hosts with systemd.

The daemon's own control group cannot have a low weight: the overlay workers are in it, and they serve the
job. So captures and upkeep are started through `systemd-run --scope`, which joins the slice and then becomes
the command (same pid, same descriptors). Guarantees: it is used only after a trial showed exactly that;
elsewhere commands run as they are.
"""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Mapping, Sequence

import structlog
import trio

from ciuic.system.child_process import find_program, program_environment

SLICE = "ciuic-capture.slice"
# The daemon waits for the trial at its start.
TRIAL_SECONDS = 10.0
# Weight of an ordinary service, which the slice gets for work with the whole share; its unit file has 1.
MAX_WEIGHT = 100
# Time limit of systemctl: a weight is not worth a longer wait.
_SET_SECONDS = 10.0
log = structlog.get_logger(__name__)


def slice_prefix(environment: Mapping[str, str], *, systemd_run: str = "") -> tuple[str, ...]:
    """Return the words to put before a command; none where this is no systemd service or the trial failed.

    Blocks for the trial.
    """
    if "INVOCATION_ID" not in environment:
        return ()
    prefix = (
        systemd_run or find_program("systemd-run"),
        "--scope",
        "--quiet",
        # A scope that failed is removed too, and does not pile up in systemd.
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
    """Try the prefix, and return why it cannot be used; empty when it can."""
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
    # The command must be the very process that was started: captures are known by their pid, and get signals
    # there.
    if said.strip() != str(process.pid).encode():
        return f"{prefix[0]} does not become the command: {complaint.decode(errors='replace').strip()[:200]}"
    return "" if process.returncode == 0 else f"{prefix[0]} does not pass descriptors on"


class SliceWeight:
    """Processor and disk weight of the slice, changed while it runs (`systemctl set-property --runtime`).

    A nice value counts within the slice only: with the least weight a capture at nice 0 would still starve.
    """

    def __init__(self, *, systemctl: str = "") -> None:
        self._systemctl = systemctl or find_program("systemctl")
        # Weight that was set last; 0: not known, because a killed daemon may have set it.
        self._weight = 0

    async def set(self, share: float) -> None:
        """Give the slice this share of an ordinary service's weight, rounded to powers of two."""
        # Few different weights, because each call of systemctl takes 10 ms of a processor.
        weight = weight_of(share)
        if weight == self._weight:
            return
        # Remembered also if it cannot be set: `PriorityControl` asks every second, and each try takes 10 ms.
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
