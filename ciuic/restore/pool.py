"""Bounded thread pool of a restore; each thread has its own open repository.

Guarantees: the queue of tasks is bounded. A task that raises ends the whole run, and the next call raises the same error. After
`stop`, tasks notice it between two blocks (`check`). Threads pay because reading, hashing, decompressing, writing and syncing
all release the interpreter lock.
"""

from __future__ import annotations

# As in ciuic.system.interrupts.
import _signal  # type: ignore[import-not-found]
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from ciuic.repository import Repository
from ciuic.restore.content import BlockWorker
from ciuic.system.interrupts import SIGNALS

Task = Callable[[BlockWorker], None]
_MAX_QUEUED_TASKS = 32
_MAX_THREADS = 8


class RunStopped(Exception):
    """The run is being stopped; not an error of the task that raises it."""


class Pool:
    """Threads and their queue. ``changed`` guards all state that tasks and the caller share; notified at the end of each task."""

    def __init__(
        self,
        repository: Repository,
        threads: int | None = None,
        *,
        runtime_dir: Path | None = None,
    ) -> None:
        # Reentrant: outcomes are recorded from code that holds the lock already.
        self.changed = threading.Condition(threading.RLock())
        self.stopping = False
        self._repository = repository
        self._runtime_dir = runtime_dir
        # Those that this process may use: taskset(1) and a container's cpuset leave it fewer than the machine has.
        processors = len(os.sched_getaffinity(0))
        # No more threads compute at once than there are processors. Six threads on two processors contended for the interpreter
        # lock and the cache: 2.7 GB were restored in 1.37 to 1.47 s without this limit and in 1.17 to 1.29 s with it.
        self._turns = threading.BoundedSemaphore(processors)
        self._tasks: deque[Task] = deque()
        self._busy = 0
        self._closing = False
        self._fatal: BaseException | None = None
        # Two more threads than processors: a thread that waits for its turn has started readahead already.
        count = threads or min(_MAX_THREADS, processors + 2)
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]
        self._started = 0

    def submit(self, task: Task) -> None:
        """Queue a task; wait while the queue is full. Raises what a task raised."""
        with self.changed:
            self.wait(lambda: len(self._tasks) < _MAX_QUEUED_TASKS)
            self._tasks.append(task)
            # Threads are started as they are needed: a restore of one small file starts one.
            if self._started < len(self._threads) and len(self._tasks) > self._started - self._busy:
                self._threads[self._started].start()
                self._started += 1
            self.changed.notify_all()

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait until the condition, a function of state that tasks change, is true. Raises what a task raised."""
        with self.changed:
            while not until():
                if self._fatal is not None:
                    break
                self.changed.wait()
            if self._fatal is not None:
                raise self._fatal

    def idle(self) -> bool:
        """Return whether no task is queued or running; for use in `wait`."""
        return not self._tasks and not self._busy

    def check(self) -> None:
        """Raise RunStopped if the run is being stopped."""
        # Read without the lock: a late answer costs one block of work.
        if self.stopping:
            raise RunStopped

    @contextmanager
    def deferring_interrupts(self) -> Iterator[None]:
        """Critical section that defers KeyboardInterrupt: a signal stops the run, and the error is raised at the block's end.

        Raised where the signal arrives, the error could leave a lock taken (between its acquisition and the body of the
        `with`), for which the threads, and `close` after them, would wait for ever. Python runs signal handlers in the main
        thread only, so other threads need no protection.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: _signal.getsignal(number) for number in SIGNALS}
        interrupted = []

        def note(number: int, frame: FrameType | None) -> None:
            interrupted.append(number)
            self.stop()

        # Signals that are ignored or end the process by default stay as they are.
        for number, handler in before.items():
            if callable(handler):
                _signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in before.items():
                if callable(handler):
                    _signal.signal(number, handler)
            if interrupted:
                raise KeyboardInterrupt

    def stop(self) -> None:
        """Ask all tasks to give up. Queued tasks still run, so that each can report its end."""
        self.stopping = True

    def close(self) -> None:
        """Wait until the queued tasks and the threads have ended."""
        with self.changed:
            self._closing = True
            self.changed.notify_all()
        # Outside the lock, which the threads need to end.
        for thread in self._threads[: self._started]:
            thread.join()

    def _work(self) -> None:
        worker: BlockWorker | None = None
        try:
            while (task := self._next()) is not None:
                try:
                    # Opened by the thread itself: connections to the index belong to one thread.
                    if worker is None:
                        worker = BlockWorker(
                            self._repository.reopen(), self.check, self._runtime_dir, self._turns
                        )
                    with suppress(RunStopped):
                        task(worker)
                except BaseException as error:
                    # The first error counts: later ones are mostly its consequences.
                    with self.changed:
                        self._fatal = self._fatal or error
                        self.stop()
                finally:
                    with self.changed:
                        self._busy -= 1
                        self.changed.notify_all()
        finally:
            if worker is not None:
                worker.close()

    def _next(self) -> Task | None:
        with self.changed:
            while not self._tasks:
                if self._closing:
                    return None
                self.changed.wait()
            self._busy += 1
            task = self._tasks.popleft()
            self.changed.notify_all()
            return task
