"""Helpers that steps share: measuring time, and making content."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

from benchmarks.suite import Figure, Job, Measured, Step

MIB = 1 << 20
LARGE_BYTES = 8 * MIB


@lru_cache(maxsize=1)
def block() -> bytes:
    """Return 8 MiB that do not compress, the same throughout the process."""
    return os.urandom(LARGE_BYTES)


class Clock:
    """Seconds that a ``with running()`` block took."""

    seconds = 0.0


@contextmanager
def running() -> Iterator[Clock]:
    """Measure the time of a block."""
    clock = Clock()
    started = time.perf_counter()
    yield clock
    clock.seconds = time.perf_counter() - started


def rate(
    name: str, unit: str, work: Callable[[Job], float], *, repeat_seconds: float = 0.0, **options: object
) -> Step:
    """Return a step of one figure: ``work`` is timed and returns the amount that it did.

    It is repeated until it has taken ``repeat_seconds`` (at scale 1) in all: a run of milliseconds would
    measure the clock and the scheduler.
    """

    def run(job: Job) -> Measured:
        amount = seconds = 0.0
        while amount == 0.0 or seconds < repeat_seconds * job.scale:
            with running() as clock:
                amount += work(job)
            seconds += clock.seconds
        return Measured([amount / max(seconds, 1e-9)])

    return Step((Figure(name, unit),), run, **options)  # type: ignore[arg-type]


def preparation(work: Callable[[Job], object], **options: object) -> Step:
    """Return a step that measures nothing and leaves something for the next."""

    def run(job: Job) -> Measured:
        work(job)
        return Measured([])

    return Step((), run, **options)  # type: ignore[arg-type]


def command(arguments: Sequence[str], **more_environment: str) -> None:
    """Run a program quietly; RuntimeError, with the end of its standard error, if it fails."""
    completed = subprocess.run(
        arguments,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, **more_environment},
    )
    if completed.returncode != 0:
        message = completed.stderr.decode("utf-8", "replace").strip()[-500:]
        raise RuntimeError(f"{arguments[0]} ended with {completed.returncode}: {message}")
