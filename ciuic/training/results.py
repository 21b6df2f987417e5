"""Results of `SnapshotManager`: a loaded state, the point of resumption, one save, statistics, and callbacks that are told.

Each callback of `SnapshotManager.on_saved` gets each result once, on a thread of its own, in the order in which the
saves ended, and only one call runs at a time. Nothing that a callback raises leaves the thread. No call begins after
`SaveCallbacks.close` has returned.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from ciuic.training.format.reading import Facts, Loaded, PassedOver
from ciuic.training.logs import log

EXIT_SECONDS: Final = 120.0
"""Default timeout for callers that wait for the writer."""


class SaveWaiter(Protocol):
    """Waits for the writer on behalf of a save."""

    def wait(self, timeout_seconds: float, *, number: int | None = None) -> bool:
        """Wait until a save is answered, or all are; return whether that came in time."""
        ...

    def wait_remote(self, id_: str, timeout_seconds: float) -> bool:
        """Wait until every remote has stored a snapshot; return whether that came in time."""
        ...


class State(dict[str, Any]):
    """A loaded state.

    Its keys are `NAME_state_dict` for each object, `epoch`, `step`, `metrics`, `random_state`, and the name
    of every value that was saved beside the objects. Tensors are on the CPU.
    """

    def __init__(self, loaded: Loaded) -> None:
        """Arrange what was loaded."""
        super().__init__()
        plain = set(loaded.values.get("plain", ()))
        # Plain values come back under the names that the program gave them, objects as state_dicts.
        for name, value in loaded.objects.items():
            self[name if name in plain else f"{name}_state_dict"] = value
        self |= {"epoch": loaded.facts.epoch, "step": loaded.facts.step, "metrics": loaded.facts.metrics}
        self["random_state"] = loaded.values["random"]
        self.id = loaded.id
        """Id of the snapshot."""
        self.facts = loaded.facts
        self.passed_over: list[PassedOver] = loaded.passed_over
        """Newer snapshots that are not whole, with the reasons."""
        self.time_ns = loaded.time_ns
        """Place of the snapshot in the order of snapshots: what is saved from it on comes after."""
        self.passes: dict[str, Any] | None = loaded.values.get("passes")
        """Passes over a loader that tells its own position, and the epoch that the program gave."""
        self.ranks: dict[str, Any] = loaded.values.get("ranks", {})
        """Differences of the other ranks from rank 0, by rank as text."""


@dataclass(frozen=True)
class Resumed:
    """Point at which a run continues."""

    id: str
    """Id of the snapshot."""
    step: int
    """Optimizer steps done."""
    epoch: int | None
    """Epoch that the program gave last.

    Where a plain loader is registered, or one that tells its own position and the program gave no epoch: the epoch
    to continue with, counted from 0. That is the one it was in, or the next if its pass had ended.
    """
    batch: int
    """Batches of that epoch that were taken before; the registered loader skips them by itself."""
    passed_over: tuple[PassedOver, ...] = ()
    """Newer snapshots that are not whole, with the reasons."""


@dataclass
class Stats:
    """Statistics of a manager's saves so far."""

    saved: int = 0
    """Durable snapshots."""
    skipped: int = 0
    """Saves that were due while all arenas were still being written."""
    failed: int = 0
    """Saves that failed; `last_error` has the reason of the last one."""
    stall_seconds: float = 0.0
    """Total time for which the training stood still for saving."""
    last_stall_seconds: float = 0.0
    """The same for the last save."""
    last_write_seconds: float = 0.0
    """Time from the end of the last stall to the commit."""
    last_id: str = ""
    last_error: str = ""
    filesystem: int = 0
    """Durable snapshots with a snapshot of the files of the same instant."""
    filesystem_failed: int = 0
    """Durable snapshots without the snapshot of the files that was asked for."""
    last_filesystem_id: str = ""
    last_filesystem_error: str = ""


@dataclass(frozen=True)
class SaveResult:
    """End of one save, for callbacks of `SnapshotManager.on_saved`."""

    id: str | None
    """Id of the snapshot, which is durable; None if the save failed."""
    step: int | None
    """Optimizer steps of the run at the save."""
    epoch: int | None
    metrics: Mapping[str, float]
    error: str | None = None
    """Why the save failed; None if it has not."""
    size_bytes: int | None = None
    """Size of the snapshot's files; None if the save failed."""
    new_bytes: int | None = None
    """Growth of the repository; None if the save failed."""
    write_seconds: float | None = None
    """Time from the end of the stall to the commit; None if the save failed."""
    trackers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Runs of experiment trackers at the save, as in `Facts.trackers`."""

    @property
    def durable(self) -> bool:
        """True if there is a snapshot, False if the save failed."""
        return self.id is not None

    @classmethod
    def failed(cls, facts: Facts, error: str) -> SaveResult:
        """Return the end of a save with these facts that has failed."""
        return cls(None, facts.step, facts.epoch, dict(facts.metrics), error, trackers=facts.trackers)

    @classmethod
    def saved(
        cls, facts: Facts, id_: str, *, size_bytes: int, new_bytes: int, write_seconds: float
    ) -> SaveResult:
        """Return the end of a save with these facts that is durable."""
        return cls(
            id_,
            facts.step,
            facts.epoch,
            dict(facts.metrics),
            None,
            size_bytes,
            new_bytes,
            write_seconds,
            facts.trackers,
        )


class Save:
    """Handle of one save that has begun; the program may ignore it."""

    def __init__(self, manager: SaveWaiter, number: int) -> None:
        """Create the handle of save ``number``."""
        self.id: str | None = None
        """Id of the snapshot, once it is durable."""
        self.error: str | None = None
        """Why the save failed, if it has."""
        self.filesystem: str | None = None
        """Id of the snapshot of the files of the same instant, in the daemon's repository."""
        self._manager = manager
        self._number = number

    def __repr__(self) -> str:
        """Return the number of the save, and what has become of it so far."""
        if self.error is not None:
            return f"<Save {self._number}: failed: {self.error}>"
        return f"<Save {self._number}: {'being written' if self.id is None else f'durable as {self.id}'}>"

    @property
    def done(self) -> bool:
        """True if the snapshot is durable, or the save has failed."""
        return self.id is not None or self.error is not None

    def wait(self, timeout_seconds: float = EXIT_SECONDS, *, remote: bool = False) -> str | None:
        """Wait for the snapshot to be durable.

        Args:
            timeout_seconds: How long to wait at most.
            remote: Wait until every remote of the manager has stored it, too.

        Returns:
            Its id; None if the save failed or is not done in time.

        Raises:
            ValueError: The manager has no remote.
        """
        end = time.monotonic() + timeout_seconds
        self._manager.wait(timeout_seconds, number=self._number)
        if remote and self.id is not None:
            return self.id if self._manager.wait_remote(self.id, end - time.monotonic()) else None
        return self.id


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
            thread = threading.Thread(target=self._run, name="ciuic-on-saved", daemon=True)
            thread.start()
            self._thread = thread

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
