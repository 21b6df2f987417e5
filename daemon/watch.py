"""Watching trainers, put together: who they are, what becomes of them, what follows, and who is told.

    trainer ── watch.sock ──▶ WatchSocket ─▶ Trainers ──▶ Emergencies ──▶ snapshot, alert, event ──▶ AlertHook
    [[trainer]] ────────────▶ TrainerFiles ──┘

Guarantees: what goes wrong here ends the watch of one trainer at most, never the daemon, and nothing of it is in the way of a job.
A trainer that is killed has an emergency snapshot of every root that can be cut, or a reason why not, and whoever
`alert.command` tells knows of it. One that said that it is done has neither.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog
import trio

from ciuic.control_types import Incident, TrainerStatus
from ciuic.daemon.alert_hook import AlertHook
from ciuic.daemon.emergency import Emergencies
from ciuic.daemon.permission import WatchPermission
from ciuic.daemon.supervisor import backing_descriptors
from ciuic.daemon.trainer_files import TrainerFiles
from ciuic.daemon.trainers import Trainers
from ciuic.daemon.watch_book import MOST_INCIDENTS, WatchBook, read_book, remove_book, write_book
from ciuic.daemon.watch_socket import WatchSocket
from ciuic.errors import NotFound, NotPermitted
from ciuic.watch_client import SOCKET_NAME

if TYPE_CHECKING:
    from ciuic.daemon.service import Daemon

log = structlog.get_logger(__name__)


class TrainerWatch:
    """Of one daemon. ``tell`` is a task of its whole life, ``run`` of the time in which it works."""

    def __init__(self, daemon: Daemon, *, as_service: bool) -> None:
        """``as_service``: systemd-run is known to work here."""
        self._daemon = daemon
        self._incidents: list[Incident] = []
        self._hook = AlertHook(
            lambda: daemon.settings.alert,
            os.uname().nodename,
            os.environ,
            service_directory=daemon.settings.runtime_dir if as_service else None,
            on_refusal=self._alert_refused,
        )
        self._emergencies = Emergencies(
            daemon.snapshots.take,
            alerts=daemon.alerts,
            events=daemon.events,
            now_ns=daemon.now_ns,
            per_hour=lambda: daemon.settings.watch.emergency_per_hour,
            on_incident=self._add,
        )
        self._is_stopped = False
        self._trainers = Trainers(
            alerts=daemon.alerts, emergencies=self._emergencies, now_ns=daemon.now_ns, on_change=self._note
        )
        self._files = TrainerFiles(self._trainers, lambda: daemon.settings.trainers)
        self._socket = WatchSocket(
            daemon.settings.runtime_dir,
            self._trainers,
            lambda caller: self._permission()(caller),
            alerts=daemon.alerts,
            owners=self._owners,
            learn_name=daemon.accounts.learn_name,
        )

    async def tell(self) -> None:
        """Runs the alert command when there is something to tell."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._hook.run)
            await self._hook.follow(self._daemon.events)
            nursery.cancel_scope.cancel()

    async def run(self) -> None:
        """Until it is cancelled."""
        runtime_dir = self._daemon.settings.runtime_dir
        book = await trio.to_thread.run_sync(read_book, runtime_dir)
        self._incidents = book.incidents[:MOST_INCIDENTS]
        self._emergencies.remember(self._incidents)
        try:
            async with trio.open_nursery() as nursery:
                self._trainers.nursery = nursery
                self._trainers.take_over(book.trainers)
                nursery.start_soon(self._emergencies.run)
                nursery.start_soon(self._trainers.look)
                nursery.start_soon(self._files.run)
                nursery.start_soon(self._socket.serve)
                nursery.start_soon(self._daemon.accounts.learn_names, self._trainers.uids())
        finally:
            self._trainers.nursery = None
            self._note()
            self._trainers.close()
            with suppress(OSError):
                (runtime_dir / SOCKET_NAME).unlink(missing_ok=True)

    def stopped(self, *, followed: bool) -> None:
        """``followed``: by another daemon, which then knows whom to watch."""
        if not followed:
            self._is_stopped = True
            remove_book(self._daemon.settings.runtime_dir)

    def statuses(self) -> list[TrainerStatus]:
        return self._trainers.statuses()

    def uids(self) -> set[int]:
        """Users with a trainer that is watched."""
        return self._trainers.uids()

    def incidents(self) -> list[Incident]:
        """Newest first."""
        return list(self._incidents)

    def forget(self, trainer: str) -> None:
        """By name or pid. NotFound."""
        if not self._trainers.forget(trainer):
            raise NotFound(
                f"no trainer {trainer} is watched, and no alert speaks of one", hint="see: ciuic status"
            )

    def _alert_refused(self, error: NotPermitted | None) -> None:
        if error is None:
            self._daemon.alerts.clear("alert-command")
        else:
            self._daemon.alerts.report("alert-command", error.message, hint=error.hint, severity="warning")

    def _owners(self) -> frozenset[int]:
        with backing_descriptors(self._daemon.roots.supervisors.values()) as fds:
            return frozenset(os.fstat(fd).st_uid for fd in fds)

    def _permission(self) -> WatchPermission:
        accounts = self._daemon.accounts
        return WatchPermission(accounts.group_id, accounts.everybody, accounts.user_ids, self._owners())

    def _add(self, incident: Incident) -> None:
        self._incidents = [incident, *self._incidents][:MOST_INCIDENTS]
        self._note()

    def _note(self) -> None:
        if self._is_stopped:
            return  # `run` ends later when one of its threads is slow, and would leave a file behind
        book = WatchBook(trainers=self._trainers.records(), incidents=self._incidents)
        write_book(self._daemon.settings.runtime_dir, book)
