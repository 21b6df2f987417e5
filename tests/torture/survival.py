"""SIGKILL of the overlay worker, repeatedly, under jobs that check every result of every call.

A real daemon with the kernel driver; its workers are killed at random moments of everything they do,
takeovers included. No job may see an error or a wrong byte; afterwards the mount shows the directory's
content. The report has how long single system calls of the jobs waited, with and without a kill, and where
the time went.

    CIUIC_SURVIVAL_FILES=1000000 make torture SECONDS=600 ARGS=survival      (files that the kernel has looked up;
1000)

A call counts as *with a kill* when it was under way between the kill and a moment after the successor served;
every other long call shows what the machine does without any kill, and so how much is noise.
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
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import NamedTuple

from support import surviving_job
from support.site import Site, site_in
from support.until import until
from torture.figure import Figure

_SETTLED_SECONDS = 0.05
"""Time after a successor served during which it still has more to answer than usual."""


class LongCall(NamedTuple):
    """System call of a job."""

    name: str
    began: float
    seconds: float

    @property
    def ended(self) -> float:
        return self.began + self.seconds


class Takeover(NamedTuple):
    """Times of a successor's log, on the wall clock; 0 where the log has none."""

    killed: float
    noticed: float
    resent: float
    served: float
    stages_ms: dict[str, float]
    """Stages of the successor, since the request to begin."""


class Stall(NamedTuple):
    """Longest call that a kill made some job wait in."""

    takeover: Takeover
    longest: LongCall
    first_answer: float


def takeovers(killed: Iterable[tuple[int, float]], log: Path) -> list[Takeover]:
    """Return the takeovers; ``killed`` has each worker's pid and the time of its SIGKILL."""
    died: dict[int, float] = {}
    resent: list[tuple[float, dict[str, float]]] = []
    mounted: list[float] = []
    for line in log.read_text(errors="replace").splitlines():
        if '"event": "' not in line or not line.startswith("{"):
            continue
        event = json.loads(line)
        if event["event"] == "worker_died":
            died[event["pid"]] = _seconds(event)
        elif event["event"] == "session_taken_over":
            resent.append((_seconds(event), event.get("stages_ms", {})))
        elif event["event"] == "root_mounted":
            mounted.append(_seconds(event))
    found = []
    for pid, at in killed:
        when, stages = next(((time, stages) for time, stages in resent if time > at), (0.0, {}))
        served = next((time for time in mounted if time > at), 0.0)
        found.append(Takeover(at, died.get(pid, 0.0), when, served, stages))
    return found


def _seconds(event: dict[str, str]) -> float:
    return datetime.fromisoformat(event["timestamp"].replace("Z", "+00:00")).timestamp()


def stalls(found: Sequence[Takeover], calls: Sequence[LongCall]) -> tuple[list[Stall], list[LongCall]]:
    """Return a stall for each kill that made a call wait, and the long calls that no kill touched."""
    untouched = set(range(len(calls)))
    result: list[Stall] = []
    for takeover in found:
        until = max(takeover.served, takeover.resent, takeover.killed) + _SETTLED_SECONDS
        here = [
            index for index, call in enumerate(calls) if call.began < until and call.ended > takeover.killed
        ]
        untouched.difference_update(here)
        waited = [calls[index] for index in here]
        if waited:
            answers = [call.ended for call in waited if call.ended > takeover.resent]
            longest = max(waited, key=lambda call: call.seconds)
            result.append(Stall(takeover, longest, min(answers, default=0.0)))
    return result, [calls[index] for index in sorted(untouched)]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile; 0 for an empty sequence."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def lines(all_stalls: Sequence[Stall], untouched: Sequence[LongCall]) -> list[tuple[str, int]]:
    """Return the figures, each with what it counts."""
    waits = [1000 * stall.longest.seconds for stall in all_stalls]
    quiet = [1000 * call.seconds for call in untouched]
    made = [
        ("longest single call with a kill, ms: median of the kills", round(quantile(waits, 0.5))),
        ("  p99 of the kills", round(quantile(waits, 0.99))),
        ("  the longest of all", round(max(waits, default=0))),
        ("longest single call without any kill, ms", round(max(quiet, default=0))),
        ("  calls over 50 ms without any kill", sum(wait > 50 for wait in quiet)),
    ]
    whole = [stall for stall in all_stalls if stall.takeover.noticed and stall.takeover.resent]
    for name, parts in (
        ("noticed by the daemon", [stall.takeover.noticed - stall.takeover.killed for stall in whole]),
        ("requests asked for again", [stall.takeover.resent - stall.takeover.killed for stall in whole]),
        (
            "first answer",
            [stall.first_answer - stall.takeover.killed for stall in whole if stall.first_answer],
        ),
    ):
        made.append((f"ms from kill to: {name}, median", round(1000 * quantile(parts, 0.5))))
        made.append(("  p99", round(1000 * quantile(parts, 0.99))))
    stages = [stall.takeover.stages_ms for stall in whole]
    for name in dict.fromkeys(name for stage in stages for name in stage):
        values = [stage[name] for stage in stages if name in stage]
        made.append((f"successor: ms until {name}, median", round(median(values))))
        made.append(("  p99", round(quantile(values, 0.99))))
    return made


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
    all_stalls = stalls(takeovers(killed, site.log), calls)
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
        *(Figure(name, count) for name, count in lines(*all_stalls)),
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
