"""One trainer that is watched: its process, its pages, and what its end was. No waiting, no deciding what follows.

Guarantees: which process it is does not depend on its pid alone, so that a later one with that number is another; a beat is counted by
our own clock, whatever the trainer's page claims, and time in which we did not look (the machine stood still) is nobody's silence.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple

import trio

from ciuic import processes
from ciuic.control_types import IncidentKind, TrainerStatus, rfc3339
from ciuic.daemon.accounts import user_name
from ciuic.plain_names import shown_name, trainer_key
from ciuic.watch_client import Kind
from ciuic.watch_page import Goodbye, Pulse, read_page

MOST_PAGES: Final = 16
"""Of one process: each SnapshotManager has one."""
_INTERRUPTED: Final = 2
"""SIGINT: somebody sat there and pressed ^C."""


class Identity(NamedTuple):
    """One process, for ever. Who registers may only speak of what is his own, so the user is part of it."""

    uid: int
    pid: int
    start_ticks: int


class End(NamedTuple):
    """How a trainer ended; ``kind`` None: well."""

    kind: IncidentKind | None
    reason: str


def judge(pulses: list[Pulse], status: int | None, *, paged: bool) -> End:
    """What the end of a process was.

    ``status``: its wait status, None where nobody knows. ``paged``: whether it has pages, as SnapshotManager's and those of
    `ciuic watch -- COMMAND` do; without one nothing but the status can tell.
    """
    said = [pulse.goodbye for pulse in pulses]
    if Goodbye.PREEMPTED in said and Goodbye.NONE not in said:
        return End(None, "was preempted, after its last snapshot")
    if status is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) == _INTERRUPTED:
        return End(None, "was interrupted")
    if status == 0:
        return End(None, "ended well")
    why = next((pulse.reason for pulse in reversed(pulses) if pulse.goodbye is Goodbye.FAILED), "")
    if status is not None and os.WIFSIGNALED(status):
        if said and all(one is Goodbye.CLOSED for one in said):
            return End(None, "ended well, and crashed after that")
        return End("died", processes.describe(status))
    if why:
        return End("failed", why)
    if status is not None:
        return End("failed", processes.describe(status))
    if said and Goodbye.NONE not in said:
        return End(None, "ended well")
    return End("died", "ended without a word" if paged else "ended, nobody knows how")


class Trainer:
    """``life``: its pidfd, which becomes this object's, or -1 where there is no process to watch."""

    def __init__(
        self,
        identity: Identity,
        life: int,
        *,
        name: str,
        where: str,
        kind: Kind,
        heartbeat_seconds: float,
        since_ns: int,
    ) -> None:
        self.identity = identity
        self.life = life
        self.name, self.where, self.kind = name, where, kind
        self.heartbeat_seconds = heartbeat_seconds
        self.since_ns = since_ns
        self.hung = False
        self.present = True
        """False: a file that is to name its process names none."""
        self.file_beats = 0
        """Time of its heartbeat file; 0: it has none, or there was none yet."""
        self.pid_file: Path | None = None
        """One that ends well removes it."""
        self.forgotten = False
        self.page_came = trio.Event()
        self._pages: list[int] = []
        self._beats: int | None = None
        self._beating = False
        """It has been seen to beat: a file may be left from an earlier run."""
        self._last_beat_ns = 0
        self._silent_seconds = 0.0

    @property
    def key(self) -> str:
        """Of its alert: the same for the same training when it comes again."""
        return trainer_key(self.name, self.where)

    @property
    def label(self) -> str:
        """For a person."""
        shown = shown_name(self.name)
        if self.where:
            shown += f" ({shown_name(self.where)})"
        return f"{shown}, pid {self.identity.pid}" if self.identity.pid > 0 else shown

    @property
    def paged(self) -> bool:
        return bool(self._pages)

    def add_page(self, page: int) -> None:
        """Takes the descriptor over. The same page again, of a writer that was started anew, is no second one."""
        number = os.fstat(page).st_ino
        if any(os.fstat(known).st_ino == number for known in self._pages):
            os.close(page)
            return
        self._pages.append(page)
        self.page_came.set()
        while len(self._pages) > MOST_PAGES:
            os.close(self._pages.pop(0))

    def pulses(self) -> list[Pulse]:
        """What its pages say."""
        found = []
        for page in self._pages:
            with suppress(ValueError, OSError):
                found.append(read_page(page))
        return found

    def look(self, elapsed_seconds: float, now_ns: int) -> Literal["beat", "silent", "hung", "recovered"]:
        """What has become of it since the last look, ``elapsed_seconds`` ago."""
        pulses = self.pulses()
        its_own = sum(pulse.beats for pulse in pulses)
        beats = its_own + self.file_beats
        if beats != self._beats:
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
        if waits and not self.hung and self._silent_seconds >= self.heartbeat_seconds:
            self.hung = True
            return "hung"
        return "silent"

    @staticmethod
    def closed(pulses: list[Pulse]) -> bool:
        """Whether it has said that it is done, by every page."""
        return bool(pulses) and all(pulse.goodbye is not Goodbye.NONE for pulse in pulses)

    def end(self, status: int | None) -> End:
        """See ``judge``. Looks at its pid file, so it may wait for a disk."""
        if status is None and self.pid_file is not None and not os.path.lexists(self.pid_file):
            return End(None, "ended, and took its pid file away")
        return judge(self.pulses(), status, paged=self.paged)

    def status(self) -> TrainerStatus:
        pulses = self.pulses()
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
        )

    def close(self) -> None:
        """Lets go of every descriptor."""
        for fd in (self.life, *self._pages):
            if fd >= 0:
                os.close(fd)
        self.life, self._pages = -1, []
