"""The daemon as a whole: what is started in which order, what is asked of it, and how it ends.

Order of start: the one-daemon lock, the control socket, orphans of a predecessor, the roots (first attempt of each), the
repository, the snapshots that a predecessor had promised, the schedule; then READY. Order of a clean stop: no new work,
the running capture is ended and its epochs given back, the roots are unmounted, the socket goes.

Guarantees: a clean stop leaves no mount, socket or process of ours behind, except a worker that still serves handles a
job has open. A crash leaves the workers serving, and the next daemon adopts them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial

import structlog
import trio

from ciuic import mountinfo, service_manager
from ciuic.child_process import environment, module_command
from ciuic.config import Config, Problem, check_overlaps, check_repository, raise_for
from ciuic.control_types import (
    PruneReport,
    ReloadReport,
    RootStatus,
    SnapshotRequest,
    SnapshotState,
    StatusDocument,
    rfc3339,
)
from ciuic.daemon.accounts import Accounts, Wanted
from ciuic.daemon.alerts import KEY_MISSING, Alerts
from ciuic.daemon.api import make_app
from ciuic.daemon.capture_process import Captures
from ciuic.daemon.capturing import Context
from ciuic.daemon.events import EventBus
from ciuic.daemon.first_snapshots import FirstSnapshots
from ciuic.daemon.housekeeping import Housekeeping
from ciuic.daemon.metrics import Metrics
from ciuic.daemon.notify import Notifier
from ciuic.daemon.pairing import Pairing
from ciuic.daemon.pending import PendingSnapshot
from ciuic.daemon.predecessor import end_orphaned_captures
from ciuic.daemon.reloading import mounted, take_up
from ciuic.daemon.restart import is_restarting
from ciuic.daemon.roots import Roots
from ciuic.daemon.runtime import RuntimeDirectory, bind_control_socket
from ciuic.daemon.schedule import Schedule
from ciuic.daemon.scheduled_snapshots import ScheduledSnapshots
from ciuic.daemon.server import serve_api
from ciuic.daemon.session_keeper import SessionKeeper
from ciuic.daemon.sessions import SessionStore
from ciuic.daemon.settings import Settings, settings_of
from ciuic.daemon.slices import SLICE, SliceWeight
from ciuic.daemon.snapshots import Snapshots
from ciuic.daemon.space import SpaceWatch
from ciuic.daemon.status import status_document
from ciuic.daemon.store import Store
from ciuic.daemon.supervisor import backing_descriptors
from ciuic.daemon.upkeep import UPKEEP_MODULE, Upkeep
from ciuic.daemon.urging import Urging
from ciuic.daemon.watch import TrainerWatch
from ciuic.errors import CiuicError, NotFound, Unreachable
from ciuic.fuse_layer.standby import SpareProcess
from ciuic.repository.promised import Promise

CONTROL_FD_NAME = "control"
log = structlog.get_logger(__name__)


class Daemon:
    """One daemon. ``main`` is its life; the other public methods are the control API's operations."""

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
        """``command_prefix``: see slices.py; ``worker_service``: see fuse_layer/standby_service.py."""
        raise_for([*check_overlaps(config.roots), *_check_repository(config)])
        self._load = load
        self._notifier = notifier
        self.now_ns = now_ns
        self._stored_fds = stored_fds or {}
        self.settings = settings_of(config)
        self.started_ns = now_ns()
        overlaps = check_overlaps(config.roots, mountinfo.read())
        self.events = EventBus(now_ns)
        self.alerts = Alerts(self.events, now_ns)
        for problem in overlaps:
            self.alerts.report("roots", str(problem), hint=problem.hint)
        self.metrics_registry = Metrics()
        self.runtime = RuntimeDirectory(self.settings.runtime_dir)
        self.store = _store(self.settings)
        self.space = SpaceWatch(lambda: self.settings, lambda: self.store, time.monotonic)
        self.schedule = Schedule(self.settings.interval_seconds)
        self._captures = Captures(self.runtime.path, command_prefix)
        self.snapshots = Snapshots(
            Context(
                settings=lambda: self.settings,
                roots=lambda: self.roots.supervisors,
                store=lambda: self.store,
                runtime=self.runtime,
                alerts=self.alerts,
                events=self.events,
                now_ns=now_ns,
                host=os.uname().nodename,
                new_capture=self._captures.new,
                space=self.space,
            )
        )
        spare = SpareProcess(
            self.runtime.path, environment(), service=worker_service, keeps=not worker_service
        )
        keeper = None if worker_service else SessionKeeper(spare, self.runtime.path)
        self.sessions = SessionStore(notifier, self._stored_fds, keeper)
        self.roots = Roots(
            settings=lambda: self.settings,
            runtime=self.runtime,
            store=lambda: self.store,
            alerts=self.alerts,
            events=self.events,
            snapshots=self.snapshots,
            sessions=self.sessions,
            spare=spare,
        )
        take = partial(self.snapshots.take, scheduled=True)
        self.first_snapshots = FirstSnapshots(take, lambda: self.roots.supervisors, self.alerts)
        self.scheduled = ScheduledSnapshots(
            self.schedule.ticks,
            take,
            lambda: self.roots.supervisors,
            self.snapshots.scheduled_roots,
            self.alerts,
        )
        self.roots.on_mounted = self.first_snapshots.look
        self.upkeep = Upkeep(
            lambda: self.settings,
            lambda: self.store,
            self.snapshots.capturing.repository_lock,
            self.alerts,
            cwd=self.settings.runtime_dir,
            now_ns=now_ns,
            command=[*command_prefix, *module_command(UPKEEP_MODULE)],
        )
        self.upkeep.somebody_waits = lambda: self.snapshots.somebody_waits
        self.urging = Urging(
            (self.snapshots.capturing.running, self.upkeep.running),
            lambda: self.settings.io_priority,
            SliceWeight() if command_prefix else None,
        )
        self.snapshots.capturing.on_urgency = self.urging.wake
        self.snapshots.capturing.on_committed = self.upkeep.suggest
        self.snapshots.capturing.on_scheduled_lost = self.schedule.post
        self.accounts = Accounts(
            lambda: Wanted(self.settings.group, self.settings.watch.users),
            self.alerts,
            control_socket=self.settings.socket,
        )
        self.watch = TrainerWatch(self, as_service=bool(command_prefix))
        self.slice = SLICE if command_prefix else ""
        """What runs beside the job is in this one."""
        self.stopping = False
        self._stop = trio.Event()
        self._served = trio.Event()

    # -- life

    async def main(self) -> None:
        """From start to clean stop. Raises CiuicError when the daemon cannot be what it should be."""
        self.runtime.acquire()
        try:
            await self.accounts.start()
            listener = bind_control_socket(
                self.settings.socket, self.accounts.group_id, self._stored_fds.pop(CONTROL_FD_NAME, None)
            )
        except BaseException:
            self.runtime.release()
            raise
        self._notifier.store(CONTROL_FD_NAME, listener.fileno())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_signals)
            nursery.start_soon(self._feed_watchdog)
            nursery.start_soon(self.metrics_registry.follow, self.events)
            nursery.start_soon(self.accounts.run)
            nursery.start_soon(self.watch.tell)
            await nursery.start(serve_api, make_app(self), listener, self._served.wait)
            await nursery.start(Pairing(self).serve, self._served.wait)
            working = trio.CancelScope()
            nursery.start_soon(self._work, nursery, working)
            await self._stop.wait()
            await self._shut_down(working)
            nursery.cancel_scope.cancel()
        self.settings.socket.unlink(missing_ok=True)
        self._notifier.unstore(CONTROL_FD_NAME)
        self.runtime.release(keep_pending=self.snapshots.capturing.leaving)
        log.info("daemon_stopped")

    async def _work(self, nursery: trio.Nursery, working: trio.CancelScope) -> None:
        """Brings everything up and keeps it going until ``working`` is cancelled."""
        with working:
            await trio.to_thread.run_sync(self._captures.prepare)
            records = await trio.to_thread.run_sync(self.runtime.read_pending)
            await self._inherit_sessions()
            await end_orphaned_captures(records, self.runtime)
            for root in self.settings.roots:
                self.roots.start(root, nursery)
            self.roots.nursery = nursery
            await self.roots.settled()
            await self.sessions.close_rest()
            await self.prepare_store()  # after the roots, which remember where it was
            self.snapshots.capturing.trust.take_over(
                await trio.to_thread.run_sync(self.runtime.read_untrusted)
            )
            await self.snapshots.resume(records)
            self.roots.reconcile_new_sessions = True
            for supervisor in list(self.roots.supervisors.values()):  # a reload may add roots meanwhile
                if supervisor.worker is not None:
                    await self.snapshots.reconcile(supervisor.path, supervisor.worker)
            last = await trio.to_thread.run_sync(self._last_cut_ns)
            self.schedule.start(last)
            housekeeping = Housekeeping(self)
            self._notifier.ready(housekeeping.status_line())
            log.info("daemon_ready", roots=list(self.roots.supervisors), pid=os.getpid())
            async with trio.open_nursery() as workers:
                workers.start_soon(self.sessions.run)
                workers.start_soon(self.urging.run)
                workers.start_soon(self.snapshots.capturing.run)
                workers.start_soon(self.upkeep.run)
                workers.start_soon(self.scheduled.run)
                workers.start_soon(self.first_snapshots.run)
                workers.start_soon(housekeeping.run)
                workers.start_soon(self.watch.run)

    async def _inherit_sessions(self) -> None:
        """Before captures and roots: a keeper may have started a worker for one of them just now."""
        roots = self.settings.roots
        serves_itself = any(root.driver != "pyfuse3" for root in roots)
        await self.sessions.inherit([root.path for root in roots], prepare=serves_itself)

    async def prepare_store(self) -> None:
        if self.settings.repository is None:
            return
        try:
            with backing_descriptors(self.roots.supervisors.values()) as fds:
                if self.settings.roots and not fds:
                    return  # nobody remembers whether there was one, and there is nothing to put in
                await trio.to_thread.run_sync(self.store.ensure, fds)
        except (CiuicError, OSError) as error:
            # The roots are served all the same: a store that fails must not keep the job from its files.
            hint = error.hint if isinstance(error, CiuicError) else ""
            key = KEY_MISSING if isinstance(error, NotFound) else "store"
            self.alerts.report(key, f"no snapshot can be taken: {error}", hint=hint)
            log.error("store_unusable", repository=str(self.settings.repository), error=str(error))

    def _last_cut_ns(self) -> int | None:
        """The newest snapshot's cut of the root that is longest without one; None where a root has none, or it cannot be known."""
        try:
            latest = self.store.latest_of(root.path for root in self.settings.roots)
        except CiuicError as error:
            log.error("store_unreadable", error=str(error))
            return None
        found = [info.time_ns for info in latest.values() if info is not None]
        return min(found) if found and len(found) == len(latest) else None

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
        """From the event loop itself: if that hangs, systemd should know."""
        if self._notifier.watchdog_seconds is None:
            return
        while True:
            self._notifier.watchdog()
            await trio.sleep(self._notifier.watchdog_seconds / 3)

    async def _reload_quietly(self) -> None:
        try:
            await take_up(self)
        except CiuicError as error:
            log.error("reload_refused", error=str(error))

    # -- what the control API asks for

    async def status(self) -> StatusDocument:
        """Everything, as of now."""
        return await status_document(self)

    async def metrics(self) -> bytes:
        return self.metrics_registry.text(await self.status())

    async def take_snapshot(self, request: SnapshotRequest) -> SnapshotState:
        self.refuse_when_stopping()
        return (await self.snapshots.take(request)).state

    async def snapshot_state(self, snapshot_id: str, *, wait: bool) -> SnapshotState:
        pending = self.snapshots.state(snapshot_id)
        if pending is not None:
            if wait:
                await _finished(pending)
            return pending.state
        found = await trio.to_thread.run_sync(self.store.find, snapshot_id)
        if found is None:
            lost = await trio.to_thread.run_sync(self.store.lost, snapshot_id)
            if lost is not None:
                return _lost_state(lost, wait=wait)
            raise NotFound(
                f"no snapshot {snapshot_id} is known here", hint="ciuic list shows the committed ones"
            )
        return SnapshotState(
            id=str(found.id), state="committed", time=rfc3339(found.time_ns), new_bytes=found.new_bytes
        )

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
                self.first_snapshots.wanted(path)  # also where it is mounted later
        await self.prepare_store()
        return status

    async def remove_root(self, path: str) -> None:
        await self.roots.remove(path)
        self.settings = self.settings._replace(
            roots=tuple(root for root in self.settings.roots if root.path != path)
        )

    async def prune(self, *, dry_run: bool) -> PruneReport:
        self.refuse_when_stopping()
        return await self.upkeep.prune(dry_run=dry_run)

    async def forget_trainer(self, trainer: str) -> None:
        self.watch.forget(trainer)

    async def reload(self) -> ReloadReport:
        """Take a changed configuration up; ConfigError and no change when it is not valid."""
        return await mounted(await take_up(self))

    def request_stop(self) -> None:
        self._stop.set()

    def tell_service_manager(self, line: str) -> None:
        """What `systemctl status` shows."""
        self._notifier.status(line)

    def read_settings(self) -> Settings:
        """The configuration as it is now; ConfigError and its like when it cannot be meant. Blocks."""
        config = self._load()
        # What a bind mount that somebody makes later brings about must not end the protection that there is: only here,
        # where a refusal leaves everything as it was, and not at the start.
        raise_for([*check_overlaps(config.roots, mountinfo.read()), *_check_repository(config)])
        return settings_of(config)

    def take_over(self, settings: Settings) -> None:
        """New settings, as far as they can change under running workers."""
        if self.settings.repository is not None and settings.repository != self.settings.repository:
            raise CiuicError(
                f"the repository cannot change from {self.settings.repository} to {settings.repository} while running",
                hint=service_manager.restart_hint(),
            )
        if (self.store.path, self.store.trusted) != (settings.repository, settings.trust_repository):
            self.store = _store(settings)
        self.snapshots.capturing.settings_changed()
        self.settings = settings._replace(socket=self.settings.socket, runtime_dir=self.settings.runtime_dir)

    def refuse_when_stopping(self) -> None:
        if self.stopping:
            raise Unreachable("the daemon is stopping", hint="try again when it has started")


async def _finished(pending: PendingSnapshot) -> None:
    """Returns when it is committed; raises its failure."""
    await pending.finished.wait()
    if pending.failure is not None:
        raise pending.failure


def _lost_state(lost: Promise, *, wait: bool) -> SnapshotState:
    """As of a snapshot that failed in this daemon's life: a state, and an error for who waits."""
    if wait:
        raise CiuicError(f"snapshot {lost.id} failed: {lost.reason}")
    return SnapshotState(
        id=lost.id,
        state="failed",
        time=rfc3339(lost.time_ns),
        error=lost.reason,
        code=CiuicError.exit_code,
        roots=list(lost.roots),
        tags=list(lost.tags),
        message=lost.message,
    )


def _store(settings: Settings) -> Store:
    return Store(settings.repository, block_bytes=settings.block_bytes, trusted=settings.trust_repository)


def _check_repository(config: Config) -> list[Problem]:
    if not config.roots and config.repository.path is None:
        return []
    return check_repository(config, mountinfo.read())
