"""Busy polling for the next request, while that makes requests faster.

A program that waits for each answer sends its next request some ten microseconds after it. A server that
sleeps meanwhile has to be woken on a processor that went to sleep with it, which takes longer than the
request: with busy polling as many again were carried out on a virtual machine with idle processors (a create
and a write of a small file 2,930 and 4,870 in a second, open and read 6,400 and 9,200, stat 16,300 and
24,300; two sessions by turns).

Guarantees: nothing is polled unless requests come fast, processors are idle (no task of the host waits for
one), and more requests are carried out with polling than without, which is measured anew every few seconds.
One poll takes ``POLL_SECONDS`` at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

# A program that waits for each answer sends its next request some ten microseconds after it.
POLL_SECONDS: Final = 0.0001
# Five looks of the session's watch (WATCH_SECONDS of kernel/session.py).
WINDOW_SECONDS: Final = 0.015
MIN_REQUESTS_PER_TICK: Final = 4
"""Requests between two ticks below which nothing is polled: such programs work between requests, and gain
nothing."""
MAX_PRESSURE_SHARE: Final = 0.3
"""Limit of the share of time in which some task of the host waits for a processor: above it none is ours to
waste.

The job and the worker wait for each other a little; where each processor has a task that computes, the share
is near 1.
"""
_MIN_GAIN: Final = 1.1
"""Requests with polling, as a multiple of those without, from which on polling pays."""
_RECHECK_SECONDS: Final = 3.0
"""Time after which polling that paid is measured again."""
_MIN_PATIENCE_SECONDS: Final = 0.25
_MAX_PATIENCE_SECONDS: Final = 2.0
"""Pause after polling that did not pay, doubled each time: it depends on where the scheduler puts job and
worker, which changes by the second."""


class BusyPoll:
    """Decision whether a session polls.

    ``tick`` and ``stop`` are called by one thread; any thread may read ``on``.
    """

    def __init__(self, *, waiting_seconds: Callable[[], float | None] | None = None) -> None:
        self._waiting_seconds = waiting_seconds or processor_pressure
        self.on = False
        """True while requests are polled for instead of waited for."""
        self._requests = 0
        self._window: tuple[float, int, float] | None = None
        """Start of the running window, and the requests and the seconds of processor pressure until then."""
        self._rate_asleep = 0.0
        self._pays_until = 0.0
        """Time until which polling counts as paying; 0 where it has not been measured."""
        self._again_at = 0.0
        self._patience_seconds = _MIN_PATIENCE_SECONDS

    def tick(self, now: float, requests: int) -> None:
        """Decide anew, every few milliseconds while there are requests; ``requests`` is their count so far.

        Never raises.
        """
        came, self._requests = requests - self._requests, requests
        if came < MIN_REQUESTS_PER_TICK:
            self.stop()
            return
        if self._window is not None and now - self._window[0] < WINDOW_SECONDS:
            return
        # Without pressure figures nothing is polled: busy processors could not be told from idle ones.
        waited = self._waiting_seconds()
        if waited is None:
            return
        window, self._window = self._window, (now, requests, waited)
        if window is None:
            self.on = now < self._pays_until
            return
        seconds = now - window[0]
        self._judge(
            now, (requests - window[1]) / seconds, busy=waited - window[2] > MAX_PRESSURE_SHARE * seconds
        )

    def stop(self) -> None:
        """Stop polling, because requests have become few."""
        self.on = False
        self._window = None

    def _judge(self, now: float, rate: float, *, busy: bool) -> None:
        if busy:
            self.on, self._pays_until = False, 0.0
        elif not self.on:
            self._rate_asleep = rate
            self.on = now >= self._again_at
        elif rate < self._rate_asleep * _MIN_GAIN:
            self.on, self._pays_until = False, 0.0
            self._again_at = now + self._patience_seconds
            self._patience_seconds = min(2 * self._patience_seconds, _MAX_PATIENCE_SECONDS)
        elif not self._pays_until:
            self._patience_seconds = _MIN_PATIENCE_SECONDS
            self._pays_until = now + _RECHECK_SECONDS
        elif now >= self._pays_until:
            # One window without polling gives the rate to compare with.
            self._pays_until = 0.0
            self.on = False


def processor_pressure() -> float | None:
    """Return the seconds so far in which some task of the host waited for a processor; None where the kernel does not say.

    References:
        Documentation/accounting/psi.rst
    """
    try:
        with open("/proc/pressure/cpu", "rb") as file:
            return int(file.readline().rpartition(b"total=")[2]) / 1e6
    except (OSError, ValueError):
        return None
