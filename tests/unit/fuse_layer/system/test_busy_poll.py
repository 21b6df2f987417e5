"""Tests of when a session polls, on a simulated machine."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ciuic.fuse_layer.kernel.session import (
    MAX_PRESSURE_SHARE,
    MIN_REQUESTS_PER_TICK,
    BusyPoll,
    processor_pressure,
)

_TICK_SECONDS = 0.003


class Machine:
    """A machine with rates of requests answered asleep and polling, and tasks that wait to run."""

    def __init__(self, asleep: float, polling: float, waiting: float = 0.0) -> None:
        self.rates = (asleep, polling)
        self.waiting = waiting
        self.waited_seconds = 0.0
        self.poll = BusyPoll(waiting_seconds=lambda: self.waited_seconds)
        self.now = 0.0
        self.requests = 0.0

    def run(self, seconds: float) -> float:
        """Return the share of the time in which it polled."""
        ticks = round(seconds / _TICK_SECONDS)
        polled = 0
        for _ in range(ticks):
            polled += self.poll.on
            self.now += _TICK_SECONDS
            self.waited_seconds += self.waiting * _TICK_SECONDS
            self.requests += self.rates[self.poll.on] * _TICK_SECONDS
            self.poll.tick(self.now, int(self.requests))
        return polled / ticks


@given(asleep=st.floats(4000, 50_000), gain=st.floats(1.3, 5))
def test_polling_is_on_where_it_pays(asleep: float, gain: float) -> None:
    """Polling is on nearly always when it pays, and again at once after a pause."""
    machine = Machine(asleep, asleep * gain)
    assert machine.run(10) > 0.95
    machine.poll.stop()
    machine.now += 1
    assert machine.run(0.1) > 0.8


@given(asleep=st.floats(5000, 50_000), loss=st.floats(0.3, 1.0))
def test_polling_that_does_not_pay_becomes_rare(asleep: float, loss: float) -> None:
    """Polling that does not pay costs a few windows for trying, ever more rarely."""
    assert Machine(asleep, asleep * loss).run(60) < 0.02


@given(waiting=st.floats(2 * MAX_PRESSURE_SHARE, 1))
def test_polling_takes_no_processor_from_a_waiting_task(waiting: float) -> None:
    """Polling stops while another task waits for the processor, however much it would gain."""
    assert Machine(10_000, 50_000, waiting).run(60) < 0.02


def test_polling_stops_when_processors_are_wanted() -> None:
    """Polling stops within two windows once processors are wanted."""
    machine = Machine(10_000, 30_000)
    machine.run(5)
    assert machine.poll.on
    machine.waiting = 0.5
    assert machine.run(10) < 0.01


@given(st.lists(st.integers(0, 2 * MIN_REQUESTS_PER_TICK)), st.booleans())
def test_polling_is_off_while_requests_are_few(ticks: list[int], known: bool) -> None:
    """Polling is off while requests are few, and where the kernel has no figure of waiting tasks."""
    poll = BusyPoll(waiting_seconds=lambda: 0.0 if known else None)
    requests = 0
    for number, came in enumerate(ticks):
        requests += came
        poll.tick(number * 0.02, requests)
        assert not poll.on or (came >= MIN_REQUESTS_PER_TICK and known)


def test_the_kernel_is_understood() -> None:
    """The kernel's figure is in seconds that only grow, or missing where there is no such file."""
    first = processor_pressure()
    assert (first is not None) == Path("/proc/pressure/cpu").exists()
    if first is not None:
        assert 0 < first <= (processor_pressure() or 0)
