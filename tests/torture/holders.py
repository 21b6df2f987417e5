"""SIGKILL of two of {daemon, worker, keeper} at a time, without systemd, under jobs that check every result.

No call may fail, no byte may be wrong, and open files stay open; then the daemon is started again if it was
killed.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from support.holders import PAIRS, kill_pairs
from support.site import site_in
from torture.figure import Figure


def run(seconds: float, seed: int) -> list[Figure]:
    """Kill pairs until the time is over."""
    rng, top = random.Random(seed), Path(tempfile.mkdtemp())
    with site_in(top, driver="kernel") as site:
        root = site.root("r")
        site.start()
        outcome = kill_pairs(site, root, _until(seconds, rng), rng)
        site.stop()
    return [
        *(Figure(f"{' and '.join(pair)} killed together", count) for pair, count in outcome.kills.items()),
        Figure("rounds of the jobs, every result checked", outcome.rounds, tuple(outcome.failures)),
        Figure("system calls of the jobs", outcome.calls),
        Figure("longest round of a job, ms", round(1000 * outcome.longest_seconds)),
    ]


def _until(seconds: float, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield pairs in random order until the time is over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield rng.choice(PAIRS)
