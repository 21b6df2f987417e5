"""Saved overlay state with a failed, torn or lost write at every durable call in turn.

The job sees no error, and the next snapshots are exact.
"""

from __future__ import annotations

import pytest
from support.faulty_os import IO_ERROR, NO_SPACE, survive

SEEDS = (2,)


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_at_every_call(seed: int) -> None:
    """The worker's death or a power cut at any durable call leaves the next snapshots exact.

    The state may hold anything that was not synced. Saved tracking is used once at most.
    """
    assert survive(seed, error=None)[0] > 20


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("error", "stay"),
    [
        pytest.param(NO_SPACE, False, id="once"),
        pytest.param(NO_SPACE, True, id="full", marks=pytest.mark.full),
        pytest.param(IO_ERROR, False, id="io", marks=pytest.mark.full),
    ],
)
def test_an_error_at_every_call(seed: int, error: int, stay: bool) -> None:
    """An error at any durable call, once or for as long as the disk is full, changes no result of the job.

    A pending epoch is captured exactly or abandoned, and the next snapshots are exact.
    """
    points, exact = survive(seed, error=error, stay=stay)
    assert points > 20
    assert exact > 0 or stay, "no epoch was ever captured: the test has proved little"
