"""Work done behind the caller's back, in the order in which it was given, by one thread.

Guarantees: one job runs at a time, and none after one that failed; what comes of a job, good or bad, reaches the caller in its
own thread, in `settle`. The thread starts with the first job that is worth one: who has only small ones has none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

_MOST_JOBS: Final = 2
"""Waiting or running. More would cost memory and gain nothing: with two the disk always has something to do."""

Job = Callable[[], int]
Then = Callable[[int], None]


class _SkippedError(Exception):
    """Not done, because a job before it failed."""


class Behind:
    """Jobs that return a number. Belongs to one thread, which calls every method."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[Future[int], Then]] = deque()
        self._thread: ThreadPoolExecutor | None = None
        self._failed = False

    def submit(self, job: Job, then: Then, *, worth_a_thread: bool) -> None:
        """Does the job at some time, in its turn; ``then`` gets what it returned. May raise what an earlier job raised."""
        if not self._jobs and not worth_a_thread:
            then(job())
            return
        while len(self._jobs) >= _MOST_JOBS:
            self._settle_first()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "ciuic-behind")
        self._jobs.append((self._thread.submit(self._run, job), then))

    def settle(self, *, wait: bool) -> None:
        """Tells ``then`` of what is done; with ``wait``, of everything. Raises what a job raised; those after it are
        dropped, and none of them is running any more."""
        while self._jobs and (wait or self._jobs[0][0].done()):
            self._settle_first()

    def close(self) -> None:
        """Waits for the job that is running; what has not begun is dropped. Raises nothing."""
        self._failed = True
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._thread = None
        self._jobs.clear()
        self._failed = False

    def _settle_first(self) -> None:
        future, then = self._jobs.popleft()
        try:
            result = future.result()
        except BaseException:
            self.close()
            raise
        then(result)

    def _run(self, job: Job) -> int:
        if self._failed:
            raise _SkippedError
        try:
            return job()
        except BaseException:
            self._failed = True
            raise
