"""The harness of `make bench` measures, judges and cleans up; the figures themselves are not checked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import leftovers

from benchmarks.contenders import Place, contenders
from benchmarks.lane import Lane, StepFailed
from benchmarks.workloads import data

CHECKOUT = Path(__file__).parents[2]


# Takes the place of the C++ example: only a program that mounts, and can be measured and ended, is needed
# here.
PEER = """#!/bin/sh
for last; do before=$at at=$last; done
mount --bind "$before" "$at" && exec sleep 1000
"""


@pytest.mark.mount
def test_two_small_suites_are_measured_for_all_contenders(short_tmp: Path) -> None:
    """Every figure of two small suites has a value for each contender, and nothing stays mounted."""
    peer = short_tmp / "peer"
    peer.write_text(PEER)
    peer.chmod(0o755)
    names = ("native", "ciuic pyfuse3", "libfuse C++")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks", "metadata", "data", "--scale", "0.01", "--rounds", "1"),
            *("--places", "tmpfs", "--contenders", ",".join(names)),
            *("--disk", str(short_tmp), "--results", str(short_tmp / "results"), "--name", "smoke"),
        ],
        cwd=CHECKOUT,
        env={
            **os.environ,
            "PYTHONPATH": "tests",
            "CIUIC_BENCH_WARM": "1",
            "CIUIC_BENCH_PASSTHROUGH_HP": str(peer),
        },
        capture_output=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    document = json.loads((short_tmp / "results/smoke.json").read_text())
    assert document["notes"] == []
    found = {(sample["figure"], sample["contender"]) for sample in document["samples"]}
    figures = {figure for figure, _ in found}
    assert {"new file, 8 MiB writes", "cold read", "appends of 200 bytes to a log", "unlink"} <= figures
    assert found == {(figure, name) for figure in figures for name in names}
    assert all(sample["value"] > 0 for sample in document["samples"])
    table = (short_tmp / "results/smoke.md").read_text()
    assert all(f"| {figure} |" in table for figure in figures)


@pytest.mark.mount
def test_snapshots_are_measured_next_to_a_copy(short_tmp: Path) -> None:
    """Every command of the store gets a time, and a copy has no value for what it cannot do."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.store", "tree", "short-history", "--scale", "0.002"),
            *("--rounds", "1", "--places", "disk", "--contenders", "ciuic,cp -a"),
            *("--disk", str(short_tmp), "--results", str(short_tmp / "results"), "--name", "smoke"),
        ],
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": "tests", "CIUIC_BENCH_WARM": "1"},
        capture_output=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    document = json.loads((short_tmp / "results/smoke.json").read_text())
    found = {(sample["figure"], sample["contender"]) for sample in document["samples"]}
    both = {"first capture", "restore", "restore over existing", "restore of one directory"}
    # A contender that fails has no samples, and the program says why.
    said = (done.stdout + done.stderr).decode()
    assert {(figure, name) for figure in both for name in ("ciuic", "cp -a")} <= found, said
    own = {
        "incremental",
        "nothing changed",
        "restore in place, under protection",
        "prune of half of 50 snapshots",
    }
    assert {(figure, "ciuic") for figure in own} <= found
    assert not {(figure, "cp -a") for figure in own} & found
    assert "≤ 1.1 of cp -a: " in (short_tmp / "results/smoke.md").read_text()


@pytest.mark.mount
def test_a_contender_that_hangs_is_noticed_and_taken_away(short_tmp: Path) -> None:
    """A server that stops answering fails its step in time; closing the lane frees waiting calls."""
    suite = data.SUITE._replace(steps=tuple(step._replace(limit_seconds=1) for step in data.SUITE.steps))
    (contender,) = (one for one in contenders({}) if one.name == "ciuic pyfuse3")
    place = Place(short_tmp / "backing", short_tmp, 0.001)
    place.backing.mkdir()
    lane = Lane(contender, suite, place, short_tmp)
    try:
        lane.furnish()
        assert lane.served is not None
        os.kill(lane.served.server_pid, signal.SIGSTOP)
        with pytest.raises(StepFailed, match="no answer"):
            lane.measure(0)
    finally:
        lane.close()
    assert not leftovers.mounts_below((short_tmp,))
