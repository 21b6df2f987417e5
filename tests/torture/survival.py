"""SIGKILL of the overlay worker, again and again, under jobs that check every result of every call.

A real daemon with the kernel driver; its workers are killed at random moments of everything they do, takeovers included. No
job may see an error or a wrong byte, nor wait longer than a second; afterwards the mount shows what is in the directory.
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

from support import surviving_job
from support.site import Site, site_in, until
from torture.figure import Figure

_JOBS = 3
_LONGEST_PAUSE_SECONDS = 0.4


def run(seconds: float, seed: int) -> list[Figure]:
    """Kills until the time is over."""
    rng, top = random.Random(seed), Path(tempfile.mkdtemp())
    with site_in(top) as site:
        site.driver = "kernel"
        root = site.root("r")
        site.start()
        command = [sys.executable, surviving_job.__file__, str(root)]
        jobs = [
            subprocess.Popen([*command, str(number), str(top / "stop")], stdout=subprocess.PIPE, text=True)
            for number in range(_JOBS)
        ]
        try:
            kills, busy = _killing(site, root, rng, time.monotonic() + seconds)
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
    said = [json.loads(output) for output in outputs if output]
    rounds = sum(job["rounds"] for job in said)
    longest_ms = round(1000 * max((job["longest_seconds"] for job in said), default=0))
    return [
        Figure("workers killed", kills, () if kills else ("nothing was killed",)),
        Figure("of them with requests under way", busy, () if busy else ("nothing was going on",)),
        Figure("rounds of the jobs, every result checked", rounds, tuple(failed)),
        Figure("files compared with the directory at the end", len(mounted), tuple(different)),
        Figure("longest round of a job with kills in it, ms", longest_ms),
    ]


def _killing(site: Site, root: Path, rng: random.Random, until_time: float) -> tuple[int, int]:
    """How many were killed, and how many of them while the jobs had done something since the last one."""
    kills = busy = 0
    until("the jobs' work", lambda: (root / f"best{_JOBS - 1}").exists())
    while time.monotonic() < until_time:
        before = site.root_status(root)
        if not before.worker_pid:
            time.sleep(0.01)
            continue
        time.sleep(rng.uniform(0, _LONGEST_PAUSE_SECONDS))
        busy += site.root_status(root).requests > before.requests
        try:
            os.kill(before.worker_pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        kills += 1
        until(
            "a successor",
            lambda before=before: site.root_status(root).worker_pid not in (0, before.worker_pid),
        )
    return kills, busy
