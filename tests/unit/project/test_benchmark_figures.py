"""Tests of the benchmark: what its steps compute from their records, and how bars are judged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import workloads
from benchmarks.bars import BARS, Bar, judge
from benchmarks.samples import Cell, Sample, summarise, table
from benchmarks.store import suites as store_suites
from benchmarks.store import tree, usage
from benchmarks.store.bars import BARS as STORE_BARS
from benchmarks.suite import CIUIC, Job, Suite
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


KERNEL, PYFUSE3 = CIUIC


def _sample(figure: str, contender: str, number: int, value: float) -> Sample:
    return Sample("data", figure, "MB/s", True, "tmpfs", contender, number, value)


def test_the_summary_of_values_is_their_median_quartiles_and_ends() -> None:
    """A summary has minimum, quartiles, median and maximum of the values, in order of size."""
    assert summarise([5.0, 1.0, 3.0, 2.0, 4.0], "s")[2:] == (3.0, 2.0, 4.0, 1.0, 5.0, 5)
    assert summarise([7.0], "s")[2:] == (7.0, 7.0, 7.0, 7.0, 7.0, 1)


@pytest.mark.parametrize(("ours", "met"), [(96.0, True), (95.0, True), (94.0, False)])
def test_a_ratio_is_met_from_its_limit_on(ours: float, met: bool) -> None:
    """A ratio is met at its limit, and judged from medians: one bad round of five does not count."""
    values = [ours, ours, ours, 1.0, 1000.0]
    samples = [_sample("new file, 8 MiB writes", KERNEL, n, value) for n, value in enumerate(values)]
    samples += [_sample("new file, 8 MiB writes", "native", n, 100.0) for n in range(5)]
    found = table(samples)
    (cell,) = found
    assert [verdict.met for verdict in judge(cell, KERNEL, found)] == [met]


def test_a_bar_whose_reference_was_not_measured_is_not_judged() -> None:
    """A bar whose reference was not measured is not judged."""
    row = {KERNEL: summarise([9000.0], "/s"), PYFUSE3: summarise([2000.0], "/s")}
    cell = Cell("metadata", "tmpfs", "unlink")
    verdicts = judge(cell, KERNEL, {cell: row})
    assert [(verdict.bar.against, verdict.met) for verdict in verdicts] == [("libfuse C++", None)]


def test_an_absolute_bar_needs_no_reference() -> None:
    """A bar without a reference, such as the hold of a cut of at most 5 ms, is judged alone."""
    cell = Cell("hold", "tmpfs", "hold of a cut, p99")
    for value, met in ((4.0, True), (5.5, False)):
        (verdict,) = judge(cell, PYFUSE3, {cell: {PYFUSE3: summarise([value], "ms")}})
        assert (verdict.measured, verdict.met) == (value, met)


def test_a_figure_may_be_held_against_another_of_the_same_contender() -> None:
    """A figure may be compared with another of the same contender, such as two kinds of restore."""
    bar = Bar(
        ("over",), 1.0, at_least=False, against="", contenders=(KERNEL,), places=("xfs",), figure="fresh"
    )
    over, fresh = Cell("tree", "xfs", "over"), Cell("tree", "xfs", "fresh")
    row = {KERNEL: summarise([3.0], "s")}
    assert judge(over, KERNEL, {over: row}, (bar,))[0].met is None
    assert (
        judge(over, KERNEL, {over: row, fresh: {KERNEL: summarise([4.0], "s")}}, (bar,))[0].measured == 0.75
    )
    assert bar.shown("s") == "≤ 1 of fresh"
