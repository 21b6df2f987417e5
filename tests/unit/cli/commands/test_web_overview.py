"""The overview of the page: incidents of which it warns, how often its curves are read, and the geometry of its charts."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.cli.commands.web.charts import axis_of, in_order, lines, thinned, treemap
from ciuic.cli.commands.web.training import timeline_of
from ciuic.repository import SnapshotInfo
from ciuic.types import SnapshotId

pytest.importorskip("jinja2")
from ciuic.cli.commands.web.access import Access
from ciuic.cli.commands.web.front import (
    _PICTURE_PAUSES,
    _PICTURE_SECONDS,
    Front,
    _Drawn,
    _open_incidents,
    _templates,
)
from ciuic.cli.commands.web.jobs import Mark, NumberSeries, TrainingNumbers
from ciuic.cli.commands.web.rights import ROOT_ALONE
from ciuic.cli.commands.web.training import chart_of
from ciuic.protocol.control_types import Incident, StatusDocument, TrainerStatus, rfc3339

_NOW_NS = time.time_ns()


def _at(seconds: float) -> str:
    return rfc3339(_NOW_NS + int(seconds * 10**9))


def _incident(kind: str, seconds: float, name: str = "run", where: str = "/work") -> Incident:
    return Incident(kind=kind, time=_at(seconds), trainer=TrainerStatus(name=name, where=where))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kinds", "started", "open_"),
    [
        (["died"], None, ["died"]),
        (["died"], -20, ["died"]),
        (["died"], -5, []),
        (["hung"], -20, ["hung"]),
        (["recovered", "hung"], -20, []),
        (["hung", "recovered", "hung"], -20, ["hung"]),
        (["died", "hung"], None, ["died"]),
        (["died", "failed"], -20, ["died", "failed"]),
    ],
)
def test_what_goes_on_is_no_incident(kinds: list[str], started: float | None, open_: list[str]) -> None:
    """A training that goes on, or was started again since, is warned of no more; ranks that outlive another one settle nothing."""
    status = StatusDocument(
        version="1",
        pid=1,
        since=_at(-100),
        now=_at(0),
        # Newest first.
        incidents=[_incident(kind, -10 - at) for at, kind in enumerate(kinds)]
        + [_incident("died", -30, "run-2"), _incident("died", -90_000, "run-3")],
        trainers=[] if started is None else [TrainerStatus(name="run", where="/work", since=_at(started))],
    )
    assert [(one.trainer.name, one.kind) for one in _open_incidents(status)] == [
        *(("run", kind) for kind in open_),
        ("run-2", "died"),
    ]


@pytest.mark.parametrize("seconds", [0.0, 1.0, 60.0])
def test_curves_that_are_dear_are_read_seldom(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """No new snapshot has curves read before thirty times the time that they took; after that one does, and without one a minute."""
    nothing: Any = None
    front = Front(Access(), nothing, nothing, nothing, admission=ROOT_ALONE, may_act=False, host="h")
    numbers = TrainingNumbers(series=(NumberSeries(name="loss", source="log"),), marks=())
    front._drawn = _Drawn((1, "cs-1"), 1000.0, seconds, numbers)
    pause = _PICTURE_PAUSES * seconds
    for age, is_new, is_fresh in (
        (pause / 2, True, pause > 0),
        (pause + 1, True, False),
        (pause + 1, False, pause + 1 < _PICTURE_SECONDS),
        (max(pause, _PICTURE_SECONDS) + 1, False, False),
    ):
        monkeypatch.setattr(time, "monotonic", lambda age=age: 1000.0 + age)
        assert front._is_fresh((2, "cs-2") if is_new else (1, "cs-1")) == is_fresh


def test_a_torn_mark_lies_over_those_beside_it() -> None:
    """Of snapshots that are drawn in one place, a TORN one is seen, and each is a link."""
    marks = tuple(
        Mark(snapshot=f"cs-{step}", time_ns=step, step=step, state="TORN" if step == 50 else "GOOD")
        for step in range(100, 0, -1)
    )
    points = tuple((step * 1000, 1.0) for step in range(100))
    numbers = TrainingNumbers(series=(NumberSeries(name="loss", source="log", points=points),), marks=marks)
    template = _templates().from_string('{% import "chart.html" as draw %}{{ draw.chart(chart) }}')
    drawn = template.render(chart=chart_of(numbers, ()))
    assert drawn.count('class="flag good"') == 99
    assert drawn.count("<a href") == 100
    assert drawn.rindex('class="flag torn"') > drawn.rindex('class="flag good"')


_NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
_POINTS = st.lists(
    st.tuples(st.integers(0, 2**63 - 1), st.none() | st.floats(allow_nan=False, allow_infinity=False))
)


@given(st.lists(_NUMBERS), st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2))
def test_an_axis_keeps_order_and_box(values: list[float], shown: list[float]) -> None:
    """Whatever numbers an axis was made for, each number has a finite place in the box, and a larger one never before a smaller."""
    axis = axis_of(values, 10, 90)
    places = [axis.at(value) for value in sorted(shown)]
    assert all(math.isfinite(place) and 10 - 1e-6 <= place <= 90 + 1e-6 for place in places)
    assert places == sorted(places)
    upside_down = axis_of(values, 90, 10)
    assert [upside_down.at(value) for value in sorted(shown)] == sorted(
        (upside_down.at(value) for value in shown), reverse=True
    )


@given(st.lists(_NUMBERS))
def test_ticks_are_few_and_on_the_axis(values: list[float]) -> None:
    """An axis has at least one tick and at most a dozen, all finite and between its ends."""
    axis = axis_of(values, 0, 100)
    ticks = axis.ticks()
    assert 1 <= len(ticks) <= 12
    assert all(axis.low <= tick <= axis.high for tick in ticks)


@given(_POINTS)
def test_lines_have_only_finite_coordinates(points: list[tuple[int, float | None]]) -> None:
    """Each number is on one line, from left to right and inside of the box; none leaves a gap."""
    ordered = in_order(points)
    x = axis_of([step for step, _ in ordered], 50, 950)
    y = axis_of([value for _, value in ordered if value is not None], 280, 20)
    drawn = [
        [tuple(map(float, pair.split(","))) for pair in line.split(" ")] for line in lines(ordered, x, y)
    ]
    assert sum(map(len, drawn)) == sum(value is not None for _, value in ordered)
    across = [place for line in drawn for place, _ in line]
    assert across == sorted(across)
    assert all(50 <= left <= 950 and 20 <= top <= 280 for line in drawn for left, top in line)


@given(_POINTS, st.integers(3, 50))
def test_thinning_keeps_extremes(points: list[tuple[int, float | None]], most: int) -> None:
    """Few points stay, in order, among them the least and the greatest number, and one that is none if any was."""
    ordered = in_order(points)
    kept = thinned(ordered, most)
    assert len(kept) <= max(most, 3) + 3
    steps = [step for step, _ in kept]
    assert steps == sorted(steps)
    assert set(kept) <= set(ordered)
    numbers = [value for _, value in ordered if value is not None]
    if numbers:
        left = [value for _, value in kept if value is not None]
        assert (min(left), max(left)) == (min(numbers), max(numbers))
    assert any(value is None for _, value in kept) == any(value is None for _, value in ordered)


def test_steps_that_were_taken_back_count_once() -> None:
    """Of a step that was written twice the later number is drawn; a file without steps is counted."""
    assert in_order([(1, 5.0), (2, 4.0), (3, 9.0), (2, 3.0)]) == [(1, 5.0), (2, 3.0), (3, 9.0)]
    assert in_order([(0, 5.0), (0, 4.0)]) == [(0, 5.0), (1, 4.0)]


@given(st.lists(st.floats(1, 1e300), max_size=60))
def test_a_treemap_fills_its_box(sizes: list[float]) -> None:
    """Each size has a rectangle inside of the box, in proportion to it, and none lies over another."""
    sizes.sort(reverse=True)
    found = treemap(sizes, 1000, 200)
    assert len(found) == len(sizes)
    for one in found:
        assert all(math.isfinite(number) and number >= 0 for number in one)
        assert one.left + one.width <= 1000 + 1e-6
        assert one.top + one.height <= 200 + 1e-6
    if sizes:
        assert sum(one.width * one.height for one in found) == pytest.approx(200_000)
        total = sum(size / sizes[0] for size in sizes)
        for size, one in zip(sizes, found, strict=True):
            assert one.width * one.height == pytest.approx(200_000 * size / sizes[0] / total, abs=0.01)
    for at, one in enumerate(found):
        for other in found[:at]:
            across = min(one.left + one.width, other.left + other.width) - max(one.left, other.left)
            down = min(one.top + one.height, other.top + other.height) - max(one.top, other.top)
            assert across <= 1e-6 or down <= 1e-6


_TIMES = st.integers(-(2**63), 2**63 - 1) | st.integers(1_700_000_000, 1_700_200_000).map(
    lambda seconds: seconds * 10**9
)


@given(st.lists(_TIMES, max_size=30))
def test_a_time_line_has_all_snapshots_in_order(times: list[int]) -> None:
    """Each snapshot has a place in the box, older ones to the left, over a few ticks, whatever its clock said."""
    infos = [
        SnapshotInfo(id=SnapshotId("cs-abcdef"), time_ns=one, size_bytes=0, new_bytes=0, files=0)
        for one in sorted(times, reverse=True)
    ]
    line = timeline_of(infos, {})
    assert [info.time_ns for _, info, _ in line.flags] == sorted(times)
    places = [at for at, _, _ in line.flags]
    assert places == sorted(places)
    assert all(0 <= at <= 1000 for at in [*places, *(at for at, _ in line.ticks)])
    assert 1 <= len(line.ticks) <= 12


def test_ticks_of_a_time_line_are_round() -> None:
    """Over a day they are hours."""
    begin = 1_700_000_000 // 3600 * 3600
    infos = [
        SnapshotInfo(id=SnapshotId("cs-abcdef"), time_ns=one * 10**9, size_bytes=0, new_bytes=0, files=0)
        for one in (begin + 80_000, begin)
    ]
    labels = [label for _, label in timeline_of(infos, {}).ticks]
    assert len(labels) > 3
    assert all(label.endswith(":00") for label in labels)
