"""Keeping what runs beside the job in the place that its terms give it.

A capture or upkeep rises by itself as its deadline nears (terms.py). The daemon does the same from outside, because it may where the
process may not (without RLIMIT_NICE raising takes CAP_SYS_NICE, which captures give up), and because a process that gets no
processor cannot raise itself. It also passes on terms that change: a configuration read again, somebody who waits.

Guarantees: terms are sent within a second of their change, at once after `wake`; the weight of the slice follows the least share and is
the least there is while nothing runs. Nothing here fails: what cannot be raised goes on where it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import structlog
import trio

from ciuic.daemon.slices import SliceWeight
from ciuic.ioprio import IoPriority
from ciuic.precedence import place
from ciuic.urgency import Urgency

PERIOD_SECONDS = 1.0
"""Between two looks: a deadline of five minutes changes the nice value every fifteen seconds."""
log = structlog.get_logger(__name__)


class Running(NamedTuple):
    """A process that works beside the job."""

    pid: int
    urgency: Urgency
    """Its terms as of now."""
    send: Callable[[Urgency], bool]
    """Send it new terms; whether that could be done."""


class Urging:
    """``run`` is its task; it belongs to the trio thread."""

    def __init__(
        self,
        sources: Sequence[Callable[[], Running | None]],
        io_priority: Callable[[], str],
        weight: SliceWeight | None = None,
    ) -> None:
        """``sources``: each tells what of it runs now; ``weight``: of the slice that all of it runs in."""
        self._sources = sources
        self._io_priority = io_priority
        self._weight = weight
        self._sent: dict[int, Urgency] = {}
        """By process number, what it was told last, as of the beginning."""
        self._wake = trio.Event()

    def wake(self) -> None:
        """Something has changed: look now."""
        self._wake.set()

    async def run(self) -> None:
        """For ever. Cancelled, it gives the slice its least weight back."""
        try:
            while True:
                with trio.move_on_after(PERIOD_SECONDS):
                    await self._wake.wait()
                self._wake = trio.Event()
                try:
                    share = self.once()
                except Exception:
                    log.exception("urging_failed")  # a defect costs a capture its place, not the service
                else:
                    await self._weigh(share)
        finally:
            with trio.CancelScope(shield=True):
                await self._weigh(0.0)

    def once(self) -> float:
        """Look at everything that runs; return the largest least share, 0 where nothing does."""
        running = [found for source in self._sources if (found := source()) is not None]
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
            place(
                one.pid,
                one.urgency.least_share(0),
                io_priority,
                min_nice=os.getpriority(os.PRIO_PROCESS, 0),
            )
        return max((one.urgency.least_share(0) for one in running), default=0.0)

    async def _weigh(self, share: float) -> None:
        if self._weight is not None:
            await self._weight.set(share)
