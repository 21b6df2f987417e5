"""Faults of support/faults.py, each in a random order, one after the other under one daemon and one job."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

from support.faults import FAULTS, Site, unavailable
from torture.figure import Figure


def run(seconds: float, seed: int) -> list[Figure]:
    """Return figures: faults survived, equal operations of the job, snapshots restored and compared."""
    rng = random.Random(seed)
    faults = [fault for fault in sorted(FAULTS) if not unavailable(fault)]
    end = time.monotonic() + seconds
    survived, failures, waiting = 0, [], []
    with Site(Path(tempfile.mkdtemp()), seed) as site:
        while not failures and (time.monotonic() < end or not survived):
            waiting = waiting or rng.sample(faults, len(faults))
            fault = waiting.pop()
            try:
                FAULTS[fault](site)
                site.check_recovered()
            except (AssertionError, TimeoutError, OSError) as error:
                failures.append(f"{fault}, after {survived} others: {error}"[:20_000])
            else:
                survived += 1
        with site.job.paused():
            differences, operations = tuple(site.job.differences[:10]), site.job.operations
        if not operations:
            differences = ("the job did nothing",)
    return [
        Figure("faults in place survived", survived, tuple(failures)),
        Figure("operations during faults compared", operations, differences),
        Figure("snapshots compared after a fault", site.snapshots_checked),
    ]
