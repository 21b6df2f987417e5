"""Experiment trackers: what a manager logs to MLflow, Weights & Biases or TensorBoard when a save ends.

A `Tracker` is one run of one service. At a save the training thread asks it only which run it logs to (no request is
made), and the snapshot stores that (`Facts.trackers`). When the save has ended, a thread of the tracker's own gives it
the `TrackedSave`.

Guarantees: the training waits for no tracker. What waits for one is bounded (`MAX_WAITING`, the oldest go first); a
tracker that fails is asked again after a pause that doubles, and the log tells of it once until it answers again.
`TrackerFeeds.close` gives all of them `CLOSE_SECONDS` together. Nothing of a snapshot depends on a tracker.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from ciuic.printable import one_line
from ciuic.training.logs import log, warn_once
from ciuic.training.results import SaveResult
from ciuic.units import plural

MAX_WAITING: Final = 256
"""Saves that wait for one tracker at most."""
CLOSE_SECONDS: Final = 5.0
"""Time that a manager's `close` gives trackers to log what waits."""
_MIN_PAUSE_SECONDS: Final = 1.0
"""First pause after a failure of a tracker; doubled with each further one up to `_MAX_PAUSE_SECONDS`."""
_MAX_PAUSE_SECONDS: Final = 60.0
FAILED: Final = "FAILED"
"""Verdict of a save of which there is no snapshot."""
_UNJUDGED: Final = "UNKNOWN"
_MAX_RUN_NAMES: Final = 8
_MAX_RUN_BYTES: Final = 4096
_MAX_ERROR_CHARACTERS: Final = 500
"""Length of what the log has of an error, in which a client library quotes its server."""


class Rejected(Exception):
    """Error of a `Tracker`: this save will never be taken (the run is gone, or access is denied); it is not tried again."""


