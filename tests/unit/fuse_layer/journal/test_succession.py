"""Tests of when a successor is started and when no more, the same for daemon and keeper."""

from __future__ import annotations

import signal

from ciuic.fuse_layer.journal.succession import (
    STABLE_SECONDS,
    SUCCESSION_SECONDS,
    counted_deaths,
    pause_seconds,
)


def test_a_sigkill_does_not_count_as_a_failure_of_the_worker() -> None:
    """SIGKILL leaves the count of failures as it is; a crash, an error and an unknown end raise it."""
    assert counted_deaths(3, -signal.SIGKILL, 0.1) == 3
    assert [counted_deaths(3, status, 0.1) for status in (-signal.SIGSEGV, 1, None)] == [4, 4, 4]


def test_a_long_life_ends_the_row() -> None:
    """A death after a long life counts as the first again."""
    assert counted_deaths(7, 1, STABLE_SECONDS) == 1
    assert counted_deaths(7, -signal.SIGKILL, STABLE_SECONDS) == 0


def test_pauses_grow_until_the_session_is_given_up() -> None:
    """The first restarts are immediate, as the job waits; then pauses grow until the session is given up."""
    pauses = [pause_seconds(deaths) for deaths in range(len(SUCCESSION_SECONDS) + 2)]
    assert pauses[:3] == [0.0, 0.0, 0.0]
    assert pauses[1:-1] == list(SUCCESSION_SECONDS)
    assert pauses[-1] is None
