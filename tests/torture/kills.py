"""SIGKILL at random moments, under load, of daemon, worker, capture, restore, prune and check.

A promise of the job is a file that was synced with its directory, through the mount. A promise of ciuic is a
snapshot reported committed, or one whose id was returned: it is delivered under this id whatever was killed
before its capture. After each kill everything is put back to work, and every promise is checked.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from support.live import Live, installed
from support.promises import PromisingJob, broken
from support.trees import assert_same, manifest
from support.until import until
from torture.figure import Figure

_KILLS_A_ROUND = 3
"""Kills before each check, which takes longer than a kill."""
VICTIMS = ("worker", "capture", "daemon", "restore", "prune", "check")


def run(seconds: float, seed: int, victims: Sequence[str] = VICTIMS) -> list[Figure]:
    """Run rounds until the time is over, with each of ``victims`` in turn at least once."""
    top = Path(tempfile.mkdtemp())
    root = top / "root"
    root.mkdir()
    (top / "c").mkdir()
    with Live(top / "c") as live:
        live.run("protect", str(root))
        live.start(root)
        until("the first snapshot", live.list)
        with PromisingJob(root, seed) as job:
            killing = Killing(live, root, job, random.Random(seed), top / "out", victims)
            end, rounds = time.monotonic() + seconds, 0
            while rounds < len(victims) or time.monotonic() < end:
                killing.round(victims[rounds % len(victims)])
                rounds += 1
        live.stop()
        until("the last worker's end", lambda: not live.processes())
        promises = job.made()
        killing.failures += broken(promises, root)
    return killing.figures(rounds, len(promises))


class Killing:
    """Rounds of kills, and their findings."""

    def __init__(
        self,
        live: Live,
        root: Path,
        job: PromisingJob,
        rng: random.Random,
        out: Path,
        victims: Sequence[str] = VICTIMS,
    ) -> None:
        self.failures: list[str] = []
        self._live, self._root, self._job, self._rng, self._out = live, root, job, rng, out
        self._committed: set[str] = set()
        self._promised: set[str] = set()
        """Ids of requested snapshots for which no caller waited."""
        self._delivered = 0
        self._busy = dict.fromkeys(victims, 0)
        self._restored = 0
        self._patience_seconds = 0.6

    def figures(self, rounds: int, promises: int) -> list[Figure]:
        """Return the table. A victim that was never killed at work is a failure of the torture itself."""
        idle = [f"no {victim} was killed at work" for victim, count in self._busy.items() if not count]
        return [
            Figure("kill points survived", sum(self._busy.values()), tuple(self.failures + idle)),
            Figure("kills that came too late", rounds * _KILLS_A_ROUND - sum(self._busy.values())),
            Figure("promises made, synced through the mount, and kept", promises),
            Figure("snapshots restored and equal to the root", self._restored),
            Figure("snapshots promised before a kill, and delivered under their id", self._delivered),
        ]

    def round(self, victim: str) -> None:
        """Kill, each time with the job at work again, then check."""
        actions: dict[str, Callable[[], bool]] = {
            "worker": self._kill_worker,
            "capture": self._kill_capture,
            "daemon": self._kill_daemon,
            "restore": self._kill_restore,
            "prune": lambda: self._kill_command("prune"),
            "check": lambda: self._kill_command("check", "--repair"),
        }
        for _ in range(_KILLS_A_ROUND):
            already = len(self._job.made())
            until("a promise since the last kill", lambda already=already: len(self._job.made()) > already)
            self._busy[victim] += actions[victim]()
        try:
            self._look(victim)
        except (AssertionError, TimeoutError) as error:
            self.failures.append(f"after {victim} was killed: {error}")

    # -- killing

    def _kill_worker(self) -> bool:
        taker = self._take()
        time.sleep(self._rng.random() * 0.5)
        pid = self._worker_pid()
        if pid:
            os.kill(pid, signal.SIGKILL)
            until("a new worker", lambda: self._worker_pid() not in (0, pid))
            self._live.wait_mounted(self._root)
        self._ended(taker)
        return bool(pid)

    def _kill_daemon(self) -> bool:
        assert self._live.daemon is not None
        taker = self._take()
        time.sleep(self._rng.random() * 0.5)
        self._live.daemon.kill()
        self._live.daemon.wait()
        if taker is not None:
            taker.communicate(timeout=120)
        self._live.start(self._root)
        return True

    def _kill_capture(self) -> bool:
        taker = self._start("snapshot", "--wait")
        until("a capture", lambda: self._captures() or taker.poll() is not None)
        time.sleep(self._rng.random() * 0.3)
        captures = self._captures()
        for pid in captures:
            os.kill(pid, signal.SIGKILL)
        self._ended(taker)
        return bool(captures)

    def _kill_restore(self) -> bool:
        newest = self._live.list()[0].id
        busy = self._kill_command(*self._restore(newest), self._OVERWRITE)
        self._live.run(*self._restore(newest), self._OVERWRITE)
        shutil.rmtree(self._out)
        return busy

    _OVERWRITE = "--overwrite"

    def _kill_command(self, *command: str) -> bool:
        process = self._start(*command)
        time.sleep(self._rng.random() * self._patience_seconds)
        alive = process.poll() is None
        if not alive:
            # This machine is faster than expected.
            self._patience_seconds *= 0.6
        process.kill()
        process.communicate()
        return alive

    def _take(self) -> subprocess.Popen[bytes] | None:
        """Take a snapshot and wait for it during the kill, or one whose id is returned before, or none."""
        chance = self._rng.random()
        if chance < 0.4:
            return self._start("snapshot", "--wait")
        if chance < 0.8:
            done = self._live.run("snapshot", expect=None)
            self._promised |= {done.stdout.decode().strip()} if done.returncode == 0 else set()
        return None

    # -- looking

    def _look(self, victim: str) -> None:
        """Check promises, listed snapshots, and that a new snapshot equals the root."""
        self.failures += [
            f"after {victim} was killed: {text}" for text in broken(self._job.made(), self._root)
        ]
        listed = {row.id for row in self._live.list()}
        if lost := self._committed - listed:
            self.failures.append(f"after {victim} was killed: {sorted(lost)} are no longer listed")
        self._look_for_promised(victim)
        with self._job.paused():
            snapshot = until("a snapshot", self._try_snapshot)
            self._committed.add(snapshot)
            self._live.run(*self._restore(snapshot))
            assert_same(manifest(self._root), manifest(self._out / self._root.name))
        self._restored += 1
        shutil.rmtree(self._out)
        done = self._live.run("verify", "--all", "--checksum", expect=None)
        if done.returncode:
            self.failures.append(f"after {victim} was killed verify says {done.stdout[-400:]!r}")

    def _look_for_promised(self, victim: str) -> None:
        """Check that every id that was returned is listed, now or soon, and not as lost."""
        until("the promised snapshots", lambda: not self._promised - self._known())
        lost = {row["id"]: row["reason"] for row in self._live.json("list")["lost"]}
        broken_promises = {id_: lost[id_] for id_ in self._promised & lost.keys()}
        if broken_promises:
            self.failures.append(f"after {victim} was killed: promised and lost: {broken_promises}")
        self._delivered += len(self._promised - lost.keys())
        self._committed |= self._promised - lost.keys()
        self._promised.clear()

    def _known(self) -> set[str]:
        document = self._live.json("list")
        return {row["id"] for row in document["snapshots"] + document["lost"]}

    def _try_snapshot(self) -> str | None:
        done = self._live.run("snapshot", "--wait", expect=None)
        return done.stdout.decode().strip() if done.returncode == 0 else None

    # -- helpers

    def _restore(self, snapshot: str) -> tuple[str, ...]:
        return ("restore", "-s", snapshot, "-p", str(self._root), "-d", str(self._out))

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [str(installed()), *command], env=self._live.env,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def _ended(self, taker: subprocess.Popen[bytes] | None) -> None:
        """Record a snapshot reported committed beside a kill: it must stay."""
        if taker is not None:
            id_ = taker.communicate(timeout=120)[0].decode().strip()
            self._committed |= {id_} if taker.returncode == 0 else set()

    def _worker_pid(self) -> int:
        status = self._live.status()
        return int(status["roots"][0]["worker_pid"] or 0) if status else 0

    def _captures(self) -> list[int]:
        return [
            pid for pid, line in self._live.processes().items() if "-m ciuic.daemon.capture.process " in line
        ]
