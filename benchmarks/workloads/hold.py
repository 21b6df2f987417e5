"""Hold of a cut (the time for which changes stop) with a large tree, many dirty blocks and six writers.

Through a mount, every file of the tree is looked up once (so that the worker knows it), and the writers are
processes. Before each cut the writers are stopped, 10,000 files and every block of 10 GB are changed, the
writers continue, and the cut is requested over the control channel. Without a mount (``ciuic core``), the
writers are threads and the files and blocks are marked dirty directly.
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
from ciuic.protocol.worker_client import WorkerControlClient

_TREE_FILES = 1_000_000
_DIRTY_FILES = 10_000
_DIRTY_BYTES = 10_000_000_000
_CUTS = 100
_WRITERS = 6
_WRITER_BYTES = 64 << 20
_PIECE_BYTES = 4096
_WRITING_SECONDS = 0.05
_MEMORY_ALLOWANCE_BYTES = 60_000_000


def _furnish(job: Job) -> None:
    # Empty files: a million files with a page each would not fit on every machine.
    make_tree(job.path("tree"), job.count(_TREE_FILES, 1000), b"")
    for name in ("large", *(f"writer{number}" for number in range(_WRITERS))):
        with open(job.path(name), "wb") as file:
            file.truncate(_WRITER_BYTES)


def _look_up_tree(job: Job) -> Measured:
    """Look up every file once, and return the worker's memory above the allowance, per file."""
    if not job.server_pid:
        return Measured([None])
    looked_up = 0
    for folder, _, names in os.walk(job.path("tree")):
        for name in names:
            os.stat(f"{folder}/{name}")
        looked_up += len(names) + 1
    with open(f"/proc/{job.server_pid}/status", encoding="utf-8", errors="replace") as file:
        resident = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS:"))
    return Measured([(resident - _MEMORY_ALLOWANCE_BYTES) / looked_up])


def _measure_holds(job: Job) -> Measured:
    if job.control:
        holds = _holds_through_mount(job)
    else:
        holds = hold_core.measure_holds(
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
    """Return the smallest value that at least ``share`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def _holds_through_mount(job: Job) -> list[int]:
    holds = []
    dirty = [job.path(f"tree/{n // 100}/{n % 100}") for n in range(job.count(_DIRTY_FILES, 100))]
    with WorkerControlClient(job.control) as client, _running_writers(job) as writers:
        for number in range(job.count(_CUTS, 5)):
            _signal(writers, signal.SIGSTOP)
            for path in dirty:
                os.utime(path, (number, number))
            os.truncate(job.path("large"), 1)
            os.truncate(job.path("large"), job.count(_DIRTY_BYTES))
            _signal(writers, signal.SIGCONT)
            time.sleep(_WRITING_SECONDS)
            cut = client.cut()
            holds.append(cut.hold_us)
            client.committed(cut.epoch)
    return holds


@contextmanager
def _running_writers(job: Job) -> Iterator[list[BaseProcess]]:
    fork = multiprocessing.get_context("fork")
    writers: list[BaseProcess] = [
        fork.Process(target=_write_forever, args=(job.path(f"writer{number}"), number), daemon=True)
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


def _write_forever(path: str, seed: int) -> None:
    generator, piece = random.Random(seed), b"w" * _PIECE_BYTES
    fd = os.open(path, os.O_WRONLY)
    while True:
        os.pwrite(fd, piece, generator.randrange(_WRITER_BYTES // _PIECE_BYTES) * _PIECE_BYTES)


def _signal(writers: Sequence[BaseProcess], number: int) -> None:
    for writer in writers:
        assert writer.pid is not None
        os.kill(writer.pid, number)


_HOLD = tuple(Figure(f"hold of a cut, {which}", "ms", False) for which in ("median", "p99", "longest"))

SUITE = Suite(
    "hold",
    (
        Step(
            (Figure("worker memory above 60 MB, a file looked up", "bytes", False),),
            _look_up_tree,
            limit_seconds=900,
        ),
        Step(_HOLD, _measure_holds, limit_seconds=900),
    ),
    furnish=_furnish,
    only=(CORE, *CIUIC),
    places=("tmpfs",),
)
