"""What follows when something has happened to a trainer: an emergency snapshot, an alert, an event for the hook, a line in the log.

Guarantees: those that happen together share one snapshot; one trainer that dies again and again gets no more than the configured
number an hour, and all together four times as many; what keeps a snapshot from being taken is said in its place. The alert does not wait
for a disk that is slow. Belongs to the trio thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from typing import Final, NamedTuple, Protocol

import structlog
import trio

from ciuic.control_types import Incident, IncidentKind, SnapshotRequest, SnapshotState, rfc3339
from ciuic.daemon.alerts import Alerts
from ciuic.daemon.events import EventBus
from ciuic.daemon.trainer import Trainer
from ciuic.errors import CiuicError
from ciuic.plain_names import one_line, shown_name, trainer_key
from ciuic.retention import TAG_EMERGENCY

GATHER_SECONDS: Final = 0.2
"""When a machine goes wrong several trainers die, within moments of one another."""
ALERT_SECONDS: Final = 10.0
"""So long an alert waits to name the snapshot: before a cut the kernel's cache may have to be written."""
HOUR_SECONDS: Final = 3600.0
ALL_TOGETHER: Final = 4
OF_A_USER: Final = 2
"""Names cost nothing: one user must not be able to use up what is there for all."""
MOST_ALERTS: Final = 64
_WORDS: Final[dict[IncidentKind, str]] = {
    "died": "died",
    "failed": "failed",
    "hung": "hangs",
    "lost": "is gone",
    "recovered": "goes on",
}
log = structlog.get_logger(__name__)


class Taken(Protocol):
    """A snapshot that was cut."""

    @property
    def state(self) -> SnapshotState: ...


class _Waiting(NamedTuple):
    incident: Incident
    key: str
    text: str


class _Cut(NamedTuple):
    snapshot: str
    key: str
    user: str
    seconds: float
    """Of the wall clock."""


class Emergencies:
    """``run`` is its task. ``take`` cuts a snapshot; CiuicError says why there is none."""

    def __init__(
        self,
        take: Callable[[SnapshotRequest], Awaitable[Taken]],
        *,
        alerts: Alerts,
        events: EventBus,
        now_ns: Callable[[], int],
        per_hour: Callable[[], int],
        on_incident: Callable[[Incident], None],
    ) -> None:
        self._take = take
        self._alerts = alerts
        self._events = events
        self._now_ns = now_ns
        self._per_hour = per_hour
        self._on_incident = on_incident
        self._waiting: list[_Waiting] = []
        self._wake = trio.Event()
        self._taken: list[_Cut] = []
        """Of the last hour."""

    def remember(self, incidents: Iterable[Incident]) -> None:
        """Those of a predecessor count: a daemon that is started again and again must not be a way round the limit."""
        for incident in incidents:
            if incident.snapshot:
                time = datetime.fromisoformat(incident.time).timestamp()
                key = trainer_key(incident.trainer.name, incident.trainer.where)
                self._taken.append(_Cut(incident.snapshot, key, incident.trainer.user, time))

    def report(self, trainer: Trainer, kind: IncidentKind, reason: str) -> None:
        """Something has happened. Returns at once."""
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
        """For ever."""
        while True:
            await self._wake.wait()
            await trio.sleep(GATHER_SECONDS)
            self._wake = trio.Event()
            waiting, self._waiting = self._waiting, []
            async with trio.open_nursery() as nursery:
                told = trio.Event()
                nursery.start_soon(self._tell_in_time, waiting, told)
                await self._snapshot(waiting)
                told.set()

    async def _snapshot(self, waiting: list[_Waiting]) -> None:
        """One for all that may have one."""
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
            # A defect there must not end the watch.
            log.exception("emergency_snapshot_failed")
            for one in entitled:
                one.incident.no_snapshot = f"a defect: {error!r}"
        else:
            now = self._now_ns() / 1e9
            self._taken += [_Cut(taken.state.id, one.key, one.incident.trainer.user, now) for one in entitled]
            for one in serious:  # those beyond the limit are in it as well
                one.incident.snapshot, one.incident.no_snapshot = taken.state.id, ""

    def _limit(self, one: _Waiting) -> bool:
        """Whether it is one too many, which the incident then says."""
        now, most, user = self._now_ns() / 1e9, self._per_hour(), one.incident.trainer.user
        self._taken = [cut for cut in self._taken if 0 <= now - cut.seconds < HOUR_SECONDS]
        its_own = len({cut.snapshot for cut in self._taken if cut.key == one.key})
        of_user = len({cut.snapshot for cut in self._taken if cut.user == user})
        in_all = len({cut.snapshot for cut in self._taken})
        if most == 0:
            one.incident.no_snapshot = "emergency snapshots are turned off (watch.emergency_per_hour)"
        elif its_own >= most:
            one.incident.no_snapshot = f"it has had {its_own} within the hour"
        elif user != "root" and of_user >= OF_A_USER * most:
            one.incident.no_snapshot = f"trainers of {user} have had {of_user} within the hour"
        elif in_all >= ALL_TOGETHER * most:
            one.incident.no_snapshot = f"there were {in_all} within the hour"
        return bool(one.incident.no_snapshot)

    async def _tell_in_time(self, waiting: list[_Waiting], told: trio.Event) -> None:
        with trio.move_on_after(ALERT_SECONDS):
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
        """The oldest go: whoever reads them has enough to do with the others."""
        standing = [alert for alert in self._alerts.standing() if alert.key.startswith("trainer:")]
        for alert in sorted(standing, key=lambda alert: alert.since)[
            : max(0, len(standing) + 1 - MOST_ALERTS)
        ]:
            self._alerts.clear(alert.key)


def _hint(incident: Incident) -> str:
    if incident.snapshot:
        return f"emergency snapshot {incident.snapshot}; goes when the trainer comes again, or: ciuic watch --forget {shown_name(incident.trainer.name)}"
    why = f"no emergency snapshot: {incident.no_snapshot}; " if incident.no_snapshot else ""
    return f"{why}goes when the trainer comes again, or: ciuic watch --forget {shown_name(incident.trainer.name)}"
