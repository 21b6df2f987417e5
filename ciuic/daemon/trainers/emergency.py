"""Consequences of an incident of a trainer.

An emergency snapshot, an alert, an event for the alert hook, a log entry.

Guarantees: incidents that happen together share one snapshot; a trainer that dies again and again gets no
more than the configured number of snapshots an hour, and all trainers together four times as many; where no
snapshot is taken, the incident has the reason. The alert does not wait for a slow disk. Belongs to the trio
thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from typing import Final, NamedTuple

import structlog
import trio

from ciuic.daemon.base.events import Alerts, EventBus
from ciuic.daemon.snapshots.pending import PendingSnapshot
from ciuic.daemon.trainers.trainer import WatchedTrainer
from ciuic.errors import CiuicError
from ciuic.printable import one_line, shown_name
from ciuic.protocol.control_types import Incident, IncidentKind, SnapshotRequest, rfc3339, trainer_key
from ciuic.retention import TAG_EMERGENCY

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
