"""Registry of watched trainers: their ends, their silence, and the journal by which the next daemon finds them.

Guarantees: an end is noticed at once, through a pidfd; a trainer is reported once for each time that it
hangs; a trainer that said goodbye is not reported. An end that no daemon saw is reported as "lost".

The journal of trainers and incidents is `watched.json` in the runtime directory. Like every file there it
need not survive the kernel. It is replaced atomically; an unreadable journal counts as empty.

Leaves to others who may register (watch.py). Belongs to the trio
thread.

Watched trainer: its process, its heartbeat pages, and the judgement of its end. Waits for nothing.

Guarantees: a process is not identified by its pid alone, so that a later process with the same pid is another
one; a beat is timed by the daemon's clock, whatever the trainer's page claims, and time in which the daemon
did not look (the host was suspended) does not count as silence.

Consequences of an incident of a trainer.

An emergency snapshot, an alert, an event for the alert hook, a log entry.

Guarantees: incidents that happen together share one snapshot; a trainer that dies again and again gets no
more than the configured number of snapshots an hour, and all trainers together four times as many; where no
snapshot is taken, the incident has the reason. The alert does not wait for a slow disk. Belongs to the trio
thread.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Final, Literal, NamedTuple

import msgspec
import structlog
import trio

from ciuic.daemon.base.accounts import user_name
from ciuic.daemon.base.events import Alerts, EventBus
from ciuic.daemon.snapshots.pending import PendingSnapshot
from ciuic.daemon.trainers.loss_watch import LossWatch, trouble_text
from ciuic.errors import Busy, CiuicError
from ciuic.printable import escaped, one_line, shown_name
from ciuic.protocol.control_types import (
    Incident,
    IncidentKind,
    SnapshotRequest,
    TrainerStatus,
    rfc3339,
    trainer_key,
)
from ciuic.protocol.heartbeat_page import Goodbye, HeartbeatReading, read_losses, read_page
from ciuic.protocol.watch_client import Hello, Kind
from ciuic.retention import TAG_EMERGENCY
from ciuic.structs import decode_json
from ciuic.system import processes
from ciuic.system.disk import Disk
from ciuic.system.privileges import may_trace
from ciuic.units import human_duration, plural

# Time in which further incidents are collected: when a host fails, several trainers die within moments of one
# another.
_GATHER_SECONDS: Final = 0.2
# Longest wait of an alert for the id of its snapshot: before a cut the kernel's cache may have to be written.
_ALERT_SECONDS: Final = 10.0
_HOUR_SECONDS: Final = 3600.0
# Snapshots of all trainers in an hour, as a multiple of the configured number for one.
_TOTAL_LIMIT_FACTOR: Final = 4
# Snapshots of one user's trainers, as such a multiple. A user may register any number of names, and must not
# use up the total.
_USER_LIMIT_FACTOR: Final = 2
# Standing alerts about trainers; names are the users' to choose, and must not fill the status document.
MAX_ALERTS: Final = 64
_WORDS: Final[dict[IncidentKind, str]] = {
    "died": "died",
    "failed": "failed",
    "hung": "hangs",
    "lost": "is gone",
    "recovered": "goes on",
}
log = structlog.get_logger(__name__)


class _Waiting(NamedTuple):
    incident: Incident
    key: str
    text: str


class _Cut(NamedTuple):
    snapshot: str
    key: str
    user: str
    # Wall clock of the cut.
    seconds: float


class Emergencies:
    """Queue of incidents and their consequences. `run` is its task."""

    def __init__(
        self,
        take: Callable[[SnapshotRequest], Awaitable[PendingSnapshot]],
        *,
        alerts: Alerts,
        events: EventBus,
        now_ns: Callable[[], int],
        per_hour: Callable[[], int],
        on_incident: Callable[[Incident], None],
    ) -> None:
        """Prepare to handle incidents.

        Args:
            take: cuts a snapshot; raises CiuicError when none can be cut.
            alerts: where incidents are reported.
            events: bus for the alert hook and for metrics.
            now_ns: wall clock.
            per_hour: returns the configured number of emergency snapshots an hour for one trainer; 0: none.
            on_incident: called with each incident when its consequences are known.
        """
        self._take = take
        self._alerts = alerts
        self._events = events
        self._now_ns = now_ns
        self._per_hour = per_hour
        self._on_incident = on_incident
        self._waiting: list[_Waiting] = []
        self._wake = trio.Event()
        # Emergency snapshots of the last hour, once for each trainer.
        self._taken: list[_Cut] = []

    def remember(self, incidents: Iterable[Incident]) -> None:
        """Count the emergency snapshots of a predecessor.

        A daemon that is restarted again and again must not evade the limit.
        """
        for incident in incidents:
            if incident.snapshot:
                time = datetime.fromisoformat(incident.time).timestamp()
                key = trainer_key(incident.trainer.name, incident.trainer.where)
                self._taken.append(_Cut(incident.snapshot, key, incident.trainer.user, time))

    def report(self, trainer: WatchedTrainer, kind: IncidentKind, reason: str) -> None:
        """Queue an incident. Returns at once."""
        incident = Incident(kind=kind, time=rfc3339(self._now_ns()), trainer=trainer.status(), reason=reason)
        text = (
            f"trainer {trainer.label} {_WORDS[kind]}: {one_line(reason)}"
            if reason
            else f"trainer {trainer.label} {_WORDS[kind]}"
        )
        log.error("trainer_incident", kind=kind, trainer=trainer.label, reason=reason)
        self._waiting.append(_Waiting(incident, trainer.key, text))
        self._wake.set()

    async def run(self) -> None:
        """Handle incidents, until cancelled."""
        while True:
            await self._wake.wait()
            await trio.sleep(_GATHER_SECONDS)
            # Renewed before the incidents are taken, so that one that comes during the snapshot wakes the
            # task again.
            self._wake = trio.Event()
            waiting, self._waiting = self._waiting, []
            async with trio.open_nursery() as nursery:
                told = trio.Event()
                nursery.start_soon(self._tell_in_time, waiting, told)
                await self._snapshot(waiting)
                told.set()

    async def _snapshot(self, waiting: list[_Waiting]) -> None:
        """Take one snapshot for all incidents that are entitled to one, and record the outcome in them."""
        serious = [one for one in waiting if one.incident.kind in ("died", "failed", "hung")]
        entitled = [one for one in serious if not self._limit(one)]
        if not entitled:
            return
        message = "; ".join(one.text for one in entitled[:3])
        message += f"; and {len(entitled) - 3} more" if len(entitled) > 3 else ""
        try:
            taken = await self._take(SnapshotRequest(message=message, tags=[TAG_EMERGENCY]))
        except CiuicError as error:
            log.error("emergency_snapshot_failed", error=str(error))
            for one in entitled:
                one.incident.no_snapshot = str(error)
        except Exception as error:
            # A defect in taking snapshots must not end the watch.
            log.exception("emergency_snapshot_failed")
            for one in entitled:
                one.incident.no_snapshot = f"a defect: {error!r}"
        else:
            now = self._now_ns() / 1e9
            self._taken += [_Cut(taken.state.id, one.key, one.incident.trainer.user, now) for one in entitled]
            # Incidents beyond the limit get the id as well: the snapshot has their trainers' files too.
            for one in serious:
                one.incident.snapshot, one.incident.no_snapshot = taken.state.id, ""

    def _limit(self, one: _Waiting) -> bool:
        """Return whether a limit is reached; the incident has the reason then."""
        now, limit, user = self._now_ns() / 1e9, self._per_hour(), one.incident.trainer.user
        # A cut in the future (the clock was put back) does not count.
        self._taken = [cut for cut in self._taken if 0 <= now - cut.seconds < _HOUR_SECONDS]
        its_own = len({cut.snapshot for cut in self._taken if cut.key == one.key})
        of_user = len({cut.snapshot for cut in self._taken if cut.user == user})
        in_all = len({cut.snapshot for cut in self._taken})
        if limit == 0:
            one.incident.no_snapshot = "emergency snapshots are turned off (watch.emergency_per_hour)"
        elif its_own >= limit:
            one.incident.no_snapshot = f"it has had {its_own} within the hour"
        elif user != "root" and of_user >= _USER_LIMIT_FACTOR * limit:
            one.incident.no_snapshot = f"trainers of {user} have had {of_user} within the hour"
        elif in_all >= _TOTAL_LIMIT_FACTOR * limit:
            one.incident.no_snapshot = f"there were {in_all} within the hour"
        return bool(one.incident.no_snapshot)

    async def _tell_in_time(self, waiting: list[_Waiting], told: trio.Event) -> None:
        with trio.move_on_after(_ALERT_SECONDS):
            await told.wait()
        for one in waiting:
            self._tell(one)

    def _tell(self, one: _Waiting) -> None:
        incident = one.incident
        if incident.kind == "recovered":
            self._alerts.clear(one.key)
        else:
            self._make_room()
            self._alerts.report(
                one.key,
                one.text,
                hint=_hint(incident),
                severity="warning" if incident.kind == "lost" else "problem",
            )
        self._on_incident(incident)
        self._events.emit(f"trainer_{incident.kind}", incident=incident, detail=one.text)

    def _make_room(self) -> None:
        """Clear the oldest alerts of trainers, so that a new one stays within `MAX_ALERTS`."""
        standing = [alert for alert in self._alerts.standing() if alert.key.startswith("trainer:")]
        for alert in sorted(standing, key=lambda alert: alert.since)[
            : max(0, len(standing) + 1 - MAX_ALERTS)
        ]:
            self._alerts.clear(alert.key)


def _hint(incident: Incident) -> str:
    if incident.snapshot:
        return f"emergency snapshot {incident.snapshot}; cleared when the trainer registers again, or by: ciuic watch --forget {shown_name(incident.trainer.name)}"
    why = f"no emergency snapshot: {incident.no_snapshot}; " if incident.no_snapshot else ""
    return f"{why}cleared when the trainer registers again, or by: ciuic watch --forget {shown_name(incident.trainer.name)}"


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


JOURNAL_NAME: Final = "watched.json"
# Incidents that are kept over restarts, for the status document and for the hourly limits.
MAX_INCIDENTS: Final = 50
# The daemon reads every page with pread(2) once a second; the trainer stores to it without a system call (0.2
# µs a step) and sends nothing (docs/decisions/watching-trainers.md).
LOOK_SECONDS: Final = 1.0
# Longest wait for an exit status, which is known when the parent has waited for the process; most do so at
# once.
_REAPED_SECONDS: Final = 1.0
# Time that the writer process of a trainer has to register with a new daemon.
RETURN_SECONDS: Final = 30.0
# Each trainer takes a pidfd, up to 16 pages and a task.
MAX_TRAINERS: Final = 512
# A user may register any number of processes, and must not use up the places of all.
MAX_TRAINERS_OF_A_USER: Final = 64
# Saves in a row that fail before an alert: the next one may succeed after a moment without memory.
_MIN_FAILED_SAVES: Final = 2
# Beginnings of the keys of alerts: a trainer is silent for much longer than usual; its loss; its saves.
_KEY_SILENCE: Final = "beat:"
_KEY_LOSS: Final = "loss:"
_KEY_SAVES: Final = "saves:"


def _key(kind: str, trainer: WatchedTrainer) -> str:
    return kind + trainer.key.removeprefix("trainer:")


class WatchRecord(msgspec.Struct, kw_only=True):
    """Record of a trainer, without what only descriptors can tell."""

    uid: int
    pid: int
    start_ticks: int
    name: str
    where: str
    kind: Kind
    heartbeat_seconds: float
    since_ns: int


class WatchJournal(msgspec.Struct, kw_only=True):
    """Content of the file."""

    trainers: list[WatchRecord] = []
    incidents: list[Incident] = []
    """Incidents, newest first."""


def read_journal(runtime_dir: Path) -> WatchJournal:
    """Return the predecessor's journal; empty when there is none or it cannot be read."""
    try:
        return decode_json((runtime_dir / JOURNAL_NAME).read_bytes(), WatchJournal)
    except FileNotFoundError:
        return WatchJournal()
    except (OSError, msgspec.DecodeError) as error:
        log.warning("watched_not_read", error=str(error))
        return WatchJournal()


