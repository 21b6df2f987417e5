"""Watch of trainers: wires registration, heartbeats, emergency snapshots and the alert hook.

    trainer ── watch.sock ──▶ WatchSocket ─▶ Trainers ──▶ Emergencies ──▶ snapshot, alert, event ──▶ AlertHook
    [[trainer]] ────────────▶ TrainerFiles ──┘

Guarantees: an error here ends the watch of one trainer at most, never the daemon, and delays no job. For a
trainer that is killed there is an emergency snapshot of every root that can be cut, or a reason why not, and
`alert.command` is run. For a trainer that said goodbye there is neither.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

import structlog
import trio

from ciuic.daemon.base.accounts import Accounts
from ciuic.daemon.base.alert_hook import AlertHook
from ciuic.daemon.base.events import Alerts, EventBus
from ciuic.daemon.base.settings import Settings
from ciuic.daemon.roots.permission import WatchPermission, owners
from ciuic.daemon.roots.supervisor import RootSupervisor
from ciuic.daemon.snapshots.pending import PendingSnapshot
from ciuic.daemon.trainers.emergency import Emergencies
from ciuic.daemon.trainers.registry import TrainerRegistry
from ciuic.daemon.trainers.trainer_files import TrainerFiles
from ciuic.daemon.trainers.watch_journal import (
    MAX_INCIDENTS,
    WatchJournal,
    read_journal,
    remove_journal,
    write_journal,
)
from ciuic.daemon.trainers.watch_socket import WatchSocket
from ciuic.errors import NotFound, NotPermitted
from ciuic.protocol.control_types import Incident, SnapshotRequest, TrainerStatus
from ciuic.protocol.watch_client import SOCKET_NAME

log = structlog.get_logger(__name__)


class TrainerWatch:
    """Watch of one daemon. `tell` is a task of the daemon's whole life, `run` of the time in which it works."""

    def __init__(
        self,
        *,
        settings: Callable[[], Settings],
        take: Callable[[SnapshotRequest], Awaitable[PendingSnapshot]],
        roots: Callable[[], Mapping[str, RootSupervisor]],
        accounts: Accounts,
        alerts: Alerts,
        events: EventBus,
        now_ns: Callable[[], int],
        as_service: bool,
    ) -> None:
        """Put the parts together.

        Args:
            settings: settings in force.
            take: cuts an emergency snapshot.
            roots: supervisors of the roots, by path.
            accounts: users that may register trainers, and names of users.
            alerts: where incidents are reported.
            events: bus that the alert command listens to.
            now_ns: wall clock.
            as_service: systemd-run is known to work, so the alert command is run as a service of its own.
        """
        self._roots = roots
        self._accounts = accounts
        self._alerts = alerts
        self._events = events
        self._runtime_dir = settings().runtime_dir
        self._incidents: list[Incident] = []
        self._hook = AlertHook(
            lambda: settings().alert,
            os.uname().nodename,
            os.environ,
            service_directory=self._runtime_dir if as_service else None,
            on_refusal=self._alert_refused,
        )
        self._emergencies = Emergencies(
            take,
            alerts=alerts,
            events=events,
            now_ns=now_ns,
            per_hour=lambda: settings().watch.emergency_per_hour,
            on_incident=self._add,
        )
        self._is_stopped = False
        self._trainers = TrainerRegistry(
            alerts=alerts, emergencies=self._emergencies, now_ns=now_ns, on_change=self._note
        )
        self._files = TrainerFiles(self._trainers, lambda: settings().trainers)
        self._socket = WatchSocket(
            self._runtime_dir,
            self._trainers,
            lambda caller: self._permission()(caller),
            alerts=alerts,
            owners=self._owners,
            learn_name=accounts.learn_name,
        )

    async def tell(self) -> None:
        """Run the alert command for alerts and incidents, until the event bus is closed."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._hook.run)
            await self._hook.follow(self._events)
            nursery.cancel_scope.cancel()

    async def run(self) -> None:
        """Watch trainers, until cancelled."""
        journal = await trio.to_thread.run_sync(read_journal, self._runtime_dir)
        self._incidents = journal.incidents[:MAX_INCIDENTS]
        self._emergencies.remember(self._incidents)
        try:
            async with trio.open_nursery() as nursery:
                self._trainers.nursery = nursery
                # Before the socket is served: a writer process that registers its trainer again finds it,
                # with the time since which it was watched.
                self._trainers.take_over(journal.trainers)
                nursery.start_soon(self._emergencies.run)
                nursery.start_soon(self._trainers.look)
                nursery.start_soon(self._files.run)
                nursery.start_soon(self._socket.serve)
                nursery.start_soon(self._accounts.learn_names, self._trainers.uids())
        finally:
            self._trainers.nursery = None
            # Before the descriptors are closed, which forgets the trainers.
            self._note()
            self._trainers.close()
            with suppress(OSError):
                (self._runtime_dir / SOCKET_NAME).unlink(missing_ok=True)

    def stopped(self, *, followed: bool) -> None:
        """End the watch.

        Args:
            followed: another daemon follows, and finds in the journal which trainers to watch.
        """
        if not followed:
            self._is_stopped = True
            remove_journal(self._runtime_dir)

    def statuses(self) -> list[TrainerStatus]:
        """Return the status of every watched trainer."""
        return self._trainers.statuses()

    def uids(self) -> set[int]:
        """Return the users with a watched trainer."""
        return self._trainers.uids()

    def incidents(self) -> list[Incident]:
        """Return the incidents, newest first."""
        return list(self._incidents)

    def forget(self, trainer: str) -> None:
        """Stop watching a trainer, by name or pid, and clear its alerts; raise NotFound where there is none."""
        if not self._trainers.forget(trainer):
            raise NotFound(
                f"no trainer {trainer} is watched, and no alert speaks of one", hint="see: ciuic status"
            )

    def _alert_refused(self, error: NotPermitted | None) -> None:
        if error is None:
            self._alerts.clear("alert-command")
        else:
            self._alerts.report("alert-command", error.message, hint=error.hint, severity="warning")

    def _owners(self) -> frozenset[int]:
        return owners(self._roots().values())

    def _permission(self) -> WatchPermission:
        accounts = self._accounts
        return WatchPermission(accounts.group_id, accounts.everybody, accounts.user_ids, self._owners())

    def _add(self, incident: Incident) -> None:
        self._incidents = [incident, *self._incidents][:MAX_INCIDENTS]
        self._note()

    def _note(self) -> None:
        if self._is_stopped:
            return  # `run` may end after this, when one of its threads is slow, and would leave a file behind
        journal = WatchJournal(trainers=self._trainers.records(), incidents=self._incidents)
        write_journal(self._runtime_dir, journal)
