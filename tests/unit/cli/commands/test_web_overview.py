"""The overview: incidents of which it warns, and how often its curves are read."""

from __future__ import annotations

import time
from typing import Any

import pytest

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
