"""Holders of a root's session without systemd (daemon, worker and keeper), killed in pairs under a job."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from support import surviving_job
from support.injection import keeper_pids
from support.site import Site, ended
from support.until import until

from ciuic.daemon.base.runtime import RuntimeDirectory
from ciuic.protocol.worker_client import peer_pid

PAIRS = (("daemon", "worker"), ("daemon", "keeper"), ("worker", "keeper"))
_LONGEST_PAUSE_SECONDS = 0.5
_JOBS = 2


class Outcome(NamedTuple):
    """Processes killed, and the jobs' results."""

    kills: dict[tuple[str, str], int]
    rounds: int
    calls: int
    longest_seconds: float
    """Longest of the jobs' rounds, dozens of calls each."""
    failures: list[str]


def sessions_held_by(pid: int) -> int:
    """Return how many descriptors of FUSE connections a process has."""
    held = 0
    # The process has ended.
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                held += os.readlink(f"/proc/{pid}/fd/{name}") == "/dev/fuse"
    return held


class Holders:
    """Holders of one root of a site."""

    def __init__(self, site: Site, root: Path) -> None:
        self._site = site
        self._control = RuntimeDirectory(site.top / "run").worker_socket(str(root))

    def pids(self) -> dict[str, int]:
        """Return the pids of living processes that hold the session."""
        found = {}
        if self._site.process is not None:
            found["daemon"] = self._site.process.pid
        worker = peer_pid(self._control)
        if worker is not None:
            found["worker"] = worker
        for keeper in keeper_pids(self._site.top / "run"):
            found["keeper"] = keeper
        return {name: pid for name, pid in found.items() if sessions_held_by(pid)}

    def complete(self) -> dict[str, int]:
        """Wait until all three hold the session."""
        until("three holders", lambda: len(self.pids()) == 3)
        return self.pids()

    def kill(self, *names: str) -> None:
        """Send SIGKILL to each, without waiting for the end of one before the next."""
        pids = self.complete()
        for name in names:
            os.kill(pids[name], signal.SIGKILL)
        if "daemon" in names:
            self._site.kill()
        for name in names:
            until(f"the end of the {name}", partial(ended, pids[name]))


def kill_pairs(site: Site, root: Path, pairs: Iterable[tuple[str, str]], rng: random.Random) -> Outcome:
    """Kill two at a time, in random order, under jobs that check every result; then start the rest.

    ``site`` has a daemon; when this returns it has one again.
    """
    stop, holders = site.top / "stop", Holders(site, root)
    command = [sys.executable, surviving_job.__file__, str(root)]
    jobs = [
        subprocess.Popen([*command, str(number), str(stop)], stdout=subprocess.PIPE, text=True)
        for number in range(_JOBS)
    ]
    kills = dict.fromkeys(PAIRS, 0)
    try:
        until("the jobs' work", lambda: (root / f"best{_JOBS - 1}").exists())
        for pair in pairs:
            time.sleep(rng.uniform(0, _LONGEST_PAUSE_SECONDS))
            holders.kill(*rng.sample(pair, 2))
            kills[pair] += 1
            if site.process is None:
                time.sleep(rng.uniform(0, _LONGEST_PAUSE_SECONDS))
                site.start()
        holders.complete()
        stop.touch()
        outputs = [job.communicate(timeout=120)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    reports = [json.loads(output) for output in outputs if output]
    return Outcome(
        kills,
        sum(job["rounds"] for job in reports),
        sum(job["calls"] for job in reports),
        max((job["longest_seconds"] for job in reports), default=0.0),
        [f"job {number}: exit {job.returncode}" for number, job in enumerate(jobs) if job.returncode],
    )
