"""Priority of the processes that work beside the job, captures and upkeep, and the systemd slice that they run in.

A capture or upkeep process raises its own priority as its deadline nears (child_processes.py). The daemon
does the same from outside, because it is permitted to where the process is not (without RLIMIT_NICE raising
takes CAP_SYS_NICE, which captures give up), and because a process that gets no processor time cannot raise
itself. The daemon also passes on changes of the urgency: a configuration that was read again, a caller that
waits.

On hosts with systemd the processes run in ciuic-capture.slice. The daemon's own control group cannot have a
low weight: the overlay workers are in it, and they serve the job. So captures and upkeep are started through
`systemd-run --scope`, which joins the slice and then becomes the command (same pid, same descriptors). It is
used only after a trial showed exactly that; elsewhere commands run as they are.

Guarantees: an urgency is sent within a second of its change, at once after `wake`; the weight of the slice
follows the least share and is minimal while nothing runs. Nothing here fails: a process whose priority cannot
be raised goes on as it is.
"""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import structlog
import trio

from ciuic.daemon.base.events import Wakeup
from ciuic.system.child_process import find_program, program_environment
from ciuic.system.precedence import IoPriority, place
from ciuic.system.urgency import Urgency

SLICE = "ciuic-capture.slice"
# The daemon waits for the trial at its start.
_TRIAL_SECONDS = 10.0
# Weight of an ordinary service, which the slice gets for work with the whole share; its unit file has 1.
MAX_WEIGHT = 100
# Time limit of systemctl: a weight is not worth a longer wait.
_SET_SECONDS = 10.0
# Pause between two rounds: a deadline of five minutes changes the nice value every fifteen seconds.
_PERIOD_SECONDS = 1.0
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
        said, complaint = process.communicate(timeout=_TRIAL_SECONDS)
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


class RunningProcess(NamedTuple):
    """A capture or upkeep process."""

    pid: int
    urgency: Urgency
    """Urgency as of now."""
    send: Callable[[Urgency], bool]
    """Sends the process an urgency; returns whether it could be sent."""


class PriorityControl:
    """Adjusts the priority of running processes. `run` is its task; belongs to the trio thread."""

    def __init__(
        self,
        sources: Sequence[Callable[[], RunningProcess | None]],
        io_priority: Callable[[], str],
        weight: SliceWeight | None = None,
        wakeup: Wakeup | None = None,
    ) -> None:
        """Prepare to adjust.

        Args:
            sources: each returns the process of one kind that runs now.
            io_priority: configured I/O priority.
            weight: weight of the systemd slice that the processes run in; None without systemd.
            wakeup: set when an urgency may have changed.
        """
        self._sources = sources
        self._io_priority = io_priority
        self._weight = weight
        # Urgency that each process was sent last, without the elapsed time, by pid.
        self._sent: dict[int, Urgency] = {}
        self._wakeup = wakeup or Wakeup()

    def wake(self) -> None:
        """Start a round now: an urgency may have changed."""
        self._wakeup.set()

    async def run(self) -> None:
        """Adjust priorities, until cancelled; then give the slice its least weight."""
        try:
            while True:
                with trio.move_on_after(_PERIOD_SECONDS):
                    await self._wakeup.wait()
                try:
                    share = self.once()
                except Exception:
                    # A defect here costs a capture its priority, and must not end the service.
                    log.exception("urging_failed")
                else:
                    await self._weigh(share)
        finally:
            with trio.CancelScope(shield=True):
                await self._weigh(0.0)

    def once(self) -> float:
        """Adjust every running process, and return the largest least share; 0 where nothing runs."""
        running = [found for source in self._sources if (found := source()) is not None]
        # Without the processes that have ended: their pids are given to others.
        self._sent = {one.pid: self._sent[one.pid] for one in running if one.pid in self._sent}
        io_priority = IoPriority.parse(self._io_priority())
        for one in running:
            terms = Urgency(
                min_share=one.urgency.min_share,
                finish_within_seconds=one.urgency.finish_within_seconds,
                requested=one.urgency.requested,
            )
            if self._sent.get(one.pid) != terms and one.send(one.urgency):
                self._sent[one.pid] = terms
            # Nice value and autogroup both, always the same: the session's autogroup counts between sessions,
            # and the nice value only within one. Beside eight computing processes, nice 0 with autogroup 19
            # got 0.3 % of a processor, and autogroup 0 got 18 % (docs/decisions/deadlines.md).
            place(
                one.pid,
                one.urgency.least_share(0),
                io_priority,
                # Never above the daemon itself.
                min_nice=os.getpriority(os.PRIO_PROCESS, 0),
            )
        return max((one.urgency.least_share(0) for one in running), default=0.0)

    async def _weigh(self, share: float) -> None:
        if self._weight is not None:
            await self._weight.set(share)
