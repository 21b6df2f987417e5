"""Seconds that each test file took in an earlier run of the whole suite.

A run begins with the most expensive files, so that none of them is what its end waits for, with idle workers beside it.
`make test-full ARGS=--record-costs` records anew.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
RECORD = CHECKOUT / "tests/costs.txt"
_LEAST_SECONDS = 3
"""Cheaper files are not recorded: where they run delays nothing, and the record would change with each of them."""


def recorded(record: Path = RECORD) -> dict[Path, float]:
    """Return the seconds of each recorded file."""
    lines = (line.split(" ", 1) for line in map(str.strip, record.read_text().splitlines()))
    return {CHECKOUT / name: float(seconds) for seconds, name in lines}


def sort_by_cost(items: list[pytest.Item], costs: Mapping[Path, float]) -> None:
    """Put expensive files first; before them those with slow tests that were never recorded."""
    never_recorded = {item.path for item in items if item.get_closest_marker("slow")} - costs.keys()
    all_costs = {**costs, **dict.fromkeys(never_recorded, math.inf)}
    items.sort(key=lambda item: all_costs.get(item.path, 0.0), reverse=True)


class Recorder:
    """A plugin that records what each file took, in the process that hears of all tests."""

    def __init__(self, record: Path = RECORD) -> None:
        self._record = record
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add what a part of a test took."""
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Write the record."""
        expensive = [(seconds, name) for name, seconds in self._seconds.items() if seconds >= _LEAST_SECONDS]
        self._record.write_text(
            "".join(f"{seconds:4.0f} {name}\n" for seconds, name in sorted(expensive, reverse=True))
        )
