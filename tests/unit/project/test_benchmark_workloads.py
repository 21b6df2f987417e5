"""Tests of what the benchmark's steps compute from their records."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import workloads
from benchmarks.bars import BARS, Bar
from benchmarks.store import suites as store_suites
from benchmarks.store import tree, usage
from benchmarks.store.bars import BARS as STORE_BARS
from benchmarks.suite import Job, Suite
from benchmarks.workloads.hold import percentile
from benchmarks.workloads.training import Interval, captures, figures


def test_a_capture_lasts_from_its_cut_to_its_commit(tmp_path: Path) -> None:
    """A capture lasts from its cut to its commit, or until now; commits without a cut are ignored."""
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
    assert first == Interval(60.5, 63.0)
    assert second.began == 120.0 < second.ended


def test_steps_during_a_capture_have_their_own_mean() -> None:
    """Steps that overlap a capture have a mean of their own, and the first step is left out."""
    steps = [Interval(0, 9), Interval(9, 10), Interval(10, 12), Interval(12, 13), Interval(13, 14)]
    measured = figures(steps, [Interval(11.5, 12.5)], [0.25, 0.75], snapshots=True)
    assert measured.values == [1000, 1250, 1500, 500]
    assert figures(steps, [], [], snapshots=True).values[2:] == [None, None]


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.001, 1)])
def test_a_percentile_is_one_of_the_values(share: float, value: float) -> None:
    """A percentile is the smallest value that at least this share of the values does not exceed."""
    assert percentile([float(n) for n in range(100, 0, -1)], share) == value


@pytest.mark.parametrize(
    ("suites", "bars"),
    [(workloads.SUITES, BARS), (store_suites.SUITES, STORE_BARS)],
    ids=["bench", "bench-store"],
)
def test_every_bar_names_figures_that_some_suite_measures(
    suites: Sequence[Suite], bars: Sequence[Bar]
) -> None:
    """The figures of every bar, references included, are measured by some suite."""
    known = {figure.name for suite in suites for step in suite.steps for figure in step.figures}
    named = {figure for bar in bars for figure in (*bar.figures, bar.figure) if figure}
    assert named <= known


def test_the_tree_and_its_changes_are_the_same_in_every_session(tmp_path: Path) -> None:
    """The same seed gives the same tree and changes: a new checkpoint, longer logs, an overwritten file."""
    pytest.importorskip("numpy")
    found = []
    for name in ("a", "b"):
        top = tmp_path / name
        job = Job(directory=str(top / "tree"), source=str(top), scale=0.001)
        tree.make(str(top), job, 1)
        before = {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}
        tree.change(job, 1)
        after = {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}
        found.append((before, after))
    assert found[0] == found[1]
    before, after = found[0]
    assert {path.split("/")[2] for path in after.keys() - before.keys()} == {"step-new"}
    changed = {path for path in before if after[path] != before[path]}
    assert "tree/checkpoints/step-0/optimizer.f32" in changed
    logs = changed - {"tree/checkpoints/step-0/optimizer.f32"}
    assert logs
    assert all("/logs/" in path and after[path].startswith(before[path]) for path in logs)


def test_usage_of_a_command_is_its_own() -> None:
    """Time, processor seconds and memory of a command are its own, and a failure has its last output."""
    program = "x = bytearray(80 << 20); n = sum(range(3_000_000)); import time; time.sleep(0.2)"
    used = usage.run([sys.executable, "-c", program], cwd="/", environment={}, limit_seconds=60)
    assert used.seconds >= 0.2
    assert used.cpu_seconds > 0
    assert used.peak_bytes == used.command_bytes >= 80 << 20
    daemon = subprocess.Popen(
        [sys.executable, "-c", "x = bytearray(90 << 20); print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with daemon:
        assert daemon.stdout is not None
        daemon.stdout.readline()
        used = usage.run(
            ["/bin/sleep", "0.2"], cwd="/", environment={}, daemon_pid=daemon.pid, limit_seconds=60
        )
        daemon.communicate(b"\n", timeout=30)
    assert used.command_bytes < 80 << 20 < used.peak_bytes
    with pytest.raises(usage.CommandFailed, match=r"ended with 3: enough"):
        usage.run(["/bin/sh", "-c", "echo enough >&2; exit 3"], cwd="/", environment={}, limit_seconds=60)
