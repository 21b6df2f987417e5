"""When a session polls, against a simulated machine."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ciuic.fuse_layer.busy_poll import LEAST_PER_TICK, MOST_WAITING, BusyPoll, processor_pressure

_TICK_SECONDS = 0.003


class Machine:
    """So many requests a second are answered asleep, and so many polling; tasks wait for a share of the time."""

    def __init__(self, asleep: float, polling: float, waiting: float = 0.0) -> None:
        self.rates = (asleep, polling)
        self.waiting = waiting
        self.waited_seconds = 0.0
        self.poll = BusyPoll(waiting_seconds=lambda: self.waited_seconds)
        self.now = 0.0
        self.requests = 0.0

    def run(self, seconds: float) -> float:
        """Share of the time in which it polled."""
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
def test_it_polls_where_more_is_carried_out(asleep: float, gain: float) -> None:
    """Nearly always when that pays, and again at once after a pause."""
    machine = Machine(asleep, asleep * gain)
    assert machine.run(10) > 0.95
    machine.poll.stop()
    machine.now += 1
    assert machine.run(0.1) > 0.8


@given(asleep=st.floats(5000, 50_000), loss=st.floats(0.3, 1.0))
def test_it_sleeps_where_polling_does_not_pay(asleep: float, loss: float) -> None:
    """A few windows are spent on trying, ever more seldom."""
    assert Machine(asleep, asleep * loss).run(60) < 0.02


@given(waiting=st.floats(2 * MOST_WAITING, 1))
def test_it_takes_no_processor_that_another_task_waits_for(waiting: float) -> None:
    """However much it would gain by it."""
    assert Machine(10_000, 50_000, waiting).run(60) < 0.02


def test_it_stops_when_processors_are_wanted() -> None:
    """Within two windows."""
    machine = Machine(10_000, 30_000)
    machine.run(5)
    assert machine.poll.on
    machine.waiting = 0.5
    assert machine.run(10) < 0.01


@given(st.lists(st.integers(0, 2 * LEAST_PER_TICK)), st.booleans())
def test_it_never_polls_while_requests_are_few(ticks: list[int], known: bool) -> None:
    """Nor where the kernel does not say whether somebody waits."""
    poll = BusyPoll(waiting_seconds=lambda: 0.0 if known else None)
    requests = 0
    for number, came in enumerate(ticks):
        requests += came
        poll.tick(number * 0.02, requests)
        assert not poll.on or (came >= LEAST_PER_TICK and known)


def test_the_kernel_is_understood() -> None:
    """Seconds that only grow, or nothing at all where there is no such file."""
    first = processor_pressure()
    assert (first is not None) == Path("/proc/pressure/cpu").exists()
    if first is not None:
        assert 0 < first <= (processor_pressure() or 0)
