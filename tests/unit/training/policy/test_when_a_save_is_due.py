"""Rules of when a snapshot is due, and measured costs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic import SnapshotManager
from ciuic.training.rules import AfterIf, Automatic, Interval, Moment, OnImprovement, Rule, SaveRules, Steps
from ciuic.training.save_schedule import SaveCosts


def moment_at(steps: int = 0, seconds: float = 0.0, cost: float | None = None, write: float = 0.0) -> Moment:
    return Moment(1000 + steps, steps, seconds, cost, write)


@pytest.mark.parametrize(
    ("rule", "early", "due"),
    [
        (Interval("1h"), moment_at(10**6, 3599), moment_at(0, 3600)),
        (Interval(0.5), moment_at(9, 0.4), moment_at(0, 0.5)),
        (Steps(20), moment_at(19, 10**6), moment_at(20)),
        (AfterIf(60, changes=100), moment_at(99, 10**6), moment_at(100, 60)),
        (AfterIf("1m", 100), moment_at(10**6, 59), moment_at(100, 60)),
        (Automatic(), moment_at(3, 59), moment_at(1, 60)),
        (Automatic(), moment_at(0, 10**6), moment_at(1, 60)),
        # sqrt(2 · 2 s · 1 h) = 120 s
        (Automatic(max_overhead=0.5, mtbf="1h"), moment_at(9, 119.9, 2.0), moment_at(9, 120.0, 2.0)),
        # 2 s in 200 s are one per cent
        (Automatic(mtbf=3600), moment_at(9, 199.9, 2.0), moment_at(9, 200.0, 2.0)),
        (
            Automatic(max_overhead=0.5, mtbf=3600),
            moment_at(9, 499.0, 2.0, 500.0),
            moment_at(9, 500.0, 2.0, 500.0),
        ),
    ],
)
def test_a_rule_is_due_from_its_bound_on(rule: Rule, early: Moment, due: Moment) -> None:
    """A rule makes a snapshot due at its bound and not before."""
    assert not rule.due(early)
    assert rule.due(due)


def test_any_of_several_rules_makes_a_snapshot_due() -> None:
    """Any of several rules makes a snapshot due, and its text is the reason."""
    rules = SaveRules([AfterIf(900, 1), AfterIf(300, 10), AfterIf(60, 10_000)])
    assert not rules.due(moment_at(9, 899))
    assert rules.due(moment_at(1, 900)) == "AfterIf(seconds=900.0, changes=1)"
    assert "300" in rules.due(moment_at(10, 300))
    assert "60" in rules.due(moment_at(10_000, 60))


def test_improvement_is_due_once_and_beaten_only_by_more() -> None:
    """An improvement makes one snapshot due; NaN and other metrics make none."""
    rule = OnImprovement("accuracy", "max", least=0.1)
    seen = []
    for value in (math.nan, 0.5, 0.55, 0.61, 0.4):
        rule.observe({"accuracy": value, "loss": -value})
        seen.append(rule.due(moment_at()))
        rule.saved()
    assert seen == [False, True, False, True, False]
    assert rule.best == 0.61


@pytest.mark.parametrize(
    "make",
    [
        lambda: Interval(0),
        lambda: Interval("never"),
        lambda: Interval(math.nan),
        lambda: Steps(0),
        lambda: AfterIf(5, 0),
        lambda: OnImprovement("loss", "least"),  # type: ignore[arg-type]
        lambda: Automatic(max_overhead=0),
        lambda: Automatic(mtbf=-1),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused(make: object) -> None:
    """A rule with impossible arguments raises where it is created."""
    with pytest.raises(ValueError):  # noqa: PT011 (whichever)
        make()  # type: ignore[operator]


@given(st.floats(1e-6, 1e4), st.floats(0.001, 0.9), st.floats(1, 1e7), st.floats(0, 1e5))
def test_the_automatic_interval_keeps_to_its_budget(
    cost: float, overhead: float, mtbf: float, write: float
) -> None:
    """The automatic interval respects the budget and the writer, and is Young's interval otherwise."""
    interval = Automatic(overhead, mtbf).interval_seconds(cost, write)
    assert cost / interval <= overhead * (1 + 1e-9)
    assert interval >= write
    assert interval in (write, cost / overhead, math.sqrt(2 * cost * mtbf))


def test_costs_are_medians_of_stalls_and_steps() -> None:
    """Costs are medians of stalls and steps; the first stall is left out when there are others."""
    costs = SaveCosts()
    assert costs.seconds is None
    costs.stalled(9.0)
    assert costs.seconds == 9.0
    costs.stalled(1.0)
    now = 0.0
    for number in range(40):
        writing = number % 2 == 1
        now += 60.0 if number == 20 else 0.1 if not writing else 0.125
        costs.boundary(now, writing=writing)
    costs.wrote(1000, 10.0)
    assert costs.slowdown == pytest.approx(0.2)
    assert costs.seconds == pytest.approx(1.0 + 2.0)


def test_the_estimated_duration_is_conservative() -> None:
    """The estimate is the slowest recent write, scaled for a larger state, or the measured speed at first."""
    costs = SaveCosts()
    assert costs.write_estimate_seconds(1) is None
    costs.measured_bytes_per_second = 100.0
    assert costs.write_estimate_seconds(1000) == 10.0
    costs.wrote(1000, 3.0)
    costs.wrote(1000, 5.0)
    costs.wrote(1000, 4.0)
    assert costs.write_estimate_seconds(500) == 5.0
    assert costs.write_estimate_seconds(2000) == 10.0


def test_ranks_count_from_one_step_where_rank_0_alone_is_told_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next save is due at the same step on all ranks: one that found it due alone would wait for the others."""
    counted = []
    for rank, named in enumerate((10, None)):
        with SnapshotManager(tmp_path / str(rank), every_steps=4) as manager:
            coordinator = manager._coordinator
            taker, run = coordinator.taker, coordinator.run
            # As `gather_states` leaves it on every rank, and `save_gathered(step=10)` on rank 0.
            run.step = 9
            coordinator.schedule.begin_at(run.step)
            run.step = named or run.step
            with monkeypatch.context() as several:
                several.setattr(taker, "_ranks", object())
                taker._record_taken()
            counted.append(coordinator.schedule._moment(13, coordinator.pipeline.costs).steps_since)
    assert counted[0] == counted[1]