@dataclass(frozen=True)
class TrackedSave:
    """End of one save, as it is logged to a tracker."""

    result: SaveResult
    verdict: str
    """GOOD, TORN or UNKNOWN, of the snapshot's structure as docs/looking.md says; FAILED: there is no
    snapshot."""
    repository: str
    """Absolute path of the repository."""
    training: str
    """Name of the training in the repository."""

    @property
    def facts(self) -> dict[str, Any]:
        """Values of the save for a tracker: ``step``, ``verdict``, sizes in bytes; those that are not known are left out."""
        result = self.result
        known = {
            "step": result.step,
            "epoch": result.epoch,
            "verdict": self.verdict,
            "size_bytes": result.size_bytes,
            "new_bytes": result.new_bytes,
            "write_seconds": result.write_seconds,
            "error": result.error,
        }
        return {name: value for name, value in known.items() if value is not None}

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers of the save, for charts: sizes in bytes, seconds, and ``good``: 1 for the verdict GOOD, else 0."""
        numbers = {name: self.facts.get(name) for name in ("size_bytes", "new_bytes", "write_seconds")}
        found = {name: float(value) for name, value in numbers.items() if value is not None}
        return {**found, "good": float(self.verdict == "GOOD")}


class Tracker(Protocol):
    """One run of an experiment tracker, to which saves are logged (`SnapshotManager.track`)."""

    @property
    def name(self) -> str:
        """Name of the service; a manager has one tracker of each name."""
        ...

    def run(self) -> Mapping[str, str]:
        """Return ``run``, the id of the run, and what else names it; empty: there is no run yet, nothing is logged.

        Called by the training thread at each save: must not communicate.
        """
        ...

    def log(self, save: TrackedSave) -> None:
        """Log the end of a save to the run that ``save.result.trackers`` names.

        Called by one thread of this tracker. It may take as long as it takes; after an exception it is called again
        with the same save.

        Raises:
            Rejected: Another attempt would be in vain.
        """
        ...


class TrackerFeeds:
    """The trackers of one manager, each with a thread that gives it what is to be logged."""

    def __init__(self, repository: str, training: str) -> None:
        """Create it without a tracker.

        Args:
            repository: Absolute path of the repository.
            training: Name of the training in it.
        """
        self._repository, self._training = repository, training
        self._feeds: dict[str, _Feed] = {}
        self._replaced: list[_Feed] = []
        self._verdicts = _Verdicts(repository)

    def add(self, tracker: Tracker) -> None:
        """Log the saves that begin from now on to this tracker, in place of one of the same name."""
        earlier = self._feeds.get(tracker.name)
        self._feeds = {**self._feeds, tracker.name: _Feed(tracker)}
        if earlier is not None:
            # It ends by itself when it has logged what waits; `close` tells what it has not.
            earlier.finish()
            self._replaced.append(earlier)

    def runs(self) -> dict[str, dict[str, str]]:
        """Return the runs to which a save that begins now is logged, by tracker."""
        found = {}
        for name, feed in self._feeds.items():
            # Whatever a tracker's own library raises: the save goes on without it.
            try:
                run = _run_to_store(feed.tracker.run())
            except Exception as error:
                warn_once(
                    f"{name} cannot name its run, so that nothing is logged to it: {error!r:.{_MAX_ERROR_CHARACTERS}}"
                )
                continue
            if run.get("run"):
                found[name] = run
        return found

    def put(self, result: SaveResult) -> None:
        """Queue the end of a save for the trackers that had a run when it began; waits for nothing."""
        for name, feed in self._feeds.items():
            if name in result.trackers:
                feed.put(lambda: self._tracked(result))

    def close(self, timeout_seconds: float) -> None:
        """Give the trackers this time, and at most `CLOSE_SECONDS`, to log what waits, and let them go."""
        end = time.monotonic() + min(timeout_seconds, CLOSE_SECONDS)
        feeds = [*self._replaced, *self._feeds.values()]
        for feed in feeds:
            feed.finish()
        for feed in feeds:
            feed.close(end)

    def _tracked(self, result: SaveResult) -> TrackedSave:
        verdict = FAILED if result.id is None else self._verdicts.verdict_of(result.id)
        return TrackedSave(result, verdict, self._repository, self._training)


def _run_to_store(found: Mapping[str, str]) -> dict[str, str]:
    """Return a run as the snapshot stores it; ValueError for what only a server that lies gives as ids."""
    run = {str(key): str(value) for key, value in found.items() if value}
    # Encoded: a surrogate alone could not be stored.
    longest = max((len(text.encode()) for text in (*run, *run.values())), default=0)
    if len(run) > _MAX_RUN_NAMES or longest > _MAX_RUN_BYTES:
        raise ValueError(f"expected at most {_MAX_RUN_NAMES} names of at most {_MAX_RUN_BYTES} bytes")
    return run


class _Verdicts:
    """Verdicts on snapshots of this process, each judged once though several trackers ask."""

    def __init__(self, repository: str) -> None:
        self._repository = repository
        self._lock = threading.Lock()
        self._last = ("", _UNJUDGED)

    def verdict_of(self, id_: str) -> str:
        with self._lock:
            if self._last[0] != id_:
                self._last = id_, self._judge(id_)
            return self._last[1]

    def _judge(self, id_: str) -> str:
        # Imported by the thread that needs it: a program without trackers pays nothing.
        from ciuic.errors import CiuicError
        from ciuic.history import judge_snapshot
        from ciuic.repository import Repository
        from ciuic.types import SnapshotId
        from ciuic.verdicts.verdict import FileVerdicts

        try:
            with Repository.open(self._repository) as repository:
                snapshot = repository.snapshots.load(SnapshotId(id_))
                newest = judge_snapshot(repository, [snapshot], snapshot, FileVerdicts()).newest
        # Removed meanwhile by a rule, for example: it is logged all the same.
        except (CiuicError, OSError, ValueError):
            return _UNJUDGED
        return _UNJUDGED if newest is None else newest.checkpoint.verdict.state


class _Feed:
    """A tracker with what waits for it, and the thread that gives it that."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self._waiting: deque[Callable[[], TrackedSave]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._finishing = self._closed = self._failing = False
        self._lost = 0
        self._pid = os.getpid()

    def put(self, save: Callable[[], TrackedSave]) -> None:
        """Queue a save; the oldest is dropped where too many wait."""
        # Called by the thread of the callbacks alone, which no signal handler interrupts: the lock is safe.
        with self._changed:
            if self._closed:
                return
            if len(self._waiting) >= MAX_WAITING:
                self._waiting.popleft()
                self._lost += 1
            self._waiting.append(save)
            self._changed.notify()
            if self._thread is None:
                # A daemon thread: a server that does not answer must not keep the interpreter from ending.
                thread = threading.Thread(target=self._run, name=f"ciuic-to-{self.tracker.name}", daemon=True)
                thread.start()
                self._thread = thread

    def finish(self) -> None:
        """Log what waits without the pauses, and end."""
        with self._changed:
            self._finishing = True
            self._changed.notify()

    def close(self, end: float) -> None:
        """Wait for the thread until this time of the monotonic clock, and log how many saves were not logged."""
        self.finish()
        # A forked child has no such thread.
        if self._thread is not None and self._pid == os.getpid():
            self._thread.join(max(0.0, end - time.monotonic()))
        with self._changed:
            self._closed = True
            lost = self._lost + len(self._waiting)
            self._changed.notify()
        if lost:
            log.warning(
                "ciuic: %s %s not logged to %s; the snapshots are unaffected and name their run",
                plural(lost, "save"),
                "was" if lost == 1 else "were",
                self.tracker.name,
            )

    def _run(self) -> None:
        pause = _MIN_PAUSE_SECONDS
        while (save := self._next()) is not None:
            # Everything: whatever a client library raises must end neither this thread nor the training.
            try:
                self.tracker.log(save())
            except Rejected as error:
                self._failed(error, "is not tried again")
                self._taken(save, lost=1)
                continue
            except BaseException as error:
                self._failed(error, "is tried again")
                with self._changed:
                    # `finish` ends the pause, and the last attempt is made; after it nothing is tried again.
                    if self._finishing:
                        return
                    self._changed.wait_for(lambda: self._finishing, pause)
                pause = min(2 * pause, _MAX_PAUSE_SECONDS)
                continue
            pause = _MIN_PAUSE_SECONDS
            self._taken(save)
            if self._failing:
                self._failing = False
                log.warning("ciuic: saves are logged to %s again", self.tracker.name)

    def _next(self) -> Callable[[], TrackedSave] | None:
        """Return the oldest that waits, which stays first in the queue until it is logged; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._finishing or self._closed)
            return self._waiting[0] if self._waiting and not self._closed else None

    def _taken(self, save: Callable[[], TrackedSave], lost: int = 0) -> None:
        """Remove a save from the queue that is logged, or lost."""
        with self._changed:
            self._lost += lost
            # Not first any more where it was dropped while it was logged.
            if self._waiting and self._waiting[0] is save:
                self._waiting.popleft()
            elif self._lost:
                self._lost -= 1

    def _failed(self, error: BaseException, what: str) -> None:
        """Log a failure, once until a save is logged again."""
        if not self._failing:
            self._failing = True
            log.warning(
                "ciuic: %s does not take what is logged of a save, which %s; the training and its snapshots are "
                "unaffected: %s: %s",
                self.tracker.name,
                what,
                type(error).__name__,
                one_line(str(error))[:_MAX_ERROR_CHARACTERS],
            )
