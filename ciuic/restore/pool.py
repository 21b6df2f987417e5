"""A few threads that carry out the work of a restore, each with its own view of the repository.

Guarantees: a bounded number of tasks waits; a task that raises ends the whole run, and what it raised comes out of the
next call; after `stop` tasks see it between two blocks (`check`). Threads pay because reading, hashing, decompressing,
writing and syncing all release the interpreter lock.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from ciuic.repository import Repository
from ciuic.restore.content import Worker

Task = Callable[[Worker], None]
_WAITING_TASKS = 32
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(Exception):
    """The run is to end; not an error of the task."""


class Pool:
    """``changed`` guards all state that tasks and the caller share; notified at the end of each task."""

    def __init__(
        self, repository: Path, threads: int | None = None, *, runtime_dir: Path | None = None
    ) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.stopping = False
        self._repository = repository
        self._runtime_dir = runtime_dir
        processors = os.cpu_count() or 1
        self._turns = threading.BoundedSemaphore(processors)
        """More that work at once only meet at the interpreter's lock, and in the processor's cache."""
        self._tasks: deque[Task] = deque()
        self._busy = 0
        self._closing = False
        self._fatal: BaseException | None = None
        count = threads or min(8, processors + 2)  # who waits for a turn has asked the disk already
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]
        self._started = 0

    def submit(self, task: Task) -> None:
        """Hands over a task; waits while enough others wait. Silently drops it when the run is stopping."""
        with self.changed:
            self.wait(lambda: len(self._tasks) < _WAITING_TASKS)
            self._tasks.append(task)
            if self._started < len(self._threads) and len(self._tasks) > self._started - self._busy:
                self._threads[self._started].start()
                self._started += 1
            self.changed.notify_all()

    def wait(self, until: Callable[[], bool]) -> None:
        """Waits until this is true (of what tasks change). Raises what a task raised."""
        with self.changed:
            while not until():
                if self._fatal is not None:
                    break
                self.changed.wait()
            if self._fatal is not None:
                raise self._fatal

    def idle(self) -> bool:
        """Nothing is left to do; to be asked in `wait`."""
        return not self._tasks and not self._busy

    def check(self) -> None:
        if self.stopping:
            raise Stopped

    @contextmanager
    def deferring_interrupts(self) -> Iterator[None]:
        """In the block a signal that would raise KeyboardInterrupt stops the run instead, and raises at the block's end.

        Raised where it arrives, it may leave a lock taken (between the taking and the body of the `with`), on which the
        threads wait for ever, and `close` for the threads. Nothing to do outside the main thread, where none arrives.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in _INTERRUPTS}
        interrupted = []

        def note(number: int, frame: FrameType | None) -> None:
            interrupted.append(number)
            self.stop()

        for number, handler in before.items():
            if callable(handler):
                signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in before.items():
                if callable(handler):
                    signal.signal(number, handler)
            if interrupted:
                raise KeyboardInterrupt

    def stop(self) -> None:
        """Tasks that have not ended are to give up; they are still run, so that each can say so."""
        self.stopping = True

    def close(self) -> None:
        """Waits for the threads to end, after the tasks that are left."""
        with self.changed:
            self._closing = True
            self.changed.notify_all()
        for thread in self._threads[: self._started]:
            thread.join()

    def _work(self) -> None:
        worker: Worker | None = None
        try:
            while (task := self._next()) is not None:
                try:
                    if worker is None:
                        worker = Worker(
                            Repository.open(self._repository), self.check, self._runtime_dir, self._turns
                        )
                    with suppress(Stopped):
                        task(worker)
                except BaseException as error:
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
