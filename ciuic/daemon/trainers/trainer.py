"""Watched trainer: its process, its heartbeat pages, and the judgement of its end. Waits for nothing.

Guarantees: a process is not identified by its pid alone, so that a later process with the same pid is another
one; a beat is timed by the daemon's clock, whatever the trainer's page claims, and time in which the daemon
did not look (the host was suspended) does not count as silence.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Final, Literal, NamedTuple

import trio

from ciuic.daemon.base.accounts import user_name
from ciuic.daemon.trainers.loss_watch import LossWatch
from ciuic.printable import shown_name
from ciuic.protocol.control_types import IncidentKind, TrainerStatus, rfc3339, trainer_key
from ciuic.protocol.heartbeat_page import Goodbye, HeartbeatReading, read_losses, read_page
from ciuic.protocol.watch_client import Kind
from ciuic.system import processes

# Pages of one process: each SnapshotManager has one.
_MAX_PAGES: Final = 16
# Gaps between beats from which the usual one is taken, and how many it needs.
_GAPS: Final = 64
_MIN_GAPS: Final = 8
# Shortest silence that is told: gaps are known to a second, and a pause of a minute needs nobody.
_MIN_SILENT_SECONDS: Final = 300.0
# SIGINT: a user pressed Ctrl-C.
_INTERRUPTED: Final = 2


class ProcessIdentity(NamedTuple):
    """Identity of a process that no later process has.

    A caller may only register its own user's processes, so the user is part.
    """

    uid: int
    pid: int
    start_ticks: int


class TrainerEnd(NamedTuple):
    """Judgement of a trainer's end."""

    kind: IncidentKind | None
    """Kind of incident; None: it ended well."""
    reason: str


def judge(pulses: list[HeartbeatReading], status: int | None, *, paged: bool) -> TrainerEnd:
    """Return how a trainer ended.

    Args:
        pulses: contents of its pages.
        status: wait status; None where it is not known.
        paged: whether it has pages, as trainers with a SnapshotManager and under `ciuic watch -- COMMAND` do;
            without one only the status can tell.
    """
    said = [pulse.goodbye for pulse in pulses]
    # After a preemption the platform chooses the status, so the page decides.
    if Goodbye.PREEMPTED in said and Goodbye.NONE not in said:
        return TrainerEnd(None, "was preempted, after its last snapshot")
    if status is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) == _INTERRUPTED:
        return TrainerEnd(None, "was interrupted")
    # A known status decides over the page: a program that closed its manager in a `finally` and then ended by
    # an exception has failed, and one that caught its exception and ended with 0 has not.
    if status == 0:
        return TrainerEnd(None, "ended well")
    why = next((pulse.reason for pulse in reversed(pulses) if pulse.goodbye is Goodbye.FAILED), "")
    if status is not None and os.WIFSIGNALED(status):
        if said and all(one is Goodbye.CLOSED for one in said):
            return TrainerEnd(None, "ended well, and crashed after that")
        return TrainerEnd("died", processes.describe(status))
    if why:
        return TrainerEnd("failed", why)
    if status is not None:
        return TrainerEnd("failed", processes.describe(status))
    if said and Goodbye.NONE not in said:
        return TrainerEnd(None, "ended well")
    return TrainerEnd("died", "ended without a goodbye" if paged else "ended with an unknown exit status")


