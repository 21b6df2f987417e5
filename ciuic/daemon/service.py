"""Composition root of the daemon.

Wires its parts, starts and stops them in order, and offers the control API's operations.

Order of start: the one-daemon lock, the control socket, orphans of a predecessor, the roots (first attempt of
each), the repository, the snapshots that a predecessor had promised, the schedule; then READY. Order of a
clean stop: no new work, the running capture ended and its epochs given back, roots unmounted, socket removed.

Guarantees: a clean stop leaves no mount, socket or process of ciuic behind, except a worker that still serves
handles that a job has open. A crash leaves the workers serving, and the next daemon adopts them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial

import structlog
import trio

from ciuic.config import Config, check_overlaps
from ciuic.daemon.active_settings import ActiveSettings
from ciuic.daemon.api.api import Api
from ciuic.daemon.api.reloading import apply_configuration, await_mounted
from ciuic.daemon.api.server import serve_api
from ciuic.daemon.base.accounts import AccountNames, Accounts
from ciuic.daemon.base.alerts import Alerts
from ciuic.daemon.base.events import EventBus
from ciuic.daemon.base.metrics import Metrics
from ciuic.daemon.base.notify import Notifier
from ciuic.daemon.base.repository_store import Store
from ciuic.daemon.base.runtime import RuntimeDirectory, bind_control_socket
from ciuic.daemon.base.settings import Settings
from ciuic.daemon.base.wakeup import Wakeup
from ciuic.daemon.housekeeping import DaemonHousekeeping
from ciuic.daemon.metrics_writer import run_metrics
from ciuic.daemon.restart import is_restarting
from ciuic.daemon.roots.priority_control import PriorityControl
from ciuic.daemon.roots.session_keeper import SessionKeeper
from ciuic.daemon.roots.sessions import SessionStore
from ciuic.daemon.roots.supervisor import RootSupervisor
from ciuic.daemon.roots.systemd_slice import SLICE, SliceWeight
from ciuic.daemon.served_roots import ServedRoots
from ciuic.daemon.snapshots.capture_process import Captures, end_orphaned_captures
from ciuic.daemon.snapshots.capturing import Context
from ciuic.daemon.snapshots.requests import Snapshots, find_state
from ciuic.daemon.snapshots.schedule import FirstSnapshots, Schedule, ScheduledSnapshots, last_cut_ns
from ciuic.daemon.snapshots.space import SpaceWatch
from ciuic.daemon.status import status_document
from ciuic.daemon.trainers.pairing import Pairing
from ciuic.daemon.trainers.watch import TrainerWatch
from ciuic.daemon.upkeep.upkeep import UPKEEP_MODULE, Upkeep
from ciuic.errors import CiuicError, NotFound, Unreachable
from ciuic.fuse_layer.prefork.client import SpareProcess
from ciuic.protocol.control_types import (
    PruneReport,
    ReloadReport,
    RootStatus,
    SnapshotRequest,
    SnapshotState,
    StatusDocument,
)
from ciuic.protocol.pairing import SOCKET_NAME
from ciuic.system import mountinfo
from ciuic.system.child_process import environment, module_command

CONTROL_FD_NAME = "control"
log = structlog.get_logger(__name__)


class Daemon:
    """The daemon: `main` runs it from start to stop; the other public methods are operations of the control API."""

    def __init__(
        self,
        config: Config,
        *,
        load: Callable[[], Config],
        notifier: Notifier,
        now_ns: Callable[[], int],
        stored_fds: dict[str, int] | None = None,
        command_prefix: Sequence[str] = (),
        worker_service: str = "",
    ) -> None:
        """Wire the parts; nothing is started yet.

        Args:
            config: configuration to start with.
            load: reads the configuration again.
            notifier: connection to systemd.
            now_ns: wall clock.
            stored_fds: descriptors that systemd kept over a restart, by name.
            command_prefix: words before the commands of captures and upkeep (systemd_slice.py).
            worker_service: socket of ciuic-workers.service (prefork/service.py); empty: workers are children.

        Raises:
            ConfigError: the configuration is not valid.
        """
        self._active = ActiveSettings(config, load)
        self._notifier = notifier
        self.now_ns = now_ns
        self._stored_fds = stored_fds or {}
        self.started_ns = now_ns()
        self.events = EventBus(now_ns)
        self.alerts = Alerts(self.events, now_ns)
        for problem in check_overlaps(config.roots, mountinfo.read()):
            self.alerts.report("roots", str(problem), hint=problem.hint)
        self.metrics_registry = Metrics()
        self.runtime = RuntimeDirectory(self.settings.runtime_dir)
        self.space = SpaceWatch(lambda: self.settings, lambda: self.store, time.monotonic)
        self.schedule = Schedule(self.settings.interval_seconds)
        self._captures = Captures(self.runtime.path, command_prefix)
        self.slice = SLICE if command_prefix else ""
        """systemd slice of captures and upkeep; empty where they run beside the daemon."""
        self.stopping = False
        self._stop = trio.Event()
        self._served = trio.Event()
        # Made before the parts that set and await them, and that look at the roots.
        urgency_changed, space_wanted = Wakeup(), Wakeup()
        supervisors: dict[str, RootSupervisor] = {}
        self._wire_snapshots(worker_service, supervisors, urgency_changed, space_wanted)
        self._wire_upkeep(command_prefix, urgency_changed, space_wanted)
        self._wire_trainers()

    def _wire_snapshots(
        self,
        worker_service: str,
        supervisors: dict[str, RootSupervisor],
        urgency_changed: Wakeup,
        space_wanted: Wakeup,
    ) -> None:
        """Make the parts from a due snapshot to its capture, and the roots that they cut."""
        self.snapshots = Snapshots(
            Context(
                settings=lambda: self.settings,
                roots=lambda: supervisors,
                store=lambda: self.store,
                runtime=self.runtime,
                alerts=self.alerts,
                events=self.events,
                now_ns=self.now_ns,
                host=os.uname().nodename,
                new_capture=self._captures.new,
                space=self.space,
                on_urgency=urgency_changed.set,
                on_space_wanted=space_wanted.set,
                on_scheduled_lost=self.schedule.post,
            )
        )
        take = partial(self.snapshots.take, scheduled=True)
        self.first_snapshots = FirstSnapshots(take, lambda: supervisors, self.alerts)
        self.scheduled = ScheduledSnapshots(
            self.schedule.ticks, take, lambda: supervisors, self.snapshots.scheduled_roots, self.alerts
        )
        spare = SpareProcess(
            self.runtime.path, environment(), service=worker_service, keeps=not worker_service
        )
        keeper = None if worker_service else SessionKeeper(spare, self.runtime.path)
        self.sessions = SessionStore(self._notifier, self._stored_fds, keeper)
        self.roots = ServedRoots(
            settings=lambda: self.settings,
            runtime=self.runtime,
            store=lambda: self.store,
            alerts=self.alerts,
            events=self.events,
            snapshots=self.snapshots,
            on_mounted=self.first_snapshots.retry,
            supervisors=supervisors,
            sessions=self.sessions,
            spare=spare,
        )

    def _wire_upkeep(
        self, command_prefix: Sequence[str], urgency_changed: Wakeup, space_wanted: Wakeup
    ) -> None:
        """Make the parts that act on committed snapshots, and the priorities beside the job."""
        self.upkeep = Upkeep(
            lambda: self.settings,
            lambda: self.store,
            self.snapshots.capturing.repository_lock,
            self.alerts,
            cwd=self.settings.runtime_dir,
            now_ns=self.now_ns,
            command=[*command_prefix, *module_command(UPKEEP_MODULE)],
            reserve_bytes=lambda: self.space.measure().reserve_bytes,
            caller_waits=lambda: self.snapshots.caller_waits,
            wakeup=space_wanted,
        )
        self.priorities = PriorityControl(
            (self.snapshots.capturing.running, self.upkeep.running),
            lambda: self.settings.io_priority,
            SliceWeight() if command_prefix else None,
            wakeup=urgency_changed,
        )

    def _wire_trainers(self) -> None:
        """Make the parts that other users' processes talk to."""
        self.accounts = Accounts(
            lambda: AccountNames(self.settings.group, self.settings.watch.users),
            self.alerts,
            control_socket=self.settings.socket,
        )
        self.watch = TrainerWatch(
            settings=lambda: self.settings,
            take=self.snapshots.take,
            roots=lambda: self.roots.supervisors,
            accounts=self.accounts,
            alerts=self.alerts,
            events=self.events,
            now_ns=self.now_ns,
            as_service=bool(self.slice),
        )
        self._pairing = Pairing(
            self.runtime.path / SOCKET_NAME,
            holds=lambda: self.settings.holds,
            store=lambda: self.store,
            roots=lambda: self.roots.supervisors,
            snapshots=self.snapshots,
            alerts=self.alerts,
            group_id=lambda: self.accounts.group_id,
            watched_users=self.watch.uids,
            is_stopping=lambda: self.stopping,
        )

    @property
    def settings(self) -> Settings:
        """Settings in force."""
        return self._active.settings

    @property
    def store(self) -> Store:
        """Repository of the settings in force."""
        return self._active.store

    async def main(self) -> None:
        """Run from start to clean stop.

        Raises:
            CiuicError: another daemon runs, or the control socket or the configured group cannot be had.
        """
        # First: only the owner of the lock may replace sockets, end captures and detach mounts.
        self.runtime.acquire()
        try:
            await self.accounts.start()
            listener = bind_control_socket(
                self.settings.socket, self.accounts.group_id, self._stored_fds.pop(CONTROL_FD_NAME, None)
            )
        except BaseException:
            self.runtime.release(keep_pending=True, keep_untrusted=True)  # a killed predecessor's
            raise
        self._notifier.store(CONTROL_FD_NAME, listener.fileno())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_signals)
            nursery.start_soon(self._feed_watchdog)
            nursery.start_soon(run_metrics, self)
            nursery.start_soon(self.accounts.run)
            nursery.start_soon(self.watch.tell)
            await nursery.start(serve_api, Api(self), listener, self._served.wait, self.accounts.revoked)
            await nursery.start(self._pairing.serve, self._served.wait)
            working = trio.CancelScope()
            nursery.start_soon(self._work, nursery, working)
            await self._stop.wait()
            await self._shut_down(working)
            nursery.cancel_scope.cancel()
        self.settings.socket.unlink(missing_ok=True)
        self._notifier.unstore(CONTROL_FD_NAME)
        goes_on = self.snapshots.capturing.leaving or not self.roots.begun
        # A root that is unmounted needs no mark: mounted anew, it is compared in full anyway.
        self.runtime.release(keep_pending=goes_on, keep_untrusted=self.roots.any_left_mounted)
        log.info("daemon_stopped")

    async def _work(self, nursery: trio.Nursery, working: trio.CancelScope) -> None:
        """Bring everything up and keep it running until `working` is cancelled."""
        with working:
            await trio.to_thread.run_sync(self._captures.prepare)
            records = await trio.to_thread.run_sync(self.runtime.read_pending)
            # Before captures and roots: a keeper may have started a worker for one of them just now.
            await self._inherit_sessions()
            await end_orphaned_captures(records, self.runtime)
            for root in self.settings.roots:
                self.roots.start(root, nursery)
            self.roots.nursery = nursery
            await self.roots.settled()
            await self.sessions.close_rest()
            # After the roots are mounted: their backing directories remember where the repository was.
            await self.roots.prepare_store()
            self.snapshots.capturing.trust.take_over(
                await trio.to_thread.run_sync(self.runtime.read_untrusted)
            )
            await self.snapshots.resume(records)
            self.roots.reconcile_new_sessions = True
            for supervisor in list(self.roots.supervisors.values()):  # a reload may add roots meanwhile
                if supervisor.worker is not None:
                    await self.snapshots.reconcile(supervisor.path, supervisor.worker)
            paths = [root.path for root in self.settings.roots]
            self.schedule.start(await trio.to_thread.run_sync(last_cut_ns, self.store, paths))
            housekeeping = DaemonHousekeeping(self)
            self._notifier.ready(housekeeping.status_line())
            log.info("daemon_ready", roots=list(self.roots.supervisors), pid=os.getpid())
            async with trio.open_nursery() as workers:
                workers.start_soon(self.sessions.run)
                workers.start_soon(self.priorities.run)
                workers.start_soon(self.snapshots.capturing.run)
                workers.start_soon(self.upkeep.run)
                workers.start_soon(self.scheduled.run)
                workers.start_soon(self.first_snapshots.run)
                workers.start_soon(housekeeping.run)
                workers.start_soon(self.watch.run)

    async def _inherit_sessions(self) -> None:
        """Take over sessions of predecessors."""
        roots = self.settings.roots
        serves_itself = any(root.driver != "pyfuse3" for root in roots)
        await self.sessions.inherit([root.path for root in roots], prepare=serves_itself)

    async def _shut_down(self, working: trio.CancelScope) -> None:
        self.stopping = True
        log.info("daemon_stopping")
        leaving = await is_restarting()
        self._notifier.stopping(
            f"stopping: giving back what is not captured, {'leaving' if leaving else 'unmounting'}"
        )
        self.schedule.stop()
        self.snapshots.capturing.leaving = leaving
        working.cancel()
        await self.snapshots.capturing.stopped()
        await (self.roots.leave_all() if leaving else self.roots.stop_all())
        await trio.to_thread.run_sync(partial(self.roots.close, leaving=leaving))
        self.watch.stopped(followed=leaving)
        await trio.to_thread.run_sync(self._captures.close)
        self.events.close()
        self._served.set()

    async def _watch_signals(self) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            async for number in signals:
                if number == signal.SIGHUP:
                    await self._reload_quietly()
                else:
                    log.info("stop_requested", signal=signal.Signals(number).name)
                    self.request_stop()

    async def _feed_watchdog(self) -> None:
        """Feed systemd's watchdog from the event loop itself, so that systemd learns when the loop hangs."""
        if self._notifier.watchdog_seconds is None:
            return
        while True:
            self._notifier.watchdog()
            # A third of the limit, so that one late round does not end the service.
            await trio.sleep(self._notifier.watchdog_seconds / 3)

    async def _reload_quietly(self) -> None:
        try:
            await apply_configuration(self)
        except CiuicError as error:
            log.error("reload_refused", error=str(error))

    # -- what the control API asks for

    async def status(self) -> StatusDocument:
        """Return the status document."""
        return await status_document(self)

    async def metrics(self) -> bytes:
        return self.metrics_registry.text(await self.status())

    async def take_snapshot(self, request: SnapshotRequest) -> SnapshotState:
        self.refuse_when_stopping()
        return (await self.snapshots.take(request)).state

    async def snapshot_state(self, snapshot_id: str, *, wait: bool) -> SnapshotState:
        return await find_state(self.snapshots, self.store, snapshot_id, wait=wait)

    async def add_root(self, path: str) -> RootStatus:
        self.refuse_when_stopping()
        self.take_over(await trio.to_thread.run_sync(self.read_settings))
        settings = self.settings.root(path)
        if settings is None:
            raise NotFound(
                f"{path} is not in the configuration {self.settings.config_path}",
                hint=f"ciuic protect {path}",
            )
        new = path not in self.roots.supervisors
        try:
            status = await self.roots.add(settings)
        finally:
            if new:
                self.first_snapshots.wanted(path)  # also when the root is mounted only later
        await self.roots.prepare_store()
        return status

    async def remove_root(self, path: str) -> None:
        await self.roots.remove(path)
        self._active.remove_root(path)

    async def prune(self, *, dry_run: bool) -> PruneReport:
        self.refuse_when_stopping()
        return await self.upkeep.prune(dry_run=dry_run)

    async def forget_trainer(self, trainer: str) -> None:
        self.watch.forget(trainer)

    async def reload(self) -> ReloadReport:
        """Take up a changed configuration; raise ConfigError and change nothing when it is not valid."""
        return await await_mounted(await apply_configuration(self))

    def request_stop(self) -> None:
        self._stop.set()

    def tell_service_manager(self, line: str) -> None:
        """Set the line that `systemctl status` shows."""
        self._notifier.status(line)

    def read_settings(self) -> Settings:
        """Return the configuration as it is on disk now. Blocks; raises ConfigError when it is not valid."""
        return self._active.read()

    def take_over(self, settings: Settings) -> None:
        """Put new settings in force, as far as they can change under running workers."""
        self._active.replace(settings)
        self.snapshots.capturing.settings_changed()

    def refuse_when_stopping(self) -> None:
        if self.stopping:
            raise Unreachable("the daemon is stopping", hint="try again when it has started")
