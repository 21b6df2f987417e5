"""Dispatch of requests on pyfuse3's event loop: which task reads the next one, and which thread carries it out.

A change of threads costs more than most operations (about 50 µs against 10), and an operation that waits for
a disk on the event loop stops every other request. So an operation runs on the loop, unless it is known to be
long, or a sealed epoch is pending (the operation may first have to save old state), or operations were found
waiting lately. Guarantees: an operation takes effect once, also when the gate refused it on the event loop.
The time that operations waited is counted (latency_gauge.py), of those in threads also while they run.

pyfuse3 lets tasks compete for a lock around "wait until readable". With trio's lock, which is handed on at
every release, each request costs two steps of the scheduler and two calls of epoll, more than most requests
themselves. Here a task that has answered a request at once keeps its turn, and looks for the next request
before it yields; the turn is handed on when a handler is about to wait (``hand_on``). Measured on a busy
machine, before and after: 12,000 and 46,000 stat/s, 3,000 and 12,000 open+read/s. pyfuse3 has a module attribute
for this very purpose (``pyfuse3.trio``, which pyfuse3.asyncio replaces likewise).

Guarantees: while no task reads, one that waits for its turn gets it: at once where ``hand_on`` is called,
within TURN_WATCH_SECONDS where it is not (a task that ended: the session is over, and the others must learn of
it). The loop's other work, timers and signals, waits for RUN_OF_TURNS requests at most, and for none while
handlers wait for threads.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from types import SimpleNamespace, TracebackType
from typing import Any, Protocol, TypeVar

import pyfuse3
import trio

from ciuic.fuse_layer.system.latency_gauge import WAITING_SECONDS, LatencyGauge
from ciuic.fuse_layer.tracking.gate import GateHeld

RUN_OF_TURNS = 64
TURN_WATCH_SECONDS = 0.2
_LOOK_SECONDS = 0.0001
"""Time for which a task looks for the next request: a program with one request after the other sends it
sooner."""
_SELECT_LIMIT = 1024
"""select(2) takes descriptors below this number only."""
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


class ReaderTurns:
    """The turn to read of one session.

    ``waiting`` is the number of handlers that wait for a thread or have paused.
    """

    def __init__(self) -> None:
        self.waiting = 0
        self._taken = False
        self._run = 0
        self._lot = trio.lowlevel.ParkingLot()

    def install(self) -> None:
        """Make pyfuse3 use these turns."""
        lowlevel = SimpleNamespace(
            current_task=trio.lowlevel.current_task,
            current_trio_token=trio.lowlevel.current_trio_token,
            wait_readable=self.wait_readable,
            notify_closing=self.notify_closing,
        )
        seen: Any = SimpleNamespace(
            Lock=lambda: self,
            open_nursery=trio.open_nursery,
            ClosedResourceError=trio.ClosedResourceError,
            lowlevel=lowlevel,
        )
        pyfuse3.trio = seen  # type: ignore[attr-defined]

    async def __aenter__(self) -> None:
        while self._taken:
            await self._lot.park()
        self._taken = True

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._taken = False

    def hand_on(self) -> None:
        """Let another task read, because the running one is about to wait for something else than its turn."""
        if not self._taken:
            self._lot.unpark()

    async def wait_readable(self, fd: int) -> None:
        """Wait until ``fd`` is readable."""
        # Not while handlers wait for threads: their results need the loop, which a look would hold up.
        if not self.waiting and self._run < RUN_OF_TURNS and fd < _SELECT_LIMIT:
            self._run += 1
            # Not poll(2), which rounds the time up to a millisecond, in which nothing else of the session
            # would run. The number is below the limit of select(2).
            if select.select([fd], [], [], _LOOK_SECONDS)[0]:  # noqa: TID251
                return
        self._run = 0
        await trio.lowlevel.wait_readable(fd)

    def notify_closing(self, fd: int) -> None:
        """Have every task look whether the session is over (pyfuse3.terminate)."""
        trio.lowlevel.notify_closing(fd)
        self._lot.unpark_all()

    async def watch(self) -> None:
        """Wake tasks while none reads, beside pyfuse3.main; see the module's guarantees."""
        while True:
            await trio.sleep(TURN_WATCH_SECONDS)
            if not self._taken:
                # Woken without a reader: a task that ended held the turn, and the others must learn that the
                # session is over.
                self._lot.unpark_all()


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
