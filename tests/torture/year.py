"""A simulated year of hourly snapshots, retention and collection, as far as the time allows."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from support.long_life import live
from torture.figure import Figure

_HOURS = 24 * 365
_WARM_UP_DAYS = 90
"""Days after which as many snapshots are kept as ever, the monthly ones apart."""

_EXCESS_LIMIT = 1.3
"""Limit of stored to needed bytes: packs are rewritten when enough of them is garbage, not for every chunk.
"""


def run(seconds: float, seed: int) -> list[Figure]:
    """Return figures: snapshots taken, snapshots that verified and read as taken; drifts in hundredths."""
    end = time.monotonic() + seconds
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="ciuic-year-", dir=place) as top:
        life = live(Path(top), _HOURS, seed, lambda: time.monotonic() < end)
    failures = list(life.failures)
    if life.days and life.excess() > _EXCESS_LIMIT:
        failures.append(f"the store was {life.excess():.2f} times what the kept snapshots needed")
    figures = [
        Figure("simulated snapshots", life.snapshots),
        Figure("kept snapshots verified", life.verified),
    ]
    if len(life.days) > 2 * _WARM_UP_DAYS:
        limits = {
            "memory": (life.drift(lambda day: day.resident_bytes, _WARM_UP_DAYS), 1.3),
            "descriptors": (life.drift(lambda day: day.descriptors, _WARM_UP_DAYS), 1.0),
            "prune time": (life.drift(lambda day: day.prune_seconds, _WARM_UP_DAYS), 3.0),
            "list time": (life.drift(lambda day: day.list_seconds, _WARM_UP_DAYS), 3.0),
        }
        for name, (ratio, limit) in limits.items():
            broken = (f"{name}: {ratio:.2f} times what it was in spring",) if ratio > limit else ()
            figures.append(
                Figure(f"{name}, last quarter over first, in hundredths", round(ratio * 100), broken)
            )
    figures[0] = figures[0]._replace(failures=tuple(failures))
    return figures