class WatchedTrainer:
    """A watched trainer, with its descriptors."""

    def __init__(
        self,
        identity: ProcessIdentity,
        life: int,
        *,
        name: str,
        where: str,
        kind: Kind,
        heartbeat_seconds: float,
        since_ns: int,
    ) -> None:
        """Take over a trainer's pidfd.

        Args:
            identity: its process.
            life: pidfd, which is taken over; -1: there is no process to watch.
            name: its name.
            where: directory or file that tells it from others with the same name.
            kind: how it was registered.
            heartbeat_seconds: silence that counts as hanging; 0: none.
            since_ns: wall clock of its registration.
        """
        self.identity = identity
        self.life = life
        self.name, self.where, self.kind = name, where, kind
        self.heartbeat_seconds = heartbeat_seconds
        self.since_ns = since_ns
        self.hung = False
        self.hung_reason = ""
        """Why it hangs, as its page or its silence says."""
        self.present = True
        """True if there is a process, as far as is known; False: its pid file names none."""
        self.file_beats = 0
        """Modification time of its heartbeat file in ns; 0: it has none, or there was none yet."""
        self.pid_file: Path | None = None
        """Pid file, which the trainer removes when it ends well."""
        self.forgotten = False
        self.page_came = trio.Event()
        # Name and directory of the manager of each page, by descriptor, the oldest first.
        self._pages: dict[int, tuple[str, str]] = {}
        # Losses of each page that have been seen, by descriptor.
        self._seen_losses: dict[int, int] = {}
        self.losses = LossWatch()
        """Its losses, where it reports them."""
        self.saves_fail = False
        """True while an alert speaks of its saves."""
        self._looked_ns: int | None = None
        self._beats: int | None = None
        # A beat was seen. The first content of a file does not count, which may be left from an earlier run.
        self._beating = False
        self._last_beat_ns = 0
        self._silent_seconds = 0.0
        # Time since the last beat, and the last such times.
        self._gap_seconds = 0.0
        self._gaps: deque[float] = deque(maxlen=_GAPS)

    def silent_too_long(self, times: int) -> float:
        """Return its usual interval in seconds if it has beaten and has been silent for so many times that; else 0.

        It is silent too long after `times` of the median interval, twice the longest of the last ones (a validation, a checkpoint)
        and 5 minutes. A trainer with a time limit of its own, that is done or has no process is none.
        """
        if self._gap_seconds <= _MIN_SILENT_SECONDS or len(self._gaps) < _MIN_GAPS:
            return 0.0
        if self.heartbeat_seconds or self.hung or not times or not self.present or self.closed(self.pulses()):
            return 0.0
        usual = median(self._gaps)
        return usual if self._gap_seconds > max(times * usual, 2 * max(self._gaps)) else 0.0

    @property
    def key(self) -> str:
        """Key of its alert, which is the same when the same training is started again."""
        return trainer_key(self.name, self.where)

    @property
    def label(self) -> str:
        """Name for display."""
        shown = shown_name(self.name)
        if self.where:
            shown += f" ({shown_name(self.where)})"
        return f"{shown}, pid {self.identity.pid}" if self.identity.pid > 0 else shown

    @property
    def paged(self) -> bool:
        """True if it has a heartbeat page."""
        return bool(self._pages)

    def add_page(self, page: int) -> None:
        """Take over the descriptor of a page. A page that is known (of a restarted writer process) is closed."""
        # Each memory file has an inode number of its own.
        number = os.fstat(page).st_ino
        if any(os.fstat(known).st_ino == number for known in self._pages):
            os.close(page)
            return
        self._pages[page] = (self.name, self.where)
        # Its losses were never looked at.
        self._looked_ns = None
        self.page_came.set()
        # A process that makes one manager after the other would collect pages: the oldest ones go.
        while len(self._pages) > _MAX_PAGES:
            gone = next(iter(self._pages))
            del self._pages[gone]
            self._seen_losses.pop(gone, None)
            os.close(gone)

    def pulses(self) -> list[HeartbeatReading]:
        """Return the contents of its pages."""
        return [reading for _, reading in self._readings()]

    def _readings(self) -> Iterator[tuple[tuple[str, str], HeartbeatReading]]:
        for page, manager in self._pages.items():
            with suppress(ValueError, OSError):
                yield manager, read_page(page)

    def saves(self) -> HeartbeatReading:
        """Return the page of the manager with the most failed saves in a row."""
        # A manager that is made again, as in a notebook, takes the place of the earlier one, whose page stays as it is.
        newest = dict(self._readings())
        return max(newest.values(), key=lambda one: one.failed_saves, default=HeartbeatReading())

    def look_at_losses(self) -> int | None:
        """Take what it has reported since the last look, and return the time since boot before that one; None at the first."""
        before_ns, self._looked_ns = self._looked_ns, time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        for page in self._pages:
            with suppress(OSError):
                found = read_losses(page, self._seen_losses.get(page, 0))
                self._seen_losses[page] = found.total
                for step, loss in found.losses:
                    self.losses.add(step, loss)
        return before_ns

    def look(self, elapsed_seconds: float, now_ns: int) -> Literal["beat", "silent", "hung", "recovered"]:
        """Return what has happened since the last look, `elapsed_seconds` ago."""
        pulses = self.pulses()
        its_own = sum(pulse.beats for pulse in pulses)
        beats = its_own + self.file_beats
        self._gap_seconds += elapsed_seconds
        if beats != self._beats:
            # The time before the first beat is none between two.
            if self._beating:
                self._gaps.append(self._gap_seconds)
            self._gap_seconds = 0.0
            self._beating = its_own > 0 or (self._beats is not None and self.file_beats > 0)
            self._beats, self._silent_seconds = beats, 0.0
            if self._beating:
                self._last_beat_ns = now_ns
            if self.hung:
                self.hung = False
                return "recovered"
            return "beat"
        waits = self._beating and self.heartbeat_seconds and self.present and not self.closed(pulses)
        self._silent_seconds = self._silent_seconds + elapsed_seconds if waits else 0.0
        why = next((pulse.reason for pulse in pulses if pulse.hung), "")
        if waits and self._silent_seconds >= self.heartbeat_seconds:
            why = why or f"no beat for {self.heartbeat_seconds:g} s"
        if why and not self.hung:
            self.hung, self.hung_reason = True, why
            return "hung"
        return "silent"

    @staticmethod
    def closed(pulses: list[HeartbeatReading]) -> bool:
        """Return whether it has said goodbye on every page."""
        return bool(pulses) and all(pulse.goodbye is not Goodbye.NONE for pulse in pulses)

    def end(self, status: int | None) -> TrainerEnd:
        """Return how it ended; see `judge`. Looks at its pid file, so it may block on a disk."""
        if status is None and self.pid_file is not None and not os.path.lexists(self.pid_file):
            return TrainerEnd(None, "ended, and took its pid file away")
        return judge(self.pulses(), status, paged=self.paged)

    def status(self) -> TrainerStatus:
        """Return its part of the status document."""
        pulses, saves = self.pulses(), self.saves()
        state: Literal["running", "hung", "closed", "absent"] = "running"
        if self.hung:
            state = "hung"
        elif not self.present:
            state = "absent"
        elif self.closed(pulses):
            state = "closed"
        return TrainerStatus(
            name=self.name,
            where=self.where,
            pid=max(0, self.identity.pid),
            user=user_name(self.identity.uid),
            kind=self.kind,
            state=state,
            since=rfc3339(self.since_ns),
            step=max((pulse.step for pulse in pulses), default=0),
            last_beat=rfc3339(self._last_beat_ns) if self._last_beat_ns else "",
            heartbeat_seconds=self.heartbeat_seconds,
            failed_saves=saves.failed_saves,
            failing_since=rfc3339(saves.failing_since_ns) if saves.failed_saves else "",
            save_error=saves.save_error,
        )

    def close(self) -> None:
        """Close every descriptor."""
        for fd in (self.life, *self._pages):
            if fd >= 0:
                os.close(fd)
        self.life, self._pages = -1, {}
