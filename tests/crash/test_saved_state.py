"""Saved overlay state (undo log, sealed files, saved tracking) fails, tears or is lost at every durable call in turn: the job sees
nothing of it and the next snapshots are exact.
"""

from __future__ import annotations

import pytest
from support.faulty_os import IO_ERROR, NO_SPACE
from support.state_faults import survive

SEEDS = (2,)


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_at_every_call(seed: int) -> None:
    """The worker dies, or the power goes, at any durable call; the state may hold anything that was not synced. What is
    saved is used once at most, and the next snapshots are exact."""
    assert survive(seed, error=None)[0] > 20


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("error", "stay"), [(NO_SPACE, False), (NO_SPACE, True), (IO_ERROR, False)], ids=["once", "full", "io"]
)
def test_an_error_at_every_call(seed: int, error: int, stay: bool) -> None:
    """Any durable call fails, once or as long as the disk is full: the job's results and files are those of a run without the fault, a waiting
    epoch is captured exactly or given up, and the next snapshots are exact."""
    points, exact = survive(seed, error=error, stay=stay)
    assert points > 20
    assert exact > 0 or stay, "no epoch was ever captured: the test has proved little"
