"""Priority of the processes that work beside the job: captures and upkeep.

A capture or upkeep process raises its own priority as its deadline nears (urgency_channel.py). The daemon
does the same from outside, because it is permitted to where the process is not (without RLIMIT_NICE raising
takes CAP_SYS_NICE, which captures give up), and because a process that gets no processor time cannot raise
itself. The daemon also passes on changes of the urgency: a configuration that was read again, a caller that
waits.

Guarantees: an urgency is sent within a second of its change, at once after `wake`; the weight of the slice
follows the least share and is minimal while nothing runs. Nothing here fails: a process whose priority cannot
be raised goes on as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import structlog
import trio

from ciuic.daemon.base.wakeup import Wakeup
from ciuic.daemon.roots.systemd_slice import SliceWeight
from ciuic.system.precedence import IoPriority, place
from ciuic.system.urgency import Urgency

# Pause between two rounds: a deadline of five minutes changes the nice value every fifteen seconds.
PERIOD_SECONDS = 1.0
log = structlog.get_logger(__name__)


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
                with trio.move_on_after(PERIOD_SECONDS):
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
