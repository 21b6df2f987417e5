"""Registry of watched trainers: their ends, their silence, and the journal by which the next daemon finds them.

Guarantees: an end is noticed at once, through a pidfd; a trainer is reported once for each time that it
hangs; a trainer that said goodbye is not reported. An end that no daemon saw is reported as "lost".

The journal of trainers and incidents is `watched.json` in the runtime directory. Like every file there it
need not survive the kernel. It is replaced atomically; an unreadable journal counts as empty.

Leaves to others who may register (watch.py) and what follows (emergency.py). Belongs to the trio
thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import structlog
import trio

from ciuic.daemon.base.events import Alerts
from ciuic.daemon.trainers.emergency import MAX_ALERTS, Emergencies
from ciuic.daemon.trainers.loss_watch import trouble_text
from ciuic.daemon.trainers.trainer import ProcessIdentity, TrainerEnd, WatchedTrainer
from ciuic.errors import Busy
from ciuic.printable import escaped
from ciuic.protocol.control_types import Incident, TrainerStatus
from ciuic.protocol.watch_client import Hello, Kind
from ciuic.structs import decode_json
from ciuic.system import processes
from ciuic.system.disk import Disk
from ciuic.system.privileges import may_trace
from ciuic.units import human_duration, plural

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
log = structlog.get_logger(__name__)


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
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
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
        if losses.trouble == losses.told:
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
        losses.told = losses.trouble

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
