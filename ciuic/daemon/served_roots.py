"""Supervisors of all roots, by path: start, add, change, remove and stop them.

Guarantees: one supervisor for each root; a removed or stopped root is unmounted when the call returns.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import structlog
import trio

from ciuic.daemon.base.events import KEY_MISSING, Alerts, EventBus
from ciuic.daemon.base.repository_store import Store
from ciuic.daemon.base.runtime import RuntimeDirectory
from ciuic.daemon.base.settings import RootSettings, Settings
from ciuic.daemon.roots.mount_hooks import MountHooks, RealMounts, is_mounted
from ciuic.daemon.roots.sessions import SessionStore
from ciuic.daemon.roots.snapshots_view import SnapshotsView, ViewPlan
from ciuic.daemon.roots.supervisor import RootSupervisor, backing_descriptors
from ciuic.daemon.roots.view_process import ViewJob
from ciuic.daemon.roots.worker_process import OverlayWorker, WorkerOptions, stop_workers
from ciuic.daemon.snapshots.requests import Snapshots
from ciuic.errors import CiuicError, NotFound
from ciuic.fuse_layer.prefork.client import SpareProcess
from ciuic.fuse_layer.system.mounts import overlay_places, remove_state
from ciuic.protocol.control_types import RootStatus
from ciuic.protocol.worker_client import peer_pid
from ciuic.system.child_process import environment
from ciuic.system.privileges import may_trace

log = structlog.get_logger(__name__)


class ServedRoots:
    """All roots of the daemon. Belongs to the trio thread."""

    def __init__(
        self,
        *,
        settings: Callable[[], Settings],
        runtime: RuntimeDirectory,
        store: Callable[[], Store],
        alerts: Alerts,
        events: EventBus,
        snapshots: Snapshots,
        on_mounted: Callable[[], None],
        supervisors: dict[str, RootSupervisor],
        hooks: MountHooks | None = None,
        sessions: SessionStore | None = None,
        spare: SpareProcess | None = None,
    ) -> None:
        """Prepare to serve roots.

        Args:
            settings: settings in force.
            runtime: directory with the sockets of the workers.
            store: the repository.
            alerts: where failures are reported.
            events: bus that changes of state are announced on.
            snapshots: settles the epochs of new workers, and is told of sessions that end.
            on_mounted: called when a root is served by a new worker.
            supervisors: the dictionary to keep, which other parts read.
            hooks: operations on mounts; None: the real ones.
            sessions: sessions that outlive their workers.
            spare: process that forks workers.
        """
        self.supervisors = supervisors
        self.departing: dict[str, RootSupervisor] = {}
        """Roots that are no longer protected, as long as a process is in their overlay."""
        self.nursery: trio.Nursery | None = None
        self.reconcile_new_sessions = False
        """Settle the pending epochs of new workers; off during the start, when `Snapshots.resume` must
        come first."""
        self._settings = settings
        self._runtime = runtime
        self._store = store
        self._alerts = alerts
        self._events = events
        self._snapshots = snapshots
        self._on_mounted = on_mounted
        self._sessions = sessions
        self._spare = spare or SpareProcess(runtime.path, environment())
        self._views = ViewPlan(self._view_job, runtime.path)
        self._hooks = hooks or RealMounts(self._options, self._own_pids, spare=self._spare, kept=sessions)

    def _view_job(self, path: str) -> ViewJob | None:
        """Return what a process needs to show the snapshots of a root; None where none is to be shown, or there are none yet."""
        settings = self._settings()
        root = settings.root(path)
        if root is None or not root.shows_snapshots or settings.repository is None:
            return None
        # Made when the first root is served.
        if not self._store().is_ready:
            return None
        return ViewJob(
            repository=str(settings.repository),
            root=path,
            socket=str(self._runtime.worker_socket(path)),
            io_priority=settings.io_priority,
        )

    def start(self, root: RootSettings, nursery: trio.Nursery) -> RootSupervisor:
        """Begin to serve a root; `settled` waits for the end of the first attempt."""
        supervisor = RootSupervisor(
            root,
            self._hooks,
            alerts=self._alerts,
            events=self._events,
            on_session=self._session_started,
            on_session_lost=self._snapshots.session_lost,
            view=SnapshotsView(root.path, self._views, self._alerts),
        )
        self.supervisors[root.path] = supervisor
        nursery.start_soon(self._run, supervisor)
        return supervisor

    async def _run(self, supervisor: RootSupervisor) -> None:
        # A root that is protected again goes on with the overlay that is still there.
        departing = self.departing.pop(supervisor.path, None)
        if departing is not None:
            await departing.leave()
        await supervisor.run()

    def _depart(self, settings: RootSettings, nursery: trio.Nursery) -> None:
        """Serve a root that is no longer protected until nobody is in its overlay; then remove its state."""

        async def ignore(path: str, worker: OverlayWorker) -> None: ...

        supervisor = RootSupervisor(
            settings,
            self._hooks,
            alerts=self._alerts,
            events=self._events,
            on_session=ignore,
            on_session_lost=lambda path, session: None,
            departs=True,
        )
        self.departing[settings.path] = supervisor
        nursery.start_soon(self._until_departed, supervisor)

    async def _until_departed(self, supervisor: RootSupervisor) -> None:
        path = supervisor.path
        await supervisor.run()
        if supervisor.state == "unmounted" and self.departing.pop(path, None) is not None:
            await trio.to_thread.run_sync(remove_state, path)
            self._clear_alerts(path)

    def unclaimed(self) -> list[str]:
        """Return the overlays of earlier daemons with this runtime directory that no root claims. Blocks."""
        known = (
            {root.path for root in self._settings().roots} | self.supervisors.keys() | self.departing.keys()
        )
        return [
            path
            for path in map(os.fsdecode, overlay_places())
            # A worker leaves its socket behind where it is killed. What another daemon serves has none here.
            if path not in known and self._runtime.worker_socket(path).exists()
        ]

    async def let_go_of_unclaimed(self) -> None:
        """Serve overlays that no root claims until nobody is in them, like those of roots that are removed.

        A worker whose overlay was moved, with a directory above it, is told to unmount it where it is.
        """
        if self.nursery is None:
            return  # the start does it
        for path in await trio.to_thread.run_sync(self.unclaimed):
            log.warning("overlay_without_root", root=path)
            self._depart(RootSettings(path), self.nursery)
        served = {self._runtime.worker_socket(path) for path in (*self.supervisors, *self.departing)}
        await trio.to_thread.run_sync(stop_workers, self._runtime.worker_sockets() - served)

    async def settled(self) -> None:
        """Wait for the end of every root's first attempt to mount, successful or not."""
        for supervisor in [*self.supervisors.values(), *self.departing.values()]:
            await supervisor.settled()

    async def add(self, root: RootSettings) -> RootStatus:
        """Mount a root unless it is mounted, and return its status.

        Raises:
            UsageError: the directory is gone, or cannot be protected.
            CiuicError: the root is not mounted yet; the daemon keeps trying.
        """
        supervisor = self.change_or_start(root)
        await supervisor.settled()
        # A root that was served before may be without a worker just now.
        await supervisor.not_in_transition()
        if supervisor.state != "mounted":
            raise supervisor.fault(
                f"{root.path} is not protected yet: {supervisor.error}", hint="the daemon keeps trying"
            )
        return await supervisor.status()

    def change_or_start(self, root: RootSettings) -> RootSupervisor:
        """Return the supervisor of a root, started if there was none.

        New excludes hold from the next capture on.
        """
        known = self.supervisors.get(root.path)
        if known is not None:
            known.settings = root
            return known
        if self.nursery is None:
            raise CiuicError("the daemon is starting", hint="try again in a moment")
        return self.start(root, self.nursery)

    async def remove(self, path: str) -> None:
        """Unmount a root and remove ciuic's state directory from it; do nothing where there is no such root.

        Where a process is in its overlay, both happen when the last one has left.

        Raises:
            CiuicError: the root could not be unmounted.
        """
        supervisor = self.supervisors.get(path)
        if supervisor is None:
            return
        # A worker that an earlier umount(8) left with open files shares the state: what it keeps there stays.
        is_shared = supervisor.lingers
        # A duplicate: `stop` closes the worker's own.
        pidfd = os.dup(supervisor.worker.pidfd) if supervisor.worker is not None else None
        try:
            await supervisor.stop()
            if supervisor.state != "unmounted" and not supervisor.in_use:
                if self.nursery is not None:
                    # It stays in the configuration, and the job in it must not wait for ever.
                    self.start(supervisor.settings, self.nursery)
                reason = f": {supervisor.error}" if supervisor.error else ""
                raise CiuicError(f"{path} could not be unmounted{reason}", hint="ciuic status says why")
            self.supervisors.pop(path, None)
            if supervisor.in_use and self.nursery is not None:
                self._depart(supervisor.settings, self.nursery)
            elif not supervisor.lingers:
                await trio.to_thread.run_sync(remove_state, path)
            elif not is_shared and pidfd is not None and self.nursery is not None:
                self.nursery.start_soon(self._remove_state_after, path, pidfd)
                pidfd = None
        finally:
            if pidfd is not None:
                os.close(pidfd)
        self._clear_alerts(path)

    def _clear_alerts(self, path: str) -> None:
        kinds = (
            "root",
            "worker",
            "unmounted",
            "bypass",
            "bypass-unknown",
            "bypass-mounts",
            "abandoned",
            "silent",
            "reserved",
            "left-out",
            "view",
        )
        for kind in kinds:
            self._alerts.clear(f"{kind}:{path}")

    async def _remove_state_after(self, path: str, pidfd: int) -> None:
        """Remove the state of a root once the worker that serves its open files has ended.

        A root that is protected again by then keeps it.
        """
        try:
            await trio.lowlevel.wait_readable(pidfd)
            if path not in self.supervisors:
                await trio.to_thread.run_sync(remove_state, path)
        finally:  # also when the daemon ends first, which cancels its nursery: then the state stays
            os.close(pidfd)

    async def prepare_store(self) -> None:
        """Create the repository where there never was one; an alert says why it cannot be used."""
        if self._settings().repository is None:
            return
        try:
            with backing_descriptors(self.supervisors.values()) as fds:
                if self._settings().roots and not fds:
                    # No mounted root can say whether there was a repository, and there is no root to capture.
                    return
                await trio.to_thread.run_sync(self._store().ensure, fds)
        except (CiuicError, OSError) as error:
            # The roots are served anyway: a repository that fails must not keep the job from its files.
            hint = error.hint if isinstance(error, CiuicError) else ""
            key = KEY_MISSING if isinstance(error, NotFound) else "store"
            self._alerts.report(key, f"no snapshot can be taken: {error}", hint=hint)
            log.error("store_unusable", repository=str(self._settings().repository), error=str(error))

    async def stop_all(self) -> None:
        """Unmount all roots at once."""
        async with trio.open_nursery() as nursery:
            for departing in list(self.departing.values()):
                nursery.start_soon(departing.leave)
            for supervisor in list(self.supervisors.values()):
                nursery.start_soon(supervisor.stop)

    @property
    def any_left_mounted(self) -> bool:
        """True if a root may still be mounted after `stop_all` or `leave_all`, and its session go on."""
        # A daemon that ends before it has taken over its roots leaves those of a killed predecessor mounted.
        return not self.begun or bool(self._states() - {"unmounted"})

    def _states(self) -> set[str]:
        return {one.state for one in (*self.supervisors.values(), *self.departing.values())}

    @property
    def begun(self) -> bool:
        """True once the configured roots are being served."""
        return self.nursery is not None

    async def leave_all(self) -> None:
        """End all supervisors; the workers serve on."""
        async with trio.open_nursery() as nursery:
            for supervisor in [*self.departing.values(), *self.supervisors.values()]:
                nursery.start_soon(supervisor.leave)

    def close(self, *, leaving: bool) -> None:
        """End the process that is kept ready to become a worker.

        Args:
            leaving: the process goes on to hold sessions for the next daemon, as it does for a root that
                could not be unmounted.
        """
        self._spare.close(leave=leaving or not self._states() <= {"unmounted"})

    async def _session_started(self, path: str, worker: OverlayWorker) -> None:
        if self.reconcile_new_sessions:
            await self._snapshots.reconcile(path, worker)
        self._on_mounted()

    def _own_pids(self, root: str) -> set[int]:
        """Return the processes that hold the backing directory by design.

        A worker to adopt, captures of a predecessor, session holders.
        """
        pids = {record.capture_pid for record in self._runtime.read_pending()}
        # A worker whose mount is gone is not among them: it writes for a job that has files open, past the
        # new overlay.
        if is_mounted(root):
            pids.add(peer_pid(self._runtime.worker_socket(root)) or 0)
        return pids | (self._sessions.holders if self._sessions is not None else set())

    def _options(self, root: RootSettings) -> WorkerOptions:
        """Return the worker's options.

        Its block size must be the repository's: dirty blocks are stored as they are tracked.
        """
        return WorkerOptions(
            root=root.path,
            socket=self._runtime.worker_socket(root.path),
            driver=root.driver,
            block_bytes=self._store().block_bytes(),
            undo_limit_bytes=self._settings().undo_limit_bytes,
            tracked_names=self._settings().overlay.tracked_names,
            mapped_names=self._settings().overlay.mapped_names,
            captures_trace=may_trace(),  # captures are started by this process
        )
