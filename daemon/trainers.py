"""All trainers that are watched: when each ends, when it falls silent, and which of them a killed daemon's successor has to find again.

Guarantees: an end is noticed at once, by the kernel's word; a trainer is reported once for each time that it hangs; whoever said that
it is done is not reported. What a daemon cannot know because it was not there, it says ("lost"). Leaves to others who may register
(watch_socket.py) and what follows (emergency.py). Belongs to the trio thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

import structlog
import trio

from ciuic import processes
from ciuic.control_types import TrainerStatus
from ciuic.daemon.alerts import Alerts
from ciuic.daemon.emergency import Emergencies
from ciuic.daemon.trainer import End, Identity, Trainer
from ciuic.daemon.watch_book import WatchRecord
from ciuic.errors import Busy
from ciuic.plain_names import escaped
from ciuic.privileges import may_trace
from ciuic.units import plural
from ciuic.watch_client import Hello

LOOK_SECONDS: Final = 1.0
REAPED_SECONDS: Final = 1.0
"""How a process ended is known when its parent has asked for it, which most do at once."""
RETURN_SECONDS: Final = 30.0
"""So long the writer of a trainer has to find a new daemon."""
MOST: Final = 512
MOST_OF_A_USER: Final = 64
log = structlog.get_logger(__name__)


class Trainers:
    """``nursery`` is there while the daemon works; each trainer with a process has a task in it."""

    def __init__(
        self,
        *,
        alerts: Alerts,
        emergencies: Emergencies,
        now_ns: Callable[[], int],
        on_change: Callable[[], None],
    ) -> None:
        self.nursery: trio.Nursery | None = None
        self._alerts = alerts
        self._emergencies = emergencies
        self._now_ns = now_ns
        self._on_change = on_change
        self._may_trace = may_trace()
        self._watched: dict[Identity, Trainer] = {}
        self._missing: dict[Identity, WatchRecord] = {}
        """Gone while no daemon watched; their writers may still say how."""

    # -- who is watched

    def add(
        self, identity: Identity, life: int, pages: list[int], hello: Hello, *, clears: bool = True
    ) -> Trainer:
        """From now on it is watched, and its descriptors are ours. Busy when there are too many already; then they stay the caller's.

        ``clears``: it is here again, which ends the alert about the last time.
        """
        known = self._watched.get(identity)
        if known is None:
            self._refuse_too_many(identity.uid)
            self._missing.pop(identity, None)
            known = self._start(identity, life, hello, self._now_ns())
        else:
            os.close(life)
            known.name, known.where, known.kind = hello.name, hello.where, hello.kind
        # One process may have several managers; the strictest is the one that its user thought of.
        known.heartbeat_seconds = min(
            filter(None, (known.heartbeat_seconds, hello.heartbeat_seconds)), default=0.0
        )
        for page in pages:
            known.add_page(page)
        if clears:
            self._alerts.clear(known.key)
        log.info(
            "trainer_watched", trainer=known.label, kind=known.kind, heartbeat_seconds=known.heartbeat_seconds
        )
        self._on_change()
        return known

    def _refuse_too_many(self, uid: int) -> None:
        its_own = sum(identity.uid == uid for identity in self._watched)
        if len(self._watched) >= MOST or (uid != 0 and its_own >= MOST_OF_A_USER):
            raise Busy(
                f"{plural(len(self._watched), 'trainer is', 'trainers are')} watched already, {its_own} of this user"
            )

    def _start(self, identity: Identity, life: int, hello: Hello, since_ns: int) -> Trainer:
        trainer = Trainer(
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

    def drop(self, trainer: Trainer) -> None:
        """It is not watched any more, and nothing has happened."""
        if self._watched.get(trainer.identity) is trainer:
            del self._watched[trainer.identity]
            trainer.forgotten = True
            if trainer.life < 0:
                trainer.close()
            # Else whoever waits for its end closes it: a descriptor that is waited for must not be closed.
            self._on_change()

    def forget(self, text: str) -> int:
        """By name or pid: watched no more, and the alert goes. How many that were."""
        found = 0
        for trainer in list(self._watched.values()):
            known = (trainer.name, escaped(trainer.name), str(trainer.identity.pid))
            if text in known and trainer.kind != "file":
                self.drop(trainer)
                self._alerts.clear(trainer.key)
                found += 1
        for alert in self._alerts.standing():
            if alert.key.startswith((f"trainer:{text}:", f"trainer:{escaped(text)}:")):
                self._alerts.clear(alert.key)
                found += 1
        return found

    def find(self, identity: Identity) -> Trainer | None:
        return self._watched.get(identity)

    def uids(self) -> set[int]:
        """Users with a trainer that is watched."""
        return {identity.uid for identity in self._watched}

    def statuses(self) -> list[TrainerStatus]:
        return [trainer.status() for trainer in self._watched.values()]

    # -- what becomes of them

    async def look(self) -> None:
        """For ever: at every page, once a second."""
        while True:
            await trio.sleep(LOOK_SECONDS)
            for trainer in list(self._watched.values()):
                try:
                    self._look_at(trainer)
                except Exception:
                    log.exception("trainer_not_looked_at", trainer=trainer.label)

    def _look_at(self, trainer: Trainer) -> None:
        # Not what the clock says: where we did not run, others may not have run either.
        found = trainer.look(LOOK_SECONDS, self._now_ns())
        if found == "hung":
            self._emergencies.report(trainer, "hung", f"no beat for {trainer.heartbeat_seconds:g} s")
        elif found == "recovered":
            self._emergencies.report(trainer, "recovered", "")

    async def _await_end(self, trainer: Trainer) -> None:
        try:
            await trio.lowlevel.wait_readable(trainer.life)
            await self._report_end(trainer)
        except Exception:
            log.exception("trainer_not_awaited", trainer=trainer.label)
        # Not where this task is cancelled: then the daemon ends, and the next one has to find the trainer.
        if self._watched.get(trainer.identity) is trainer:
            del self._watched[trainer.identity]
        trainer.close()
        self._on_change()

    async def _report_end(self, trainer: Trainer) -> None:
        status = await self._status_of(trainer)
        unknown = status is None and trainer.kind == "library"
        if unknown and not trainer.paged and not trainer.forgotten:
            # Taken over from a predecessor: its page is the writer's to bring, which outlives it.
            with trio.move_on_after(RETURN_SECONDS):
                await trainer.page_came.wait()
        end = await trio.to_thread.run_sync(trainer.end, status, abandon_on_cancel=True)
        if trainer.forgotten:
            return
        if unknown and not trainer.paged:
            self._lose(trainer)
        else:
            self._ended(trainer, end)

    async def _status_of(self, trainer: Trainer) -> int | None:
        _, pid, ticks = trainer.identity
        deadline = trio.current_time() + REAPED_SECONDS
        while True:
            status = processes.end_of(trainer.life)
            if status is None and pid > 0 and self._may_trace:
                status = processes.end_of_zombie(pid, ticks)
            if status is not None or trio.current_time() >= deadline:
                return status
            await trio.sleep(0.02)

    def _ended(self, trainer: Trainer, end: End) -> None:
        if end.kind is None:
            log.info("trainer_ended", trainer=trainer.label, how=end.reason)
            self._alerts.clear(trainer.key)  # one that hung is no more
        else:
            self._emergencies.report(trainer, end.kind, end.reason)

    def _lose(self, trainer: Trainer) -> None:
        self._emergencies.report(
            trainer, "lost", "it ended while no daemon watched: whether well, nobody knows"
        )

    # -- from one daemon to the next

    def records(self) -> list[WatchRecord]:
        """What a successor has to know. Those of the configuration it finds by itself."""
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
        """Those of a predecessor: watched again if they live, else given time for their writers to say how they ended."""
        assert self.nursery is not None
        for record in records:
            identity = Identity(record.uid, record.pid, record.start_ticks)
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

    async def _await_return(self, identity: Identity, hello: Hello, since_ns: int) -> None:
        await trio.sleep(RETURN_SECONDS)
        if self._missing.pop(identity, None) is not None:
            trainer = Trainer(
                identity, -1, name=hello.name, where=hello.where, kind=hello.kind, heartbeat_seconds=0.0, since_ns=since_ns
            )  # fmt: skip
            self._lose(trainer)
            self._on_change()

    def close(self) -> None:
        """When no task waits for them any more."""
        for trainer in self._watched.values():
            trainer.close()
        self._watched.clear()
