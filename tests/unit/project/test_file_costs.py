"""Tests that a run begins with the files that take longest."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import file_costs
from support.file_costs import CHECKOUT


def test_recorded_files_exist() -> None:
    """Each recorded file exists, and the record begins with the most expensive one."""
    costs = file_costs.recorded()
    assert len(costs) > 10
    assert [str(path) for path in costs if not path.is_file()] == [], (
        "record anew: make test-full ARGS=--record-costs"
    )
    assert list(costs.values()) == sorted(costs.values(), reverse=True)


def test_the_record_of_a_run_orders_the_next(tmp_path: Path) -> None:
    """Recorded files run in the order of their seconds, slow ones that were not recorded before them, and the others last."""
    recorder = file_costs.Recorder(tmp_path / "costs.txt")
    for name, seconds in (("cheap", 2.0), ("dear", 30.0), ("dearest", 30.0), ("dearest", 20.0)):
        recorder.pytest_runtest_logreport(
            pytest.TestReport(
                f"tests/{name}.py::test", ("", 0, ""), {}, "passed", None, "call", duration=seconds
            )
        )
    recorder.pytest_sessionfinish()
    costs = file_costs.recorded(tmp_path / "costs.txt")
    assert costs == {CHECKOUT / "tests/dearest.py": 50, CHECKOUT / "tests/dear.py": 30}
    items: list[Any] = [
        SimpleNamespace(
            path=CHECKOUT / f"tests/{name}.py",
            name=name,
            get_closest_marker={"slow": name == "slow_and_new"}.get,
        )
        for name in ("cheap", "dear", "new", "slow_and_new", "dearest")
    ]
    file_costs.sort_by_cost(items, costs)
    assert [item.name for item in items] == ["slow_and_new", "dearest", "dear", "cheap", "new"]
