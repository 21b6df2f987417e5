"""Whether to look for the next request for a moment before going to sleep over it.

A program that waits for each answer sends its next request some ten microseconds after it. A server that sleeps meanwhile
has to be woken on a processor that went to sleep with it, which takes longer than the request: with busy polling as many
again were carried out on a virtual machine with idle processors (a create and a write of a small file 2,930 and 4,870 in a
second, open and read 6,400 and 9,200, stat 16,300 and 24,300; two sessions by turns).

Guarantees: nothing is polled unless requests come fast, processors are idle (no task of the host waits for one), and more is
carried out in that way than without, which is measured anew every few seconds. A moment is ``POLL_SECONDS`` at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

POLL_SECONDS: Final = 0.0001
WINDOW_SECONDS: Final = 0.015
LEAST_PER_TICK: Final = 4
"""Requests. Who asks more seldom does other things meanwhile, and gains nothing worth the trouble."""
MOST_WAITING: Final = 0.3
"""Share of the time in which some task waits for a processor: above it they are not ours to waste. Ours wait for each other a
little; where each processor has a task that computes it is nearly all of the time."""
_PAYS: Final = 1.1
_RECHECK_SECONDS: Final = 3.0
_LEAST_PATIENCE_SECONDS: Final = 0.25
_MOST_PATIENCE_SECONDS: Final = 2.0
"""Whether it pays depends on where the scheduler happens to put the two, which changes by the second."""


class BusyPoll:
    """Of one session. ``tick`` is called every few milliseconds while there are requests, ``stop`` when there are none; both
    by the same thread. ``on`` is for all."""

    def __init__(self, *, waiting_seconds: Callable[[], float | None] | None = None) -> None:
        self._waiting_seconds = waiting_seconds or processor_pressure
        self.on = False
        """Whether to poll now."""
        self._requests = 0
        self._window: tuple[float, int, float] | None = None
        """Of the running window: when it began, and the requests and the seconds of waiting until then."""
        self._rate_asleep = 0.0
        self._pays_until = 0.0
        """Until then polling pays, as was measured."""
        self._again_at = 0.0
        self._patience_seconds = _LEAST_PATIENCE_SECONDS

    def tick(self, now: float, requests: int) -> None:
        """``requests``: so many were there ever. Never raises."""
        came, self._requests = requests - self._requests, requests
        if came < LEAST_PER_TICK:
            self.stop()
            return
        if self._window is not None and now - self._window[0] < WINDOW_SECONDS:
            return
        waited = self._waiting_seconds()
        if waited is None:
            return
        window, self._window = self._window, (now, requests, waited)
        if window is None:
            self.on = now < self._pays_until
            return
        seconds = now - window[0]
        self._judge(now, (requests - window[1]) / seconds, busy=waited - window[2] > MOST_WAITING * seconds)

    def stop(self) -> None:
        """Requests have become few."""
        self.on = False
        self._window = None

    def _judge(self, now: float, rate: float, *, busy: bool) -> None:
        if busy:
            self.on, self._pays_until = False, 0.0
        elif not self.on:
            self._rate_asleep = rate
            self.on = now >= self._again_at
        elif rate < self._rate_asleep * _PAYS:
            self.on, self._pays_until = False, 0.0
            self._again_at = now + self._patience_seconds
            self._patience_seconds = min(2 * self._patience_seconds, _MOST_PATIENCE_SECONDS)
        elif not self._pays_until:
            self._patience_seconds = _LEAST_PATIENCE_SECONDS
            self._pays_until = now + _RECHECK_SECONDS
        elif now >= self._pays_until:
            self._pays_until = 0.0
            self.on = False  # for one window


def processor_pressure() -> float | None:
    """Seconds, ever, in which some task of the host waited for a processor (Documentation/accounting/psi.rst); None where
    the kernel does not say."""
    try:
        with open("/proc/pressure/cpu", "rb") as file:
            return int(file.readline().rpartition(b"total=")[2]) / 1e6
    except (OSError, ValueError):
        return None