def write_journal(runtime_dir: Path, journal: WatchJournal) -> None:
    """Replace the journal. A failure is logged; it costs the next daemon's knowledge and nothing else."""
    try:
        # 0600: names and reasons of all users are in it, and the directory is open to everybody.
        Disk().replace_file(runtime_dir / JOURNAL_NAME, msgspec.json.encode(journal), durable=False)
    except OSError as error:
        log.warning("watched_not_written", error=str(error))


def remove_journal(runtime_dir: Path) -> None:
    """Remove the journal: the daemon has stopped and no other one follows."""
    with suppress(OSError):
        (runtime_dir / JOURNAL_NAME).unlink(missing_ok=True)


class TrainerRegistry:
    """All watched trainers.

    `nursery` is set while the daemon works; each trainer with a process has a task in it.
    """

    def __init__(
        self,
        *,
        alerts: Alerts,
        emergencies: Emergencies,
        now_ns: Callable[[], int],
        on_change: Callable[[], None],
        silence: Callable[[], int] = lambda: 0,
        newest_snapshot: Callable[[int], str] = lambda before_ns: "",
    ) -> None:
        self.nursery: trio.Nursery | None = None
        self._alerts = alerts
        self._emergencies = emergencies
        self._now_ns = now_ns
        self._on_change = on_change
        self._silence = silence
        self._newest_snapshot = newest_snapshot
        self._may_trace = may_trace()
        self._watched: dict[ProcessIdentity, WatchedTrainer] = {}
        # Trainers that ended while no daemon watched; their writer processes may still report how.
        self._missing: dict[ProcessIdentity, WatchRecord] = {}

    # -- registration

    def add(
        self, identity: ProcessIdentity, life: int, pages: list[int], hello: Hello, *, clears: bool = True
    ) -> WatchedTrainer:
        """Watch a trainer from now on, and take over its descriptors.

        Args:
            identity: its process.
            life: pidfd of the process; -1: there is none.
            pages: descriptors of its heartbeat pages.
            hello: its registration.
            clears: clear the alert about its last incident, because it is there again.

        Raises:
            Busy: too many are watched already; the descriptors stay the caller's.
        """
        known = self._watched.get(identity)
        if known is None:
            self._refuse_too_many(identity.uid)
            # Its writer process has come back in time.
            self._missing.pop(identity, None)
            known = self._start(identity, life, hello, self._now_ns())
        else:
            os.close(life)
            known.name, known.where, known.kind = hello.name, hello.where, hello.kind
        # One process may have several managers with time limits of their own; the shortest counts.
        known.heartbeat_seconds = min(
            filter(None, (known.heartbeat_seconds, hello.heartbeat_seconds)), default=0.0
        )
        for page in pages:
            known.add_page(page)
        self._look_at_saves(known)
        if clears:
            self._alerts.clear(known.key)
            # Both stand after the end of the trainer, until it is started again.
            if known.losses.trouble is None:
                self._alerts.clear(_key(_KEY_LOSS, known))
            if not known.saves_fail:
                self._alerts.clear(_key(_KEY_SAVES, known))
        log.info(
            "trainer_watched", trainer=known.label, kind=known.kind, heartbeat_seconds=known.heartbeat_seconds
        )
        self._on_change()
        return known

    def _refuse_too_many(self, uid: int) -> None:
        its_own = sum(identity.uid == uid for identity in self._watched)
        if len(self._watched) >= MAX_TRAINERS or (uid != 0 and its_own >= MAX_TRAINERS_OF_A_USER):
            raise Busy(
                f"{plural(len(self._watched), 'trainer is', 'trainers are')} watched already, {its_own} of this user"
            )

    def _start(self, identity: ProcessIdentity, life: int, hello: Hello, since_ns: int) -> WatchedTrainer:
        trainer = WatchedTrainer(
            identity,
            life,
            name=hello.name,
            where=hello.where,
            kind=hello.kind,
            heartbeat_seconds=hello.heartbeat_seconds,
            since_ns=since_ns,
        )
        self._watched[identity] = trainer
        assert self.nursery is not None
        if life >= 0:
            self.nursery.start_soon(self._await_end, trainer)
        return trainer

    def drop(self, trainer: WatchedTrainer) -> None:
        """Stop watching a trainer, without an incident."""
        if self._watched.get(trainer.identity) is trainer:
            del self._watched[trainer.identity]
            trainer.forgotten = True
            for kind in (_KEY_SILENCE, _KEY_LOSS, _KEY_SAVES):
                self._alerts.clear(_key(kind, trainer))
            if trainer.life < 0:
                trainer.close()
            # Otherwise the task that waits for its end closes it: a descriptor that is waited for must not be
            # closed.
            self._on_change()

    def forget(self, text: str) -> int:
        """Stop watching trainers with this name or pid, clear their alerts, and return their number."""
        found = 0
        for trainer in list(self._watched.values()):
            known = (trainer.name, escaped(trainer.name), str(trainer.identity.pid))
            if text in known and trainer.kind != "file":
                self.drop(trainer)
                self._alerts.clear(trainer.key)
                found += 1
        for alert in self._alerts.standing():
            if alert.key.startswith(
                tuple(
                    f"{kind}{name}:"
                    for kind in ("trainer:", _KEY_LOSS, _KEY_SAVES)
                    for name in (text, escaped(text))
                )
            ):
                self._alerts.clear(alert.key)
                found += 1
        return found

    def find(self, identity: ProcessIdentity) -> WatchedTrainer | None:
        """Return the watched trainer of this process."""
        return self._watched.get(identity)

    def uids(self) -> set[int]:
        """Return the users with a watched trainer."""
        return {identity.uid for identity in self._watched}

    def statuses(self) -> list[TrainerStatus]:
        """Return the status of every watched trainer."""
        return [trainer.status() for trainer in self._watched.values()]

    # -- heartbeats and ends

    async def look(self) -> None:
        """Look at every page once a second, until cancelled."""
        while True:
            await trio.sleep(LOOK_SECONDS)
            for trainer in list(self._watched.values()):
                try:
                    self._look_at(trainer)
                except Exception:
                    log.exception("trainer_not_looked_at", trainer=trainer.label)

    def _look_at(self, trainer: WatchedTrainer) -> None:
        # A fixed second instead of a clock: time in which the daemon did not run may be time in which the
        # trainer did not run either.
        found = trainer.look(LOOK_SECONDS, self._now_ns())
        if found == "hung":
            self._emergencies.report(trainer, "hung", trainer.hung_reason)
        elif found == "recovered":
            self._emergencies.report(trainer, "recovered", "")
        self._look_at_losses(trainer)
        self._look_at_saves(trainer)
        usual_seconds = trainer.silent_too_long(self._silence())
        if not usual_seconds:
            self._alerts.clear(_key(_KEY_SILENCE, trainer))
        elif self._may_alert(_KEY_SILENCE):
            # The usual interval and not the silence, which would make another wording each second.
            self._alerts.report(
                _key(_KEY_SILENCE, trainer),
                f"trainer {trainer.label} has stopped to beat: it used to every {human_duration(max(1, usual_seconds))}",
                hint="it may hang; heartbeat_seconds of its manager, or [[trainer]] heartbeat, sets a limit with an emergency snapshot",
                severity="warning",
            )

    def _may_alert(self, kind: str) -> bool:
        # Names are the users' to choose, and must not fill the status document.
        return sum(alert.key.startswith(kind) for alert in self._alerts.standing()) < MAX_ALERTS

    def _look_at_saves(self, trainer: WatchedTrainer) -> None:
        saves = trainer.saves()
        if (saves.failed_saves >= _MIN_FAILED_SAVES) == trainer.saves_fail:
            return
        trainer.saves_fail = not trainer.saves_fail
        if not trainer.saves_fail:
            self._alerts.clear(_key(_KEY_SAVES, trainer))
        elif self._may_alert(_KEY_SAVES):
            # Once, without the number: each further failure would be announced as another wording.
            self._alerts.report(
                _key(_KEY_SAVES, trainer),
                f"the saves of trainer {trainer.label} fail: {saves.save_error}",
                hint="a failure now costs the work since its last snapshot; its log has every error, and ciuic status the last",
                since_ns=saves.failing_since_ns,
            )

    def _look_at_losses(self, trainer: WatchedTrainer) -> None:
        before_ns = trainer.look_at_losses()
        losses = trainer.losses
        if losses.trouble == losses.reported:
            return
        if losses.trouble is None:
            self._alerts.clear(_key(_KEY_LOSS, trainer))
        elif self._may_alert(_KEY_LOSS):
            snapshot = "" if before_ns is None else self._newest_snapshot(before_ns)
            text, hint, severity = trouble_text(losses.trouble, snapshot)
            self._alerts.report(
                _key(_KEY_LOSS, trainer),
                f"the loss of trainer {trainer.label} {text}",
                hint=hint,
                severity=severity,
            )
        losses.reported = losses.trouble

    async def _await_end(self, trainer: WatchedTrainer) -> None:
        try:
            await trio.lowlevel.wait_readable(trainer.life)
            if not trainer.forgotten:
                # What came since the last look: a short run may end within a second.
                self._look_at_saves(trainer)
            await self._report_end(trainer)
        except Exception:
            log.exception("trainer_not_awaited", trainer=trainer.label)
        # Not reached when this task is cancelled: the daemon ends then, and the next one has to find the
        # trainer.
        if self._watched.get(trainer.identity) is trainer:
            del self._watched[trainer.identity]
        self._alerts.clear(_key(_KEY_SILENCE, trainer))
        trainer.close()
        self._on_change()

    async def _report_end(self, trainer: WatchedTrainer) -> None:
        status = await self._status_of(trainer)
        unknown = status is None and trainer.kind == "library"
        if unknown and not trainer.paged and not trainer.forgotten:
            # Taken over from a predecessor, so its page is not here yet: the writer process, which outlives
            # the trainer, brings it.
            with trio.move_on_after(RETURN_SECONDS):
                await trainer.page_came.wait()
        end = await trio.to_thread.run_sync(trainer.end, status, abandon_on_cancel=True)
        if trainer.forgotten:
            return
        if unknown and not trainer.paged:
            self._lose(trainer)
        else:
            self._ended(trainer, end)

    async def _status_of(self, trainer: WatchedTrainer) -> int | None:
        _, pid, ticks = trainer.identity
        deadline = trio.current_time() + _REAPED_SECONDS
        while True:
            status = processes.end_of(trainer.life)
            if status is None and pid > 0 and self._may_trace:
                status = processes.end_of_zombie(pid, ticks)
            if status is not None or trio.current_time() >= deadline:
                return status
            # The parent waits for its child at once as a rule, so the status is there after one or two looks.
            await trio.sleep(0.02)

    def _ended(self, trainer: WatchedTrainer, end: TrainerEnd) -> None:
        if end.kind is None:
            log.info("trainer_ended", trainer=trainer.label, how=end.reason)
            self._alerts.clear(trainer.key)  # it may have hung before
        else:
            self._emergencies.report(trainer, end.kind, end.reason)

    def _lose(self, trainer: WatchedTrainer) -> None:
        self._emergencies.report(
            trainer, "lost", "it ended while no daemon watched; its exit status is not known"
        )

    # -- from one daemon to the next

    def records(self) -> list[WatchRecord]:
        """Return the records for a successor, which finds trainers of the configuration by itself."""
        living = [
            WatchRecord(
                uid=trainer.identity.uid,
                pid=trainer.identity.pid,
                start_ticks=trainer.identity.start_ticks,
                name=trainer.name,
                where=trainer.where,
                kind=trainer.kind,
                heartbeat_seconds=trainer.heartbeat_seconds,
                since_ns=trainer.since_ns,
            )
            for trainer in self._watched.values()
            if trainer.kind != "file"
        ]
        return [*living, *self._missing.values()]

    def take_over(self, records: list[WatchRecord]) -> None:
        """Watch a predecessor's trainers again.

        The writers of those that have ended get `RETURN_SECONDS` to report how.
        """
        assert self.nursery is not None
        for record in records:
            identity = ProcessIdentity(record.uid, record.pid, record.start_ticks)
            if identity in self._watched:
                continue
            hello = Hello(
                name=record.name,
                where=record.where,
                kind=record.kind,
                pid=record.pid,
                start_ticks=record.start_ticks,
                heartbeat_seconds=record.heartbeat_seconds,
            )
            try:
                life = processes.life_of(record.pid, record.start_ticks)
            except OSError:
                self._missing[identity] = record
                self.nursery.start_soon(self._await_return, identity, hello, record.since_ns)
            else:
                trainer = self._start(identity, life, hello, record.since_ns)
                log.info("trainer_watched_again", trainer=trainer.label)

    async def _await_return(self, identity: ProcessIdentity, hello: Hello, since_ns: int) -> None:
        await trio.sleep(RETURN_SECONDS)
        if self._missing.pop(identity, None) is not None:
            trainer = WatchedTrainer(
                identity, -1, name=hello.name, where=hello.where, kind=hello.kind, heartbeat_seconds=0.0, since_ns=since_ns
            )  # fmt: skip
            self._lose(trainer)
            self._on_change()

    def close(self) -> None:
        """Close all descriptors. Call it when no task waits for them any more."""
        for trainer in self._watched.values():
            trainer.close()
        self._watched.clear()
