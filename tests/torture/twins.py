"""SIGKILL of overlay workers under a random job that is compared with its twin (support/twin_job.py).

There are several roots, so that more workers die per second than of one root. No call may differ from its
twin on a plain directory, whatever the job was doing when the worker died, and at the end both trees are the same.

    make torture SECONDS=5400 ARGS=twins        some 10,000 kills on two processors
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from itertools import chain
from pathlib import Path

from support import twin_job
from support.site import Site, site_in
from support.until import until
from torture.figure import Figure

from ciuic.errors import CiuicError

_ROOTS = 3
_LONGEST_PAUSE_SECONDS = 0.25


def run(seconds: float, seed: int, *, kills: int = 0) -> list[Figure]:
    """Kill until the time is over, or until so many workers are dead."""
    top = Path(tempfile.mkdtemp())
    with site_in(top, driver="kernel") as site:
        roots = [site.root(f"r{number}") for number in range(_ROOTS)]
        plains = [top / f"plain{number}" for number in range(_ROOTS)]
        for plain in plains:
            plain.mkdir()
        site.start()
        # Into files: a job that fills a pipe would not end, and kills without a job prove nothing.
        said_by = [(top / f"job{number}.out", top / f"job{number}.err") for number in range(_ROOTS)]
        jobs = [
            _started([str(root), str(plain), f"{seed}{number}", str(top / "stop")], *report)
            for number, (root, plain, report) in enumerate(zip(roots, plains, said_by, strict=True))
        ]
        gaps, stuck = [list[float]() for _ in roots], list[str]()
        killers = [
            threading.Thread(
                target=_kill, args=(site, root, jobs, random.Random(seed + at), time.monotonic() + seconds, kills, gaps, at, stuck)
            )
            for at, root in enumerate(roots)
        ]  # fmt: skip
        try:
            for killer in killers:
                killer.start()
            for killer in killers:
                killer.join()
            (top / "stop").touch()
            for job in jobs:
                job.wait(300)
            outputs = [(out.read_text(), err.read_text()) for out, err in said_by]
        finally:
            for job in jobs:
                job.kill()
                job.wait()
        site.stop()
        logged = site.log.read_text().splitlines()
    lost = [line for line in logged if "handle_lost" in line or "not_settled" in line]
    stale = "\n".join(line for line in logged if "stale_answer" in line)
    differences = [
        f"{error}\n{stale}" for job, (_, error) in zip(jobs, outputs, strict=True) if job.returncode
    ]
    if not (differences or lost or stuck):
        # After a failure it is kept for examination.
        shutil.rmtree(top, ignore_errors=True)
    report = [json.loads(output) for output, _ in outputs if output]
    killed = sum(map(len, gaps))
    gap = statistics.median(chain.from_iterable(gaps)) if killed else 0
    longest = max((call[2] for job in report for call in job["long"]), default=0.0)
    sample = sorted(seconds for job in report for seconds in job["sample"])
    return [
        Figure("workers killed", killed, tuple(stuck) if killed else ("nothing was killed", *stuck)),
        Figure("ms from a kill until the daemon names a successor, median", round(1000 * gap)),
        Figure(
            "operations compared with a plain directory's",
            sum(job["operations"] for job in report),
            tuple(differences),
        ),
        Figure("handles that a successor could not open", len(lost), tuple(lost[:3])),
        Figure("system calls of the jobs", sum(job["calls"] for job in report)),
        Figure("longest system call, ms", round(1000 * longest)),
        Figure("median system call, µs", round(1e6 * statistics.median(sample)) if sample else 0),
        Figure("99th percentile, µs", round(1e6 * sample[len(sample) * 99 // 100]) if sample else 0),
    ]


def _started(arguments: list[str], out: Path, err: Path) -> subprocess.Popen[bytes]:
    with out.open("wb") as stdout, err.open("wb") as stderr:
        return subprocess.Popen([sys.executable, twin_job.__file__, *arguments], stdout=stdout, stderr=stderr)


def _kill(
    site: Site,
    root: Path,
    jobs: list[subprocess.Popen[bytes]],
    rng: random.Random,
    until_time: float,
    kills: int,
    gaps: list[list[float]],
    at: int,
    stuck: list[str],
) -> None:
    """End the worker of ``root`` at random moments until time, kills or a job are at an end."""
    while time.monotonic() < until_time and (not kills or sum(map(len, gaps)) < kills):
        if any(job.poll() is not None for job in jobs):
            return
        before = _worker_pid(site, root)
        if not before:
            time.sleep(0.01)
            continue
        time.sleep(rng.uniform(0, _LONGEST_PAUSE_SECONDS))
        try:
            os.kill(before, signal.SIGKILL)
        except ProcessLookupError:
            continue
        killed = time.monotonic()
        try:
            until("a successor", lambda before=before: _worker_pid(site, root) not in (0, before))  # type: ignore[misc]
        except (AssertionError, TimeoutError) as error:
            # An exception in a thread would be lost.
            stuck.append(f"{root}: {error}")
            return
        finally:
            gaps[at].append(time.monotonic() - killed)


def _worker_pid(site: Site, root: Path) -> int:
    """Return the pid of the worker that serves the root; 0 without one or an answer in time."""
    try:
        return site.root_status(root).worker_pid
    except (CiuicError, OSError):
        return 0
