"""The hold: for how long a cut stops what changes, with a large tree, much that is dirty, and six random writers.

Through a mount, the tree is looked at whole (so that the worker knows every file), the writers are processes, and before
each cut 10,000 files and every block of 10 GB are changed while the writers stand still, then they go on and the cut is made by
the control channel. Without a mount (``ciuic core``), the writers are threads and the marks are made directly.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

from benchmarks.suite import CIUIC, CORE, Figure, Job, Measured, Step, Suite
from benchmarks.workloads import hold_core
from benchmarks.workloads.trees import make_tree
from ciuic.fuse_layer.control_client import ControlClient

_TREE_FILES = 1_000_000
_DIRTY_FILES = 10_000
_DIRTY_BYTES = 10_000_000_000
_CUTS = 100
_WRITERS = 6
_WRITER_BYTES = 64 << 20
_PIECE_BYTES = 4096
_RUN_ON_SECONDS = 0.05
_MEMORY_ALLOWANCE_BYTES = 60_000_000


def _furnish(job: Job) -> None:
    make_tree(
        job.path("tree"), job.count(_TREE_FILES, 1000), b""
    )  # a million pages each would not fit everywhere
    for name in ("large", *(f"writer{number}" for number in range(_WRITERS))):
        with open(job.path(name), "wb") as file:
            file.truncate(_WRITER_BYTES)


def _look(job: Job) -> Measured:
    """Everything is looked up once; how much the worker's memory then is."""
    if not job.server_pid:
        return Measured([None])
    seen = 0
    for folder, _, names in os.walk(job.path("tree")):
        for name in names:
            os.stat(f"{folder}/{name}")
        seen += len(names) + 1
    with open(f"/proc/{job.server_pid}/status", encoding="utf-8", errors="replace") as file:
        resident = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS:"))
    return Measured([(resident - _MEMORY_ALLOWANCE_BYTES) / seen])


def _hold(job: Job) -> Measured:
    if job.control:
        holds = _through_the_mount(job)
    else:
        holds = hold_core.holds(
            job.directory,
            dirty_files=job.count(_DIRTY_FILES, 100),
            dirty_bytes=job.count(_DIRTY_BYTES),
            cuts=job.count(5 * _CUTS, 20),
            writers=[f"writer{number}" for number in range(_WRITERS)],
        )
    milliseconds = [hold_us / 1000 for hold_us in holds]
    return Measured(
        [statistics.median(milliseconds), percentile(milliseconds, 0.99), max(milliseconds)], milliseconds
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def _through_the_mount(job: Job) -> list[int]:
    holds = []
    dirty = [job.path(f"tree/{n // 100}/{n % 100}") for n in range(job.count(_DIRTY_FILES, 100))]
    with ControlClient(job.control) as client, _writing(job) as writers:
        for number in range(job.count(_CUTS, 5)):
            _signal(writers, signal.SIGSTOP)
            for path in dirty:
                os.utime(path, (number, number))
            os.truncate(job.path("large"), 1)
            os.truncate(job.path("large"), job.count(_DIRTY_BYTES))
            _signal(writers, signal.SIGCONT)
            time.sleep(_RUN_ON_SECONDS)
            cut = client.cut()
            holds.append(cut.hold_us)
            client.committed(cut.epoch)
    return holds


@contextmanager
def _writing(job: Job) -> Iterator[list[BaseProcess]]:
    fork = multiprocessing.get_context("fork")
    writers: list[BaseProcess] = [
        fork.Process(target=_write_on, args=(job.path(f"writer{number}"), number), daemon=True)
        for number in range(_WRITERS)
    ]
    for writer in writers:
        writer.start()
    try:
        yield writers
    finally:
        for writer in writers:
            writer.kill()
        for writer in writers:
            writer.join()


def _write_on(path: str, seed: int) -> None:
    chosen, piece = random.Random(seed), b"w" * _PIECE_BYTES
    fd = os.open(path, os.O_WRONLY)
    while True:
        os.pwrite(fd, piece, chosen.randrange(_WRITER_BYTES // _PIECE_BYTES) * _PIECE_BYTES)


def _signal(writers: Sequence[BaseProcess], number: int) -> None:
    for writer in writers:
        assert writer.pid is not None
        os.kill(writer.pid, number)


_HOLD = tuple(Figure(f"hold of a cut, {which}", "ms", False) for which in ("median", "p99", "longest"))

SUITE = Suite(
    "hold",
    (
        Step(
            (Figure("worker memory above 60 MB, a file looked up", "bytes", False),), _look, limit_seconds=900
        ),
        Step(_HOLD, _hold, limit_seconds=900),
    ),
    furnish=_furnish,
    only=(CORE, *CIUIC),
    places=("tmpfs",),
)
