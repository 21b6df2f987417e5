"""Where an operation of the core runs: at once on the event loop, or in a thread.

A thread hop costs more than most operations (about 50 µs against 10), and an operation that waits for a disk on the
event loop stops every other request. So: at once, unless it is known to be long, or a sealed epoch is pending (the
operation may first have to save what it changes), or operations have lately been found waiting. Guarantees: an
operation takes effect once, also when the gate turned it away on the event loop. For how long operations waited is known
(waits.py): of those in threads also while they do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import trio

from ciuic.fuse_layer.gate import GateHeld
from ciuic.fuse_layer.session_turns import Turns
from ciuic.fuse_layer.waits import WAITING_SECONDS, Waits

T = TypeVar("T")

SLOW_SECONDS = 0.02
"""An operation that took this long on the event loop has waited for a disk (or for a processor: then little is lost)."""
CAUTIOUS_SECONDS = 1.0
"""For so long afterwards operations run in threads."""
WATCH_SECONDS = 0.1
MAX_THREADS = 32
"""Of each stock. Changes held by a cut, reads from a slow disk and fsyncs must not use up each other's threads."""


class Pending(Protocol):
    """The part of the core that says whether a change may have to save old state first."""

    @property
    def pending(self) -> bool: ...


class Dispatch:
    """Runs operations of ``core``; to be used on one event loop only."""

    def __init__(self, core: Pending, clock: Callable[[], float] = time.perf_counter) -> None:
        self.turns = Turns()
        self.waits = Waits()
        self._core = core
        self._clock = clock
        self._cautious_until = -1.0
        self._in_threads: list[float] = []
        """Since when each operation is in its thread, or waits for one."""
        self._reading = trio.CapacityLimiter(MAX_THREADS)
        self._changing = trio.CapacityLimiter(MAX_THREADS)
        self._syncing = trio.CapacityLimiter(MAX_THREADS)

    async def read(self, operation: Callable[..., T], *args: Any) -> T:
        """An operation that changes nothing and is short unless it waits for a disk."""
        now = self._clock()
        if now < self._cautious_until:
            return await self.long_read(operation, *args)
        try:
            return operation(*args)
        finally:
            self._note(now)

    async def change(self, operation: Callable[..., T], *args: Any) -> T:
        """An operation that changes something and is short unless it waits or has to save old state."""
        now = self._clock()
        if self._core.pending or now < self._cautious_until:
            return await self.long_change(operation, *args)
        try:
            return operation(*args)
        except GateHeld:
            pass  # nothing has happened yet; the thread below waits for the end of the hold
        finally:
            self._note(now)
        return await self.long_change(operation, *args)

    async def long_read(self, operation: Callable[..., T], *args: Any) -> T:
        """A read that is known to wait: always in a thread."""
        return await self._in_thread(operation, args, self._reading)

    async def long_change(self, operation: Callable[..., T], *args: Any) -> T:
        """A change that is known to be long: always in a thread."""
        return await self._in_thread(operation, args, self._changing)

    async def sync(self, operation: Callable[..., T], *args: Any) -> T:
        """An operation that waits until data is durable: always in a thread, of a stock of its own."""
        return await self._in_thread(operation, args, self._syncing)

    async def pause(self) -> None:
        """A chance for other requests in the middle of a long one."""
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
        began = self._clock()
        self._in_threads.append(began)
        try:
            return await trio.to_thread.run_sync(operation, *args, limiter=limiter)
        finally:
            self._in_threads.remove(began)
            self.waits.lasted(began, self._clock())
            self.turns.waiting -= 1

    async def watch(self) -> None:
        """Runs for as long as requests are served: what waits is told of before it has ended."""
        while True:
            await trio.sleep(WATCH_SECONDS)
            if self._in_threads:
                self.waits.lasted(self._in_threads[0], self._clock())

    def _note(self, started: float) -> None:
        now = self._clock()
        if now - started > WAITING_SECONDS:
            self.waits.lasted(started, now)
            if now - started > SLOW_SECONDS:
                self._cautious_until = now + CAUTIOUS_SECONDS
