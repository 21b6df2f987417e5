"""Forecast of what saving will cost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ciuic.training.free_resources import memory_left
from ciuic.training.save_schedule import forecast, measure

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
