"""Callbacks of `SnapshotManager.on_saved`, called on a thread of their own.

Guarantees: each callback gets each result once, in the order in which the saves ended, and only one call runs
at a time. Nothing that a callback raises leaves the thread. No call begins after `close` has returned.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

from ciuic.training.format.results import SaveResult
from ciuic.training.util.logs import log

SaveCallback = Callable[[SaveResult], object]


class SaveCallbacks:
    """Callbacks of one manager, and the thread that calls them."""

    def __init__(self) -> None:
        """Create it without a callback; the thread starts with the first one."""
        self._callbacks: tuple[SaveCallback, ...] = ()
        # Not queue.Queue, whose put() a signal handler must not enter while it is interrupted in one: a
        # handler of the program may save, and hears of earlier saves then.
        self._results: queue.SimpleQueue[SaveResult | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._pid = os.getpid()

    def add(self, callback: SaveCallback) -> None:
        """Call this one too, with the results that come from now on.

        Raises:
            TypeError: It cannot be called.
        """
        if not callable(callback):
            raise TypeError(f"on_saved must get a function, got {callback!r}")
        self._callbacks = (*self._callbacks, callback)
        if self._thread is None:
            # A daemon thread: a callback that hangs must not keep the interpreter from ending.
            self._thread = threading.Thread(target=self._run, name="ciuic-on-saved", daemon=True)
            self._thread.start()

    def notify(self, result: SaveResult) -> None:
        """Queue a result for the callbacks; costs the caller one append."""
        if self._callbacks:
            self._results.put(result)

    def close(self, timeout_seconds: float) -> None:
        """Wait for calls that are due, at most so long, and begin no other.

        Called by a callback, it does not wait.
        """
        # A forked child has no such thread.
        if self._thread is not None and self._pid == os.getpid():
            self._results.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join(timeout_seconds)
                if self._thread.is_alive():
                    log.warning("ciuic: a callback of on_saved is still running; no other is called")
        self._closed.set()

    def _run(self) -> None:
        while (result := self._results.get()) is not None:
            for callback in self._callbacks:
                if self._closed.is_set():
                    return
                try:
                    callback(result)
                # Everything: SystemExit would end this thread, and later results would be lost in silence.
                except BaseException:
                    log.exception("ciuic: a callback of on_saved failed; the training is unaffected")
