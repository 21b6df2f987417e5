"""Process that runs the steps of one suite for one contender.

lane.py starts it and sends requests on standard input, one line of JSON per step; the process answers each
with one line.

    python -m benchmarks.child SUITE

The answer to a step that raises is its error; the runner decides what follows.
"""

from __future__ import annotations

import ctypes
import os
import sys
import traceback
from collections.abc import Callable

import msgspec

from benchmarks import workloads
from benchmarks.store import suites as store_suites
from benchmarks.suite import Before, Job, Measured


class Request(msgspec.Struct, frozen=True):
    """Request of one step of the suite; FURNISH_SOURCE and FURNISH write the initial files instead."""

    step: int
    job: Job


class Answer(msgspec.Struct, frozen=True):
    """Values that the step measured, or its error."""

    measured: Measured | None
    error: str = ""


FURNISH_SOURCE, FURNISH = -1, -2
_DROP: dict[Before, bytes] = {
    "settled": b"",
    "warm": b"",
    "cold": b"1",
    "uncached": b"3",
    "remounted": b"3",
    "anew": b"3",
}


def main(suite_name: str) -> int:
    """Serve requests until standard input ends."""
    suite = {suite.name: suite for suite in (*workloads.SUITES, *store_suites.SUITES)}[suite_name]
    # The output of a step must not be read as an answer.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line, type=Request)
        try:
            if request.step == FURNISH_SOURCE:
                measured = _furnished(suite.furnish_source, request.job)
            elif request.step == FURNISH:
                measured = _furnished(suite.furnish, request.job)
            else:
                step = suite.steps[request.step]
                _settle(request.job, step.before)
                if step.before == "warm":
                    step.run(request.job)
                measured = step.run(request.job)
                _write_back(request.job.directory)
            answer = Answer(measured)
        except Exception as error:
            traceback.print_exc()
            answer = Answer(None, f"{type(error).__name__}: {error}")
        answers.write(msgspec.json.encode(answer) + b"\n")
    return 0


def _furnished(work: Callable[[Job], None], job: Job) -> Measured:
    work(job)
    return Measured([])


def _settle(job: Job, before: Before) -> None:
    # Dirty pages of the preceding contender would be written at the expense of this one. Its own process has
    # synced its mount; all contenders share the file system below.
    _write_back(job.directory)
    _write_back(job.source)
    # As in store/suites.py.
    if _DROP[before] and "CIUIC_BENCH_WARM" not in os.environ:
        with open("/proc/sys/vm/drop_caches", "wb") as file:
            file.write(_DROP[before])


def _write_back(directory: str) -> None:
    """Sync the file system of this directory only: a step on a tmpfs must not wait for the disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd):
            raise OSError(ctypes.get_errno(), "syncfs", directory)
    finally:
        os.close(fd)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
