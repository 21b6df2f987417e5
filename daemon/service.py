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
from collections.abc import Callable, Sequence

import structlog
import trio

from ciuic import mountinfo
from ciuic.child_process import module_command
from ciuic.config import Config, Problem, check_overlaps, check_repository, raise_for
from ciuic.control_types import (
    PruneReport,
    RootStatus,
    SnapshotRequest,
    SnapshotState,
    StatusDocument,
    rfc3339,
)
from ciuic.daemon.accounts import Accounts, Wanted
from ciuic.daemon.alerts import Alerts
from ciuic.daemon.api import make_app
from ciuic.daemon.capture_process import Captures
from ciuic.daemon.events import EventBus
from ciuic.daemon.housekeeping import Housekeeping
from ciuic.daemon.metrics import Metrics
from ciuic.daemon.notify import Notifier
from ciuic.daemon.pairing import Pairing
from ciuic.daemon.pending import PendingSnapshot
from ciuic.daemon.predecessor import end_orphaned_captures
from ciuic.daemon.restart import is_restarting
from ciuic.daemon.roots import Roots
from ciuic.daemon.runtime import RuntimeDirectory, bind_control_socket
from ciuic.daemon.schedule import Schedule
from ciuic.daemon.server import serve_api
from ciuic.daemon.sessions import SessionStore
from ciuic.daemon.settings import Settings, settings_of
from ciuic.daemon.slices import SLICE, SliceWeight
from ciuic.daemon.snapshots import Context, Snapshots
from ciuic.daemon.status import status_document
from ciuic.daemon.store import Store
from ciuic.daemon.supervisor import backing_descriptors
from ciuic.daemon.upkeep import UPKEEP_MODULE, Upkeep
from ciuic.daemon.urging import Urging
from ciuic.daemon.watch import TrainerWatch
from ciuic.errors import CiuicError, NotFound, Unreachable

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
        self.events = EventBus(now_ns)
        self.alerts = Alerts(self.events, now_ns)
        self.metrics_registry = Metrics()
        self.runtime = RuntimeDirectory(self.settings.runtime_dir)
        self.store = _store(self.settings)
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
            )
        )
        self.sessions = SessionStore(notifier, self._stored_fds)
        self.roots = Roots(
            settings=lambda: self.settings,
            runtime=self.runtime,
            store=lambda: self.store,
            alerts=self.alerts,
            events=self.events,
            snapshots=self.snapshots,
            sessions=self.sessions,
            worker_service=worker_service,
        )
        self.upkeep = Upkeep(
            lambda: self.settings,
            lambda: self.store,
            self.snapshots.repository_lock,
            self.alerts,
            cwd=self.settings.runtime_dir,
            now_ns=now_ns,
            command=[*command_prefix, *module_command(UPKEEP_MODULE)],
        )
        self.upkeep.somebody_waits = lambda: self.snapshots.somebody_waits
        self._urging = Urging(
            (self.snapshots.running, self.upkeep.running),
            lambda: self.settings.io_priority,
            SliceWeight() if command_prefix else None,
        )
        self.snapshots.on_urgency = self._urging.wake
        self.snapshots.on_committed = self.upkeep.suggest
        self.snapshots.on_scheduled_lost = self.schedule.post
        self.accounts = Accounts(
            lambda: Wanted(self.settings.group, self.settings.watch.users),
            self.alerts,
            control_socket=self.settings.socket,
        )
        self.watch = TrainerWatch(self, as_service=bool(command_prefix))
        self.slice = SLICE if command_prefix else ""
        """What runs beside the job is in this one."""
        self.stopping = False
        self.retry_schedule = False
        """The scheduled snapshot failed: housekeeping asks for another one soon."""
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
        self.runtime.release()
        log.info("daemon_stopped")

    async def _work(self, nursery: trio.Nursery, working: trio.CancelScope) -> None:
        """Brings everything up and keeps it going until ``working`` is cancelled."""
        with working:
            await trio.to_thread.run_sync(self._captures.prepare)
            records = await trio.to_thread.run_sync(self.runtime.read_pending)
            await end_orphaned_captures(records, self.runtime)
            for root in self.settings.roots:
                self.roots.start(root, nursery)
            self.roots.nursery = nursery
            await self.roots.settled()
            self.sessions.close_rest()
            await self._prepare_store()  # after the roots, which remember where it was
            self.snapshots.trust.take_over(await trio.to_thread.run_sync(self.runtime.read_untrusted))
            self.snapshots.resume(records)
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
                workers.start_soon(self._urging.run)
                workers.start_soon(self.snapshots.run)
                workers.start_soon(self.upkeep.run)
                workers.start_soon(self._follow_schedule)
                workers.start_soon(housekeeping.run)
                workers.start_soon(self.watch.run)

    async def _prepare_store(self) -> None:
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
            self.alerts.report("store", f"the repository cannot be used: {error}", hint=hint)
            log.error("store_unusable", repository=str(self.settings.repository), error=str(error))

    def _last_cut_ns(self) -> int | None:
        try:
            latest = self.store.latest()
        except CiuicError as error:
            log.error("store_unreadable", error=str(error))
            return None
        return latest.time_ns if latest is not None else None

    async def _shut_down(self, working: trio.CancelScope) -> None:
        self.stopping = True
        log.info("daemon_stopping")
        leaving = await is_restarting()
        self._notifier.stopping(
            f"stopping: giving back what is not captured, {'leaving' if leaving else 'unmounting'}"
        )
        self.schedule.stop()
        working.cancel()
        await self.snapshots.stopped()
        await (self.roots.leave_all() if leaving else self.roots.stop_all())
        self.roots.close()
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

    async def _follow_schedule(self) -> None:
        async for _ in self.schedule.ticks:
            if not self.roots.supervisors:
                continue
            if self.snapshots.scheduled_is_waiting():
                log.warning("scheduled_snapshot_skipped")
                self.alerts.report(
                    "behind",
                    "a scheduled snapshot was left out: the one before it is not captured yet",
                    hint="choose a longer interval, or look at what slows the store down",
                    severity="warning",
                )
                continue
            try:
                await self.snapshots.take(SnapshotRequest(), scheduled=True)
            except CiuicError as error:
                log.error("scheduled_snapshot_failed", error=str(error))
                self.alerts.report("schedule", f"the scheduled snapshot failed: {error}", hint=error.hint)
                self.retry_schedule = True
            except Exception as error:
                # A defect in one snapshot must not end the service that takes the next one.
                log.exception("scheduled_snapshot_failed")
                self.alerts.report("schedule", f"the scheduled snapshot failed by a defect: {error!r}")
                self.retry_schedule = True  # out of descriptors or memory is no defect, and passes
            else:
                self.alerts.clear("schedule")
                self.alerts.clear("behind")

    async def _reload_quietly(self) -> None:
        try:
            await self.reload()
        except CiuicError as error:
            log.error("reload_refused", error=str(error))

    # -- what the control API asks for

    async def status(self) -> StatusDocument:
        """Everything, as of now."""
        return await status_document(self)

    async def metrics(self) -> bytes:
        return self.metrics_registry.text(await self.status())

    async def take_snapshot(self, request: SnapshotRequest) -> SnapshotState:
        self._refuse_when_stopping()
        return (await self.snapshots.take(request)).state

    async def snapshot_state(self, snapshot_id: str, *, wait: bool) -> SnapshotState:
        pending = self.snapshots.state(snapshot_id)
        if pending is not None:
            if wait:
                await _finished(pending)
            return pending.state
        found = await trio.to_thread.run_sync(self.store.find, snapshot_id)
        if found is None:
            raise NotFound(
                f"no snapshot {snapshot_id} is known here", hint="ciuic list shows the committed ones"
            )
        return SnapshotState(
            id=str(found.id), state="committed", time=rfc3339(found.time_ns), new_bytes=found.new_bytes
        )

    async def add_root(self, path: str) -> RootStatus:
        self._refuse_when_stopping()
        self._take_over(await trio.to_thread.run_sync(self._read_settings))
        settings = self.settings.root(path)
        if settings is None:
            raise NotFound(
                f"{path} is not in the configuration {self.settings.config_path}",
                hint=f"ciuic protect {path}",
            )
        status = await self.roots.add(settings)
        await self._prepare_store()
        return status

    async def remove_root(self, path: str) -> None:
        await self.roots.remove(path)
        self.settings = self.settings._replace(
            roots=tuple(root for root in self.settings.roots if root.path != path)
        )

    async def prune(self, *, dry_run: bool) -> PruneReport:
        self._refuse_when_stopping()
        return await self.upkeep.prune(dry_run=dry_run)

    async def forget_trainer(self, trainer: str) -> None:
        self.watch.forget(trainer)

    async def reload(self) -> None:
        """Takes a changed configuration up; ConfigError and no change when it cannot be meant."""
        self._refuse_when_stopping()
        before = self.settings
        self._take_over(await trio.to_thread.run_sync(self._read_settings))
        for path in [path for path in self.roots.supervisors if self.settings.root(path) is None]:
            await self.roots.remove(path)
        for root in self.settings.roots:
            self.roots.change_or_start(root)
        await self._prepare_store()
        if before.interval_seconds != self.settings.interval_seconds:
            self.schedule.change_interval(self.settings.interval_seconds)
        self._urging.wake()  # the capture that runs goes on under the new terms
        await self.accounts.refresh()
        log.info("configuration_reloaded", file=self.settings.config_path)

    def request_stop(self) -> None:
        self._stop.set()

    def tell_service_manager(self, line: str) -> None:
        """What `systemctl status` shows."""
        self._notifier.status(line)

    def _read_settings(self) -> Settings:
        """The configuration as it is now; ConfigError and its like when it cannot be meant. Blocks."""
        config = self._load()
        raise_for([*check_overlaps(config.roots), *_check_repository(config)])
        return settings_of(config)

    def _take_over(self, settings: Settings) -> None:
        """New settings, as far as they can change under running workers."""
        if self.settings.repository is not None and settings.repository != self.settings.repository:
            raise CiuicError(
                f"the repository cannot change from {self.settings.repository} to {settings.repository} while running",
                hint="restart the daemon: systemctl restart ciuic",
            )
        if (self.store.path, self.store.trusted) != (settings.repository, settings.trust_repository):
            self.store = _store(settings)
        self.settings = settings._replace(socket=self.settings.socket, runtime_dir=self.settings.runtime_dir)

    def _refuse_when_stopping(self) -> None:
        if self.stopping:
            raise Unreachable("the daemon is stopping", hint="try again when it has started")


async def _finished(pending: PendingSnapshot) -> None:
    """Returns when it is committed; raises its failure."""
    await pending.finished.wait()
    if pending.failure is not None:
        raise pending.failure


def _store(settings: Settings) -> Store:
    return Store(settings.repository, block_bytes=settings.block_bytes, trusted=settings.trust_repository)


def _check_repository(config: Config) -> list[Problem]:
    if not config.roots and config.repository.path is None:
        return []
    return check_repository(config, mountinfo.read())
