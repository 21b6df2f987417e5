"""Signals and notices that come while another one is pending."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from ciuic.training.preemption import BeforePreemption, PreemptionWatch
from ciuic.training.remote.copies import UploadBeforeEnd


class Host:
    """A `PreemptionHost` that can stage at boundaries alone, and notes what it was asked."""

    def __init__(self) -> None:
        self.staged: list[str] = []
        self.wait_seconds: list[float] = []
        self.while_staging = 0
        self.announced: list[str] = []

    def is_ours(self) -> bool:
        return True

    def process_messages(self) -> None:
        pass

    def can_stage_now(self) -> bool:
        return False

    def estimate_seconds(self) -> float | None:
        return None

    def stage_last(self, reason: str, *, at_boundary: bool) -> bool:
        self.staged.append(reason)
        if self.while_staging:
            os.kill(os.getpid(), self.while_staging)
            # A bytecode at which the handler runs.
            signal.getsignal(self.while_staging)
        return True

    def ends(self) -> None:
        pass

    def wait_durable(self, seconds: float) -> str | None:
        self.wait_seconds.append(seconds)
        return "id"

    def announce_end(self, cause: str, seconds: float) -> None:
        self.announced.append(cause)

    def wait_remote(self, seconds: float) -> tuple[UploadBeforeEnd, ...]:
        return ()


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """Give SIGUSR1 a handler of the program and the other signals the default action."""
    numbers: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    for number in before:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, lambda number, _: numbers.append(number))
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


def _send(number: int) -> None:
    os.kill(os.getpid(), number)
    signal.getsignal(number)


@pytest.mark.parametrize("certain", [True, False])
@pytest.mark.parametrize("order", ["notice first", "signal first", "while staging"])
def test_a_signal_ends_the_program_with_a_notice_pending(
    handled: list[int], certain: bool, order: str
) -> None:
    """SIGTERM with a later deadline than the notice ends the program, within the time of the notice."""
    host = Host()
    watch = PreemptionWatch(BeforePreemption(grace_seconds=300), host)
    watch.install()
    try:
        if order == "signal first":
            _send(signal.SIGTERM)
        watch.notified("AWS", 120, certain=certain)
        if order == "notice first":
            _send(signal.SIGTERM)
        elif order == "while staging":
            host.while_staging = signal.SIGTERM
        with pytest.raises(SystemExit) as ended:
            watch.at_boundary()
    finally:
        watch.remove()
    assert ended.value.code == 128 + signal.SIGTERM
    assert len(host.staged) == 1
    assert len(host.wait_seconds) == 1
    assert 100 < host.wait_seconds[0] < 120
    # The processes that upload hear of each certain end.
    assert "SIGTERM" in host.announced
    assert not watch.is_pending


@pytest.mark.parametrize("numbers", [(signal.SIGUSR1, signal.SIGTERM), (signal.SIGTERM, signal.SIGUSR1)])
def test_two_signals_are_both_answered(handled: list[int], numbers: tuple[int, int]) -> None:
    """The handler of one is called, and the other, which has none, ends the program."""
    watch = PreemptionWatch(BeforePreemption(grace_seconds=300), Host())
    watch.install()
    try:
        for number in numbers:
            _send(number)
        with pytest.raises(SystemExit) as ended:
            watch.at_boundary()
    finally:
        watch.remove()
    assert ended.value.code == 128 + signal.SIGTERM
    assert handled == [signal.SIGUSR1]


def test_a_notice_alone_does_not_end_the_program(handled: list[int]) -> None:
    """The program goes on after the snapshot, and a later SIGTERM leads to another one."""
    host = Host()
    watch = PreemptionWatch(BeforePreemption(grace_seconds=300), host)
    watch.install()
    try:
        watch.notified("AWS", 120, certain=True)
        watch.notified("AWS again", 100, certain=False)
        watch.at_boundary()
        assert not watch.is_pending
        _send(signal.SIGTERM)
        with pytest.raises(SystemExit):
            watch.at_boundary()
    finally:
        watch.remove()
    assert host.staged == ["AWS", "SIGTERM"]


def test_a_rank_that_was_told_of_a_notice_ends_with_one_that_got_a_signal() -> None:
    """The signal of another rank is not dropped for the earlier deadline of the own notice."""
    host = Host()
    watch = PreemptionWatch(BeforePreemption(grace_seconds=300), host)
    watch.notified("AWS", 120, certain=True)
    assert watch.code == 1
    watch.receive_code(1 + signal.SIGTERM, 300)
    assert watch.code == 1 + signal.SIGTERM
    watch.remove()
    assert not watch.is_pending
