"""Tests of how benchmark bars are judged: from medians of one session, and never when not measured."""

from __future__ import annotations

import pytest

from benchmarks.bars import Bar, judge
from benchmarks.samples import Cell, Sample, summarise, table
from benchmarks.suite import CIUIC

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
