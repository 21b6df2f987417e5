"""Single-threaded FIFO write-behind queue.

Guarantees: one job runs at a time, and none after a failed one; results and errors of jobs reach the caller
in its own thread, in `settle`. The background thread starts with the first job that is worth one: a caller
with small jobs alone has none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

# Limit of jobs queued or running. More would cost memory and gain nothing: with two the disk always has work.
_MAX_JOBS: Final = 2

Job = Callable[[], int]
Then = Callable[[int], None]


class _SkippedError(Exception):
    """A job was skipped because one before it failed."""


class WriteBehind:
    """Queue of jobs that return a number. Belongs to one thread, which calls every method."""

    def __init__(self) -> None:
        # In the order of `submit`, which is that of the calls of `then`.
        self._jobs: deque[tuple[Future[int], Then]] = deque()
        self._thread: ThreadPoolExecutor | None = None
        # Read by queued jobs in the thread: they skip themselves after a failure.
        self._failed = False

    def submit(self, job: Job, then: Then, *, worth_a_thread: bool) -> None:
        """Queue the job; ``then`` gets its result in `settle`. May raise what an earlier job raised."""
        # A small job on an empty queue is done here: handing it over costs more, and the order is kept.
        if not self._jobs and not worth_a_thread:
            then(job())
            return
        while len(self._jobs) >= _MAX_JOBS:
            self._settle_first()
        if self._thread is None:
            # One thread for all jobs: with several, a job could still run after one before it has failed.
            self._thread = ThreadPoolExecutor(1, "ciuic-behind")
        self._jobs.append((self._thread.submit(self._run, job), then))

    def settle(self, *, wait: bool) -> None:
        """Pass the results of finished jobs to their ``then``; with ``wait``, of all jobs.

        Raises what a job raised. The jobs after it are dropped, and none of them is running any more.
        """
        while self._jobs and (wait or self._jobs[0][0].done()):
            self._settle_first()

    def close(self) -> None:
        """Wait for the running job and drop the queued ones. Raises nothing."""
        # Set before the wait, so that a queued job that starts meanwhile skips itself.
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
