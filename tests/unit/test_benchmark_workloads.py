"""What the benchmark's steps compute from what they took down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import workloads
from benchmarks.bars import BARS
from benchmarks.workloads.hold import percentile
from benchmarks.workloads.training import Moment, captures, figures


def test_a_capture_lasts_from_its_cut_to_its_commit(tmp_path: Path) -> None:
    """Other events, and commits of cuts made before the log began, are passed over; an open one ends now."""
    log = tmp_path / "daemon.log"
    events = [
        {"event": "snapshot_committed", "id": "cs-000000", "timestamp": "1970-01-01T00:00:50Z"},
        {"event": "snapshot_cut", "id": "cs-000001", "timestamp": "1970-01-01T00:01:00.500000Z"},
        {"event": "root_unmounted", "timestamp": "1970-01-01T00:01:01Z"},
        {"event": "snapshot_committed", "id": "cs-000001", "timestamp": "1970-01-01T00:01:03Z"},
        {"event": "snapshot_cut", "id": "cs-000002", "timestamp": "1970-01-01T00:02:00Z"},
    ]
    log.write_text("no JSON\n" + "".join(json.dumps(event) + "\n" for event in events))
    first, second = captures(str(log))
    assert first == Moment(60.5, 63.0)
    assert second.began == 120.0 < second.ended


def test_steps_that_touch_a_capture_have_a_mean_of_their_own() -> None:
    """The first step counts for nothing; a step belongs to a capture when any part of it does."""
    steps = [Moment(0, 9), Moment(9, 10), Moment(10, 12), Moment(12, 13), Moment(13, 14)]
    measured = figures(steps, [Moment(11.5, 12.5)], [0.25, 0.75], snapshots=True)
    assert measured.values == [1000, 1250, 1500, 500]
    assert figures(steps, [], [], snapshots=True).values[2:] == [None, None]


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.001, 1)])
def test_a_percentile_is_one_of_the_values(share: float, value: float) -> None:
    """The smallest that at least this share of them does not exceed."""
    assert percentile([float(n) for n in range(100, 0, -1)], share) == value


def test_every_bar_names_figures_that_some_suite_measures() -> None:
    """A renamed figure must not lose its bar."""
    known = {figure.name for suite in workloads.SUITES for step in suite.steps for figure in step.figures}
    assert {figure for bar in BARS for figure in bar.figures} <= known
