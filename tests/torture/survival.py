"""SIGKILL of the overlay worker, repeatedly, under jobs that check every result of every call.

A real daemon with the kernel driver; its workers are killed at random moments of everything they do,
takeovers included. No job may see an error or a wrong byte; afterwards the mount shows the directory's
content. The report has how long single system calls of the jobs waited, with and without a kill, and where
the time went (support/stalls.py).

    CIUIC_SURVIVAL_FILES=1000000 make torture SECONDS=600 ARGS=survival      (files that the kernel has looked up;
1000)
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support import stalls, surviving_job
from support.site import Site, site_in, until
from support.stalls import LongCall
from torture.figure import Figure

_JOBS = 3
_LONGEST_PAUSE_SECONDS = 0.4
_FILES_IN_A_DIRECTORY = 1000


def run(seconds: float, seed: int) -> list[Figure]:
    """Kill workers until the time is over."""
    rng, top = random.Random(seed), Path(tempfile.mkdtemp())
    with site_in(top, driver="kernel") as site:
        root = site.root("r")
        tree = _tree(root, int(os.environ.get("CIUIC_SURVIVAL_FILES", "1000")))
        site.start()
        looked_up = _look_up(tree)
        command = [sys.executable, surviving_job.__file__, str(root)]
        jobs = [
            subprocess.Popen([*command, str(number), str(top / "stop")], stdout=subprocess.PIPE, text=True)
            for number in range(_JOBS)
        ]
        try:
            killed, busy = _killing(site, root, rng, time.monotonic() + seconds)
            (top / "stop").touch()
            outputs = [job.communicate(timeout=300)[0] for job in jobs]
        finally:
            for job in jobs:
                job.kill()
                job.wait()
        failed = [f"job {number}: exit {job.returncode}" for number, job in enumerate(jobs) if job.returncode]
        mounted = {name: (root / name).read_bytes() for name in os.listdir(root) if (root / name).is_file()}
        site.stop()
    different = [name for name, data in mounted.items() if (root / name).read_bytes() != data]
    reports = [json.loads(output) for output in outputs if output]
    calls = [LongCall(*call) for job in reports for call in job["long"]]
    all_stalls = stalls.stalls(stalls.takeovers(killed, site.log), calls)
    longest_ms = round(1000 * max((job["longest_seconds"] for job in reports), default=0))
    return [
        Figure("workers killed", len(killed), () if killed else ("nothing was killed",)),
        Figure("of them with requests under way", busy, () if busy else ("nothing was going on",)),
        Figure(
            "rounds of the jobs, every result checked", sum(job["rounds"] for job in reports), tuple(failed)
        ),
        Figure("system calls of the jobs", sum(job["calls"] for job in reports)),
        Figure("files that the kernel had looked up before", looked_up),
        Figure("files compared with the directory at the end", len(mounted), tuple(different)),
        *(Figure(name, count) for name, count in stalls.lines(*all_stalls)),
        Figure("longest round of a job with kills in it, ms", longest_ms),
    ]


def _tree(root: Path, files: int) -> Path:
    """Make the tree before anything is mounted over it."""
    top = root / "tree"
    for first in range(0, files, _FILES_IN_A_DIRECTORY):
        folder = top / str(first)
        folder.mkdir(parents=True)
        for number in range(first, min(first + _FILES_IN_A_DIRECTORY, files)):
            os.close(os.open(folder / f"{number:08d}.bin", os.O_WRONLY | os.O_CREAT))
    return top


def _look_up(tree: Path) -> int:
    """Look every file up by its name, so that the kernel knows it."""
    return sum(
        os.stat(entry.path).st_nlink for folder in os.scandir(tree) for entry in os.scandir(folder.path)
    )


def _killing(
    site: Site, root: Path, rng: random.Random, until_time: float
) -> tuple[list[tuple[int, float]], int]:
    """Kill workers; return when, and how many of them after progress of the jobs since the last."""
    kills: list[tuple[int, float]] = []
    busy = 0
    until("the jobs' work", lambda: (root / f"best{_JOBS - 1}").exists())
    while time.monotonic() < until_time:
        before = site.root_status(root)
        if not before.worker_pid:
            time.sleep(0.01)
            continue
        time.sleep(rng.uniform(0, _LONGEST_PAUSE_SECONDS))
        busy += site.root_status(root).requests > before.requests
        now = time.time()
        try:
            os.kill(before.worker_pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        kills.append((before.worker_pid, now))
        until(
            "a successor",
            lambda before=before: site.root_status(root).worker_pid not in (0, before.worker_pid),
        )
    return kills, busy
