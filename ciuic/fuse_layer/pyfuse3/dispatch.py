"""Dispatch of the core's operations: on the event loop, or in a thread.

A change of threads costs more than most operations (about 50 µs against 10), and an operation that waits for
a disk on the event loop stops every other request. So an operation runs on the loop, unless it is known to be
long, or a sealed epoch is pending (the operation may first have to save old state), or operations were found
waiting lately. Guarantees: an operation takes effect once, also when the gate refused it on the event loop.
The time that operations waited is counted (latency_gauge.py), of those in threads also while they run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import trio

from ciuic.fuse_layer.pyfuse3.reader_turns import ReaderTurns
from ciuic.fuse_layer.system.latency_gauge import WAITING_SECONDS, LatencyGauge
from ciuic.fuse_layer.tracking.gate import GateHeld

T = TypeVar("T")

SLOW_SECONDS = 0.02
"""Duration from which on an operation has waited for a disk (or for a processor: then little is lost)."""
CAUTIOUS_SECONDS = 1.0
"""Time after such an operation in which operations run in threads."""
WATCH_SECONDS = 0.1
"""Interval at which waiting operations in threads are counted."""
MAX_THREADS = 32
"""Limit of each pool. Changes held by a cut, reads from a slow disk and fsyncs must not use up each other's
threads."""


class Pending(Protocol):
    """The part of the core that says whether a change may have to save old state first."""

    @property
    def pending(self) -> bool:
        """True if a sealed epoch awaits its capture."""


class Dispatch:
    """Dispatcher of operations of ``core``; to be used on one event loop only."""

    def __init__(self, core: Pending, clock: Callable[[], float] = time.perf_counter) -> None:
        self.turns = ReaderTurns()
        self.latency = LatencyGauge()
        self._core = core
        self._clock = clock
        self._cautious_until = -1.0
        self._in_threads: list[float] = []
        """Times since which operations are in a thread, or wait for one."""
        # Three pools, because requests of one kind must not use up the threads of another: changes that wait
        # for a cut, reads of a slow disk, and fsyncs of seconds go on independently.
        self._reading = trio.CapacityLimiter(MAX_THREADS)
        self._changing = trio.CapacityLimiter(MAX_THREADS)
        self._syncing = trio.CapacityLimiter(MAX_THREADS)

    async def read(self, operation: Callable[..., T], *args: Any) -> T:
        """Run an operation that changes nothing and is short unless it waits for a disk."""
        now = self._clock()
        if now < self._cautious_until:
            return await self.long_read(operation, *args)
        try:
            return operation(*args)
        finally:
            self._note(now)

    async def change(self, operation: Callable[..., T], *args: Any) -> T:
        """Run an operation that changes something and is short unless it waits or has to save old state."""
        now = self._clock()
        # While an epoch awaits its capture a change may copy old blocks first, which must not stop the loop.
        if self._core.pending or now < self._cautious_until:
            return await self.long_change(operation, *args)
        try:
            return operation(*args)
        except GateHeld:
            # Nothing has happened yet. The thread below waits for the end of the hold.
            pass
        finally:
            self._note(now)
        return await self.long_change(operation, *args)

    async def long_read(self, operation: Callable[..., T], *args: Any) -> T:
        """Run a read that is known to wait, always in a thread."""
        return await self._in_thread(operation, args, self._reading)

    async def long_change(self, operation: Callable[..., T], *args: Any) -> T:
        """Run a change that is known to be long, always in a thread."""
        return await self._in_thread(operation, args, self._changing)

    async def sync(self, operation: Callable[..., T], *args: Any) -> T:
        """Run an operation that waits until data is durable, always in a thread of a pool of its own."""
        return await self._in_thread(operation, args, self._syncing)

    async def pause(self) -> None:
        """Let other requests run in the middle of a long one."""
        self.turns.waiting += 1
        self.turns.hand_on()
        try:
            await trio.lowlevel.checkpoint()
        finally:
            self.turns.waiting -= 1

    async def _in_thread(
        self, operation: Callable[..., T], args: tuple[Any, ...], limiter: trio.CapacityLimiter
    ) -> T:
        self.turns.waiting += 1
        self.turns.hand_on()
        # The turn is handed on before the wait: otherwise the mount would be unread for up to 0.2 s.
        began = self._clock()
        self._in_threads.append(began)
        try:
            return await trio.to_thread.run_sync(operation, *args, limiter=limiter)
        finally:
            self._in_threads.remove(began)
            self.latency.lasted(began, self._clock())
            self.turns.waiting -= 1

    async def watch(self) -> None:
        """Count operations in threads as waiting before they have ended, for as long as requests are served."""
        while True:
            await trio.sleep(WATCH_SECONDS)
            if self._in_threads:
                self.latency.lasted(self._in_threads[0], self._clock())

    def _note(self, started: float) -> None:
        now = self._clock()
        if now - started > WAITING_SECONDS:
            self.latency.lasted(started, now)
            if now - started > SLOW_SECONDS:
                self._cautious_until = now + CAUTIOUS_SECONDS
