"""Two simulated weeks of hourly snapshots and nightly prunes; `make torture` simulates a year."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from support.long_life import live

_DAYS = 14


def test_two_weeks_keep_size_descriptors_and_content(
    record_testsuite_property: Callable[[str, object], None],
) -> None:
    """Two weeks of tracked captures and prunes keep size, descriptors and content as they should be.

    Every hour is captured from tracking alone, retention keeps what it should, the store stays about as large
    as what is kept needs, no descriptor is lost, and every kept snapshot reads as the root was at its cut.
    """
    gc.collect()
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="ciuic-life-", dir=place) as top:
        life = live(Path(top), 24 * _DAYS, seed=3)
    assert life.failures == []
    assert life.snapshots == 24 * _DAYS
    assert life.verified == life.compared == life.days[-1].kept
    assert life.snapshots - life.pruned == life.days[-1].kept < 24 * 3
    # Fewer descriptors may be open than at first: the collector may have closed those of other tests.
    assert max(day.descriptors for day in life.days) == life.days[0].descriptors
    assert life.excess() < 1.3
    record_testsuite_property("simulated snapshots", life.snapshots)
