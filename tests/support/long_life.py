"""Months of a training machine in minutes: a fake clock, and otherwise the real code.

Hourly snapshots of a root with an overlay core over it (no mount), captured in tracked mode into a real
repository; a prune by the retention rules every night. Measured is what drifts in long-lived things: the
store, memory, descriptors, and the time that prune and list take.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timezone
from pathlib import Path
from typing import Any

import xxhash
from support.core_driver import ROOT, open_backing
from support.stored import read_back

from ciuic.daemon.capture.job import CaptureJob, RootJob
from ciuic.daemon.capture.process import Report, run_job
from ciuic.fuse_layer.core.overlay_core import ROOT_ID, OverlayCore
from ciuic.maintenance.prune import prune
from ciuic.maintenance.verify import verify_snapshots
from ciuic.repository import Repository
from ciuic.retention import RetentionPolicy
from ciuic.types import SnapshotId

BLOCK = 4096
HOUR_NS = 3600 * 10**9
START_NS = 1_735_689_600 * 10**9
CHECKPOINTS_KEPT = 4
POLICY = RetentionPolicy(
    keep_within_seconds=86400, keep_last=3, keep_hourly=24, keep_daily=7, keep_weekly=4, keep_monthly=12
)
_SESSION = "7" * 32
_LOGS = (b"train.log", b"gpu.log", b"events")
_ROOT_PATH = b"/training"


@dataclass
class Day:
    """Measurements of one day, after its prune."""

    kept: int
    stored_bytes: int
    garbage_bytes: int
    """Bytes of the store that no kept snapshot needs."""
    resident_bytes: int
    descriptors: int
    prune_seconds: float
    list_seconds: float


@dataclass
class Life:
    """Results of a life."""

    snapshots: int = 0
    pruned: int = 0
    verified: int = 0
    compared: int = 0
    days: list[Day] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def excess(self) -> float:
        """Return the largest ratio of the store after a prune to what the kept snapshots needed then."""
        return max(day.stored_bytes / (day.stored_bytes - day.garbage_bytes) for day in self.days)

    def drift(self, what: Callable[[Day], float], warm_up_days: int) -> float:
        """Return the median of the last quarter over that of the first quarter after the warm-up."""
        days = self.days[warm_up_days:]
        quarter = max(1, len(days) // 4)
        return _median([what(day) for day in days[-quarter:]]) / max(
            1e-9, _median([what(day) for day in days[:quarter]])
        )


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def live(top: Path, hours: int, seed: int, go_on: Callable[[], bool] = lambda: True) -> Life:
    """Simulate so many hours; end earlier when ``go_on`` returns False. ``top`` is an empty directory."""
    backing = top / "backing"
    backing.mkdir()
    with Repository.create(top / "repository", block_size=BLOCK):
        pass
    fd = open_backing(backing)
    core = OverlayCore(fd, session=_SESSION, block_size=BLOCK)
    try:
        return _Machine(top, backing, fd, core, random.Random(seed)).run(hours, go_on)
    finally:
        core.close()
        os.close(fd)


class _Machine:
    def __init__(self, top: Path, backing: Path, fd: int, core: OverlayCore, dice: random.Random) -> None:
        self.repository = top / "repository"
        self.backing = backing
        self.fd = fd
        self.core = core
        self.dice = dice
        self.life = Life()
        self.taken: dict[SnapshotId, dict[bytes, Any]] = {}
        """Digests of the content of each kept snapshot; copies would count as measured memory."""
        self.checkpoints: list[bytes] = []

    def run(self, hours: int, go_on: Callable[[], bool]) -> Life:
        self.mkdir(b"logs")
        self.mkdir(b"run-0")
        self.write(b"", b"dataset", self.dice.randbytes(64 * BLOCK))
        for hour in range(hours):
            if not go_on():
                break
            self.work(hour)
            self.snapshot(hour)
            if hour % 24 == 23:
                self.night(hour)
        self.look_back()
        return self.life

    # --- the job's changes, through the core

    def folder(self, name: bytes) -> int:
        return self.core.names.lookup(ROOT_ID, name).node if name else ROOT_ID

    def mkdir(self, name: bytes) -> None:
        self.forget(self.core.names.mkdir(ROOT_ID, name, 0o755, ROOT).node)

    def forget(self, node: int) -> None:
        if node != ROOT_ID:
            self.core.nodes.forget(node, 1)

    def write(self, folder: bytes, name: bytes, data: bytes, offset: int = 0) -> None:
        """Write to the file, created if need be; offset -1 appends."""
        parent = self.folder(folder)
        try:
            attr = self.core.names.lookup(parent, name)
            handle = self.core.files.open(attr.node, os.O_RDWR)
        except FileNotFoundError:
            attr, handle = self.core.names.create(parent, name, 0o644, os.O_RDWR | os.O_EXCL, ROOT)
        self.core.files.write(handle, attr.st.st_size if offset < 0 else offset, data)
        self.core.files.release(handle)
        self.forget(attr.node)
        self.forget(parent)

    def work(self, hour: int) -> None:
        """Do an hour of training: logs grow, checkpoints come and go, and sometimes more changes."""
        dice = self.dice
        for name in _LOGS:
            self.write(b"logs", name, b"step %d loss %f\n" % (hour, dice.random()) * 20, -1)
        self.write(b"", b"dataset", dice.randbytes(BLOCK), dice.randrange(64) * BLOCK)
        run = b"run-%d" % (hour // 24 // 3)
        if hour % 72 == 0 and hour:
            self.core.names.rename(ROOT_ID, b"run-%d" % (hour // 72 - 1), ROOT_ID, run, 0)
        name = b"checkpoint-%d" % hour
        self.write(run, b"saving", dice.randbytes(8 * BLOCK + 11))
        parent = self.folder(run)
        self.core.names.rename(parent, b"saving", parent, name, 0)
        self.checkpoints.append(name)
        if len(self.checkpoints) > CHECKPOINTS_KEPT:
            self.core.names.unlink(parent, self.checkpoints.pop(0))
        self.forget(parent)
        if hour % 168 == 167:
            logs = self.folder(b"logs")
            for log in _LOGS:
                self.core.names.rename(logs, log, logs, log + b".1", 0)
            self.forget(logs)

    # --- ciuic's work

    def snapshot(self, hour: int) -> None:
        epoch = self.core.cut().epoch
        content = _read(self.backing)
        with Repository.open(self.repository) as repository:
            id_ = repository.snapshots.new_id()
        job = CaptureJob(
            repository=str(self.repository),
            id=id_,
            time_ns=START_NS + hour * HOUR_NS,
            host="machine",
            roots=(
                RootJob(
                    path=_ROOT_PATH, backing_fd=self.fd, session=_SESSION, epoch=epoch, worker_pid=os.getpid()
                ),
            ),
        )
        done = run_job(job, Report(lambda _message: None))
        self.core.committed(epoch)
        modes = set(done.modes.values())
        if modes != {"tracked"} and hour:
            self.life.failures.append(f"hour {hour}: captured in mode {modes}")
        self.life.snapshots += 1
        self.taken[id_] = content

    def night(self, hour: int) -> None:
        with Repository.open(self.repository) as repository:
            started = time.perf_counter()
            report = prune(repository, POLICY, now_ns=START_NS + hour * HOUR_NS, tz=timezone.utc)
            prune_seconds = time.perf_counter() - started
        with Repository.open(self.repository) as repository:
            started = time.perf_counter()
            listed = repository.snapshots.list()
            list_seconds = time.perf_counter() - started
            stored_bytes = repository.stored_bytes()
        for id_ in report.removed:
            del self.taken[id_]
        self.life.pruned += len(report.removed)
        if {info.id for info in listed} != self.taken.keys():
            self.life.failures.append(f"hour {hour}: the list is not what retention kept")
        resident_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        descriptors = len(os.listdir("/proc/self/fd"))
        self.life.days.append(
            Day(
                len(listed),
                stored_bytes,
                report.garbage_bytes,
                resident_bytes,
                descriptors,
                prune_seconds,
                list_seconds,
            )
        )

    def look_back(self) -> None:
        """Check that every kept snapshot verifies, byte for byte, and reads as the root was at its cut."""
        with Repository.open(self.repository) as repository:
            result = verify_snapshots(repository, checksum=True)
            self.life.verified = len(result.snapshots)
            self.life.failures += [f"damage: {damage}" for damage in result.damages]
            for id_, content in self.taken.items():
                self.life.compared += 1
                if _digests(read_back(repository, id_)) != content:
                    self.life.failures.append(f"{id_} is not what the root was at its cut")


def _read(folder: Path) -> dict[bytes, Any]:
    """Return the directory as `support.stored.read_back` gives a snapshot, with a digest for each content."""
    found: dict[bytes, Any] = {}
    for path in folder.iterdir():
        if path.name == ".ciuic-state":
            continue
        found[os.fsencode(path.name)] = _read(path) if path.is_dir() else _digest(path.read_bytes())
    return found


def _digests(tree: dict[bytes, Any]) -> dict[bytes, Any]:
    return {
        name: _digests(value) if isinstance(value, dict) else _digest(value) for name, value in tree.items()
    }


def _digest(content: bytes) -> bytes:
    return xxhash.xxh3_128(content).digest()
