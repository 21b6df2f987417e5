"""Rules of when a snapshot is due, measured costs, and the forecast of what saving will cost."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic import SnapshotManager
from ciuic.training.free_resources import memory_left
from ciuic.training.rules import AfterIf, Automatic, Interval, Moment, OnImprovement, Rule, SaveRules, Steps
from ciuic.training.save_schedule import SaveCosts, forecast, measure


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


GIB = 1 << 30


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, []),
        ({"at_most": 9}, []),
        ({"at_most": 10}, ["11 snapshots of 1.00 GiB each may not fit"]),
        ({"at_most": 10, "stored": 1}, []),
        ({"free_bytes": GIB - 1}, ["does not fit"]),
        ({"grace_seconds": 19}, ["no last snapshot"]),
        ({"grace_seconds": 20, "shortest_interval_seconds": 20}, []),
        ({"shortest_interval_seconds": 19}, ["due every 19 s"]),
        ({"write_seconds": None, "shortest_interval_seconds": 1, "grace_seconds": 1}, []),
        ({"memory_bytes": GIB - 1}, ["does not fit into memory"]),
    ],
)
def test_the_forecast_warns_of_everything_that_does_not_fit(
    facts: dict[str, Any], expected: list[str]
) -> None:
    """The forecast warns of everything that does not fit, and of nothing else."""
    found = forecast(GIB, **{"free_bytes": 10 * GIB, "write_seconds": 20.0, **facts})
    assert len(found.warnings) == len(expected)
    for warning, part in zip(found.warnings, expected, strict=True):
        assert part in warning


def test_measuring_leaves_nothing_and_may_fail(tmp_path: Path) -> None:
    """The measurement leaves no file behind, and returns 0 for a directory that does not exist."""
    assert measure(str(tmp_path)) >= 0
    assert not os.listdir(tmp_path)
    assert measure(str(tmp_path / "nowhere")) == 0


def test_the_least_of_machine_and_groups_is_left(tmp_path: Path) -> None:
    """The least of machine and groups counts, cached files are free, and a group without a limit is ignored."""
    (tmp_path / "meminfo").write_text("MemTotal: 9999 kB\nMemAvailable: 1000 kB\n")
    (tmp_path / "cgroup").write_text("1:cpu:/x\n0::/job/step\n")
    groups = tmp_path / "groups"
    (groups / "job" / "step").mkdir(parents=True)

    def left() -> int | None:
        return memory_left(tmp_path / "meminfo", tmp_path / "cgroup", groups)

    assert left() == 1000 << 10
    for name, limit, used in (("job/step", "max", 7), ("job", "900000", 500000)):
        (groups / name / "memory.max").write_text(f"{limit}\n")
        (groups / name / "memory.current").write_text(f"{used}\n")
        (groups / name / "memory.stat").write_text("anon 5\ninactive_file 100000\n")
    assert left() == 500000
    assert memory_left(tmp_path / "no", tmp_path / "no", groups) is None


def test_groups_of_the_first_version_are_known_too(tmp_path: Path) -> None:
    """Limits of cgroup version 1 are known, also in a container, whose group is the topmost one."""
    (tmp_path / "meminfo").write_text("MemAvailable: 1000 kB\n")
    (tmp_path / "cgroup").write_text("12:memory:/docker/a:b\n3:cpu,cpuacct:/docker/a:b\nnonsense\n0::/\n")
    groups = tmp_path / "groups"
    for name, limit in (("memory", 400000), ("memory/docker/a:b", 9223372036854771712)):
        (groups / name).mkdir(parents=True, exist_ok=True)
        (groups / name / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (groups / name / "memory.usage_in_bytes").write_text("100000\n")
        (groups / name / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 50000\n")
    assert memory_left(tmp_path / "meminfo", tmp_path / "cgroup", groups) == 350000
